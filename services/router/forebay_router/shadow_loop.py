"""Sends copies of requests to versions that are being tried, and counts how they compare.

A copy goes out when the request it is of has ended, in the lowest class, once, to a replica that
has the version already. Its answer is dropped. What does not fit the bounds is not copied: callers
never wait for a copy, and no copy takes the place of a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Set

from forebay_common import metadata as md
from forebay_common.buckets import Buckets
from forebay_common.errors import ForebayError, Reason
from forebay_wire.client import ClientPool
from forebay_wire.policy import (
    Decision,
    Fail,
    Head,
    Method,
    Outcome,
    Policy,
    Progress,
    Route,
)
from forebay_wire.relay import Relay

from forebay_router.core.place import Ask, Exclusions, Placer, Ticket
from forebay_router.core.shadow import SUCCEEDED, Answered, compare, tokens_of

_log = logging.getLogger(__name__)
CLASS = md.CLASSES[-1]
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300, 600)


@dataclasses.dataclass(slots=True, eq=False)
class Copy:
    """A request to be copied."""

    model_version: str
    """What it goes to."""
    method: Method
    message: bytes
    request_id: str
    prompt_tokens: int
    primary: Answered


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Bounds of all copies together."""

    at_once: int = 4
    waiting: int = 64
    waiting_bytes: int = 32 << 20
    timeout_s: float = 120.0


class Figures:
    """What is counted, by the version that is tried."""

    def __init__(self) -> None:
        self.copies: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By result: `succeeded`, a reason, or `dropped` where the bounds were reached."""
        self.compared: defaultdict[tuple[str, str, bool], int] = defaultdict(int)
        """By what was compared, and whether it was the same."""
        self.first_s: dict[tuple[str, str], Buckets] = {}
        """To the first message, by whose answer it is: `primary` or `copy`."""
        self.took_s: dict[tuple[str, str], Buckets] = {}

    def add(self, copy: Copy, answered: Answered) -> None:
        """Count a copy that has ended."""
        version = copy.model_version
        self.copies[version, answered.outcome] += 1
        for what, is_same in compare(copy.primary, answered):
            self.compared[version, what, is_same] += 1
        if answered.outcome != SUCCEEDED or copy.primary.outcome != SUCCEEDED:
            return
        for who, each in (("primary", copy.primary), ("copy", answered)):
            self._observe(self.took_s, (version, who), each.took_s)
            if each.first_s is not None:
                self._observe(self.first_s, (version, who), each.first_s)

    def _observe(
        self, into: dict[tuple[str, str], Buckets], key: tuple[str, str], value: float
    ) -> None:
        buckets = into.get(key)
        if buckets is None:
            buckets = into[key] = Buckets(_SECONDS)
        buckets.observe(value)


class Shadows:
    """The copies of one router."""

    def __init__(
        self,
        placer: Placer,
        pool: ClientPool,
        options: Options,
        *,
        down: Set[str],
        ejected: Set[str],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`down` and `ejected` are live sets of replicas that get no copies."""
        self.figures = Figures()
        self._options = options
        self._clock = clock
        self._relay = Relay(_CopyPolicy(placer, down, ejected, rng, clock), pool)
        self._waiting: asyncio.Queue[Copy] = asyncio.Queue(options.waiting)
        self._waiting_bytes = 0

    def offer(self, copy: Copy) -> None:
        """Have a request copied, as soon as there is room, where there is room to wait."""
        size = len(copy.message)
        if self._waiting.full() or self._waiting_bytes + size > self._options.waiting_bytes:
            self.figures.copies[copy.model_version, "dropped"] += 1
            return
        self._waiting_bytes += size
        self._waiting.put_nowait(copy)

    async def run(self) -> None:
        """Send copies until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._options.at_once):
                tasks.create_task(self._send_on())

    async def _send_on(self) -> None:
        while True:
            copy = await self._waiting.get()
            self._waiting_bytes -= len(copy.message)
            try:
                self.figures.add(copy, await self._send(copy))
            except Exception:
                _log.exception("a copy failed unexpectedly")

    async def _send(self, copy: Copy) -> Answered:
        began_s = self._clock()
        head = Head(
            method=copy.method,
            metadata={md.MODEL: copy.model_version, md.PROMPT_TOKENS: str(copy.prompt_tokens)},
            deadline=began_s + self._options.timeout_s,
            request_id=f"copy-{copy.request_id}"[:128],
        )
        progress = Progress()
        messages: list[bytes] = []
        outcome = SUCCEEDED
        try:
            async for message in self._relay.stream(head, copy.message, progress):
                messages.append(message)  # noqa: PERF401  # those before a failure count, too
        except ForebayError as error:
            outcome = error.reason.value
        usage, first_s = progress.usage, progress.first_message_s
        return Answered(
            outcome,
            self._clock() - began_s,
            first_s - began_s if first_s is not None else None,
            usage.completion_tokens if usage is not None else None,
            tokens_of(messages, is_openai=copy.method is Method.CALL_OPENAI)
            if copy.method is not Method.EMBED
            else None,
        )


class _CopyPolicy(Policy):
    """Sends a copy once, to whoever has the version."""

    def __init__(
        self,
        placer: Placer,
        down: Set[str],
        ejected: Set[str],
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._placer = placer
        self._down = down
        self._ejected = ejected
        self._rng = rng
        self._clock = clock

    def admit(self, head: Head, message: bytes) -> Route:
        """See `forebay_wire.policy.Policy`."""
        now = self._clock()
        version = head.metadata[md.MODEL]
        prompt_tokens = head.metadata[md.PROMPT_TOKENS]
        ask = Ask(version, int(prompt_tokens), None, CLASS)
        exclusions = Exclusions(self._down, self._ejected)
        placement = self._placer.choose(ask, now, self._rng, exclusions)
        if placement.chosen is None:
            raise ForebayError(Reason.NO_REPLICA, "No replica has the version that is tried.")
        return Route(
            target=placement.chosen.address,
            metadata=(
                (md.REQUEST_ID, head.request_id),
                (md.MODEL, version),
                (md.ATTEMPT, "1"),
                (md.CLASS, CLASS),
                (md.PROMPT_TOKENS, prompt_tokens),
                (md.SHADOW, "1"),
            ),
            deadline=head.deadline,
            context=self._placer.begin(ask, placement, now),
        )

    def on_first(self, head: Head, route: Route, progress: Progress) -> None:
        """See `forebay_wire.policy.Policy`."""
        self._placer.first(route.context, self._clock())

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """See `forebay_wire.policy.Policy`."""
        return Fail(error)

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """See `forebay_wire.policy.Policy`."""
        ticket: Ticket = route.context
        self._placer.end(ticket, self._clock(), succeeded=outcome is Outcome.SUCCEEDED)
