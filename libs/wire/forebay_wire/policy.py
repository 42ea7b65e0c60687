"""What a relay asks of the service it serves: whom to let in, where to, and what after a failure.

Router and batcher differ on the token path in their `Policy` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from forebay_common.errors import ForebayError
from forebay_common.metadata import Metadata, Usage

SERVICE = "forebay.inference.v1.InferenceService"


class Method(StrEnum):
    """A method of InferenceService."""

    GENERATE = "Generate"
    EMBED = "Embed"
    CALL_OPENAI = "CallOpenAI"

    path: str
    """The method's HTTP/2 path."""
    streams: bool
    """Whether it answers with a stream."""

    def __init__(self, name: str) -> None:
        self.path = f"/{SERVICE}/{name}"
        self.streams = name != "Embed"


class Outcome(StrEnum):
    """How a request ended. Every admitted request has exactly one."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclasses.dataclass(slots=True, eq=False)
class Head:
    """What is known of a request without its message. Nobody changes it."""

    method: Method
    metadata: dict[str, str]
    """Text metadata of the caller, keys in lower case."""
    deadline: float | None
    """On the clock of `time.monotonic`, in seconds; None when the caller gave none."""
    request_id: str


@dataclasses.dataclass(slots=True, eq=False)
class Route:
    """Where a request goes, and as what. Nobody changes it; it is not frozen because that takes
    three times as long to make, and every request makes one."""

    target: str
    """Address of the next hop: `host:port` or `unix:/path`."""
    metadata: Metadata
    """All metadata the next hop gets."""
    deadline: float | None
    """On the clock of `time.monotonic`, in seconds."""
    message: bytes | None = None
    """Sent in place of the caller's message; None sends that one."""
    context: Any = None
    """The policy's own; a relay does not look at it."""


@dataclasses.dataclass(slots=True)
class Progress:
    """What has reached the caller so far, over all attempts."""

    messages: int = 0
    message_bytes: int = 0
    started_s: float = 0.0
    """When the relay began, on the clock of `time.monotonic`."""
    first_message_s: float | None = None
    """When the first message came, on the same clock."""
    usage: Usage | None = None
    """From the trailing metadata of the attempt that succeeded."""
    trailing: Metadata = ()
    """Forebay's own trailing metadata of the last attempt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Try again from the beginning. Only while nothing has reached the caller."""

    route: Route


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
    """End the request with this error."""

    error: ForebayError


Decision: TypeAlias = Retry | Fail


class Policy(Protocol):
    """Decides for a relay. All calls come from the relay's event loop."""

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        """Choose where a request goes.

        Answers at once where it can, which spares a task per request; an awaitable is for requests
        that wait. If the wait is cancelled, the policy forgets the request by itself.

        Raises:
            ForebayError: the request is refused; `on_end` is not called. The awaitable may raise
                it, too.
        """
        ...

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """Choose what follows a failed attempt. A `Retry` is only obeyed before the first message.

        On Retry the old route's place is given up and the new one taken; on Fail `on_end` follows.
        """
        ...

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """Called exactly once for every admitted request, with its last route."""
        ...
