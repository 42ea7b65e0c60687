"""Builders with defaults."""

from collections.abc import Callable
from typing import Any

import pytest
from forebay_client.traces.core.span import Span

_BASE_NS = 1_700_000_000_000_000_000


def a_span(
    span_id: str, parent: str = "", *, at: float = 0, ms: float = 1, name: str = "", **more: Any
) -> Span:
    start = _BASE_NS + round(at * 1e6)
    fields: dict[str, Any] = {"trace_id": "t" * 32, "service": "s", "instance": "i", **more}
    return Span(
        span_id=span_id,
        parent_id=parent,
        name=name or span_id,
        start_unix_ns=start,
        end_unix_ns=start + round(ms * 1e6),
        **fields,
    )


@pytest.fixture
def span() -> Callable[..., Span]:
    return a_span
