"""What a relay asks of the service it serves: whom to let in, where to, and what after a failure.

Router and batcher differ on the token path in their `Policy` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

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
    tell: Callable[[str, str, float], None] | None = None
    """While it waits, a policy may tell the caller what for: model version, phase, seconds waited.
    None where nobody listens."""


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
    answer: Metadata = ()
    """For the caller: HTTP headers of the answer, or trailing metadata of the call."""
    kept_bytes: int = 0
    """Most bytes of the answer that are kept as they pass, so that it can be resumed; 0 keeps none.
    An answer that outgrows them cannot be."""
    first_message_s: float | None = None
    """Longest wait for the attempt's first message, in seconds; then it has failed with
    REPLICA_LOST. None is no limit."""
    silence_s: float | None = None
    """Longest time between two messages of the attempt after that, in seconds."""
    tells_delivered: bool = False
    """`on_end` gets the messages that were kept, too."""
    hedge_s: float | None = None
    """After so many seconds without a message, `Policy.hedge` is asked for a second attempt."""


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
    delivered: Sequence[bytes] | None = None
    """The whole messages that reached the caller, encoded and not compressed, for `on_failure`, and
    for `on_end` where the route says so; None where they were not kept, were compressed, or outgrew
    their limit."""
    attempt_messages: int = 0
    """Messages of the present attempt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Try again from the beginning. Only while nothing has reached the caller."""

    route: Route


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """Go on elsewhere after what was delivered: the new route's message says where, and its answer
    is passed on as the continuation. What the last replica may still send is discarded."""

    route: Route


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """End the request well: all of its answer was delivered, and only the status was lost."""

    trailing: Metadata
    """Forebay's own trailing metadata that was lost with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
    """End the request with this error."""

    error: ForebayError


Decision: TypeAlias = Retry | Resume | Finish | Fail


class Policy:
    """Decides for a relay. All calls come from the relay's event loop."""

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        """Choose where a request goes.

        Answers at once where it can, which spares a task per request; an awaitable is for requests
        that wait. If the wait is cancelled, the policy forgets the request by itself.

        Raises:
            ForebayError: the request is refused; `on_end` is not called. The awaitable may raise
                it, too.
        """
        raise NotImplementedError

    def on_first(self, head: Head, route: Route, progress: Progress) -> None:
        """The first message of an attempt came. Only asked where a policy overrides it."""

    def hedge(self, head: Head, route: Route, progress: Progress) -> Route | None:
        """Choose a second attempt beside one that has sent nothing for its `hedge_s`; None for
        none. Whichever sends first goes on."""
        return None

    def on_dropped(self, head: Head, route: Route, error: ForebayError | None) -> None:
        """One of two attempts was given up: the other sent first, or it failed while the other
        still runs, with this error. Its place is free again."""

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """Choose what follows a failed attempt. A `Retry` is only obeyed before the first message,
        a `Resume` only after it and where `progress.delivered` is there.

        On Retry and Resume the old route's place is given up and the new one taken; on Fail
        `on_end` follows.
        """
        return Fail(error)

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """Called exactly once for every admitted request, with its last route."""
        raise NotImplementedError
