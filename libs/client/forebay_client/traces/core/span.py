"""A span as it is kept and shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

REQUEST_ID = "forebay.request_id"
"""The attribute that names the request a span belongs to."""

Scalar: TypeAlias = str | bool | int | float
Value: TypeAlias = Scalar | tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A moment in a span."""

    name: str
    time_unix_ns: int
    attributes: Mapping[str, Value]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of work in a trace. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root of a trace."""
    name: str
    service: str
    instance: str
    start_unix_ns: int
    end_unix_ns: int
    failed: bool = False
    message: str = ""
    """Why it failed; may be empty."""
    attributes: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @property
    def duration_ms(self) -> float:
        """Milliseconds from start to end."""
        return (self.end_unix_ns - self.start_unix_ns) / 1e6

    @property
    def request_id(self) -> str:
        """The request it says it belongs to; empty where it does not say."""
        value = self.attributes.get(REQUEST_ID, "")
        return value if isinstance(value, str) else ""
