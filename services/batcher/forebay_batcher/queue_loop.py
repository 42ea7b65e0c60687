"""The queue's one owner: starts requests whenever one arrives, a slot is freed, the engine changes,
or a wait runs out. It sleeps between these events, and has no part in a request that nobody waits
before while a slot is free.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Set

from forebay_common.errors import ForebayError, Reason
from forebay_wire.waiting import Waiting

from forebay_batcher import metrics
from forebay_batcher.core.queue import (
    Batch,
    Capacity,
    Leave,
    PriorityClass,
    Queue,
    Request,
    Start,
)

# Event loops round timers to milliseconds; one that fires early would fire again and again.
_TIMER_SLACK_S = 0.001
_REFUSALS: Mapping[Reason, tuple[str, float | None]] = {
    Reason.QUEUE_FULL: ("Too many requests wait; try again later.", 1.0),
    Reason.DEADLINE_EXCEEDED: ("The deadline passed before the request could start.", None),
    Reason.MODEL_NOT_LOADED: ("The model cannot be served here at the moment.", 1.0),
}


class QueueLoop:
    """Requests wait here for a slot. Used from one event loop only."""

    def __init__(
        self,
        queue: Queue,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._on_change = on_change
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiters: dict[int, asyncio.Future[Start | Leave]] = {}
        self._arriving = 0
        """Requests that were told to wait, and are about to take their places."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._shown: Set[str] = frozenset()
        self._show()

    @property
    def queue(self) -> Queue:
        """To read from."""
        return self._queue

    def acquire(
        self,
        *,
        request_id: str,
        model_version: str,
        priority: PriorityClass,
        size_bytes: int,
        deadline: float | None,
        prompt_tokens: int = 0,
    ) -> Start | Waiting[Start]:
        """Take a slot, or wait for one. Whoever gets one gives it back with `release`.

        A request takes its place in the queue when its wait begins, and later ones do not pass it
        if that is in the next turn of the event loop. A cancelled wait is forgotten at once.

        Raises:
            ForebayError: QUEUE_FULL, DEADLINE_EXCEEDED, or MODEL_NOT_LOADED, also from the wait.
        """
        now = self._clock()
        number = next(self._numbers)
        request = Request(
            number, request_id, model_version, priority, size_bytes, now, deadline, prompt_tokens
        )
        if not self._arriving:
            answer = self._queue.start_at_once(request, now)
            if isinstance(answer, Start):
                self._count(answer, now)
                self._note()
                return answer
            if answer is not None:
                raise _refusal(answer)
        self._expect_arrival()
        return Waiting(lambda: self._wait(request))

    async def _wait(self, request: Request) -> Start:
        now = self._clock()
        number = next(self._numbers)
        request = dataclasses.replace(request, number=number, arrived=now)
        refusal = self._queue.offer(request, now)
        if refusal is not None:
            raise _refusal(refusal)
        self._waiters[number] = asyncio.get_running_loop().create_future()
        self._wake.set()
        self._note()
        try:
            answer = await self._waiters[number]
        except asyncio.CancelledError:
            # It may have been given a slot in the same turn of the event loop.
            if self._queue.withdraw(number) or self._queue.release(number):
                self._wake.set()
                self._note()
            raise
        finally:
            del self._waiters[number]
        if isinstance(answer, Leave):
            raise _refusal(answer.reason)
        return answer

    def note_answer(self, start: Start) -> None:
        """The answer of a request begins: its prompt no longer waits to be read."""
        if self._queue.note_answer(start.request):
            self._on_change()

    def release(self, number: int) -> None:
        """Free a request's slot. Harmless for one that holds none."""
        if self._queue.release(number) is None:
            return
        if self._queue.waiting:
            self._wake.set()
        self._note()

    def set_capacities(self, capacities: Mapping[str, Capacity]) -> None:
        """Replace what the runners can take."""
        self._queue.set_capacities(capacities)
        for model_version in capacities.keys() - self._shown:
            in_flight = functools.partial(self._queue.in_flight, model_version)
            metrics.IN_FLIGHT.labels(model_version).set_function(in_flight)
        self._shown = frozenset(capacities)
        self._wake.set()
        self._note()

    async def idle(self) -> None:
        """Wait until nothing waits and nothing runs."""
        await self._idle.wait()

    async def run(self) -> None:
        """Start requests until cancelled."""
        while True:
            self._wake.clear()
            batch = self._queue.plan_batch(self._clock())
            if batch:
                self._queue.apply(batch)
                self._deliver(batch)
                continue
            timer = self._timer()
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _timer(self) -> asyncio.TimerHandle | None:
        expiry = self._queue.next_expiry()
        if expiry is None:
            return None
        delay_s = max(0.0, expiry - self._clock()) + _TIMER_SLACK_S
        return asyncio.get_running_loop().call_later(delay_s, self._wake.set)

    def _deliver(self, batch: Batch) -> None:
        now = self._clock()
        for start in batch.starts:
            self._count(start, now)
        answers: tuple[Start | Leave, ...] = (*batch.leaves, *batch.starts)
        for answer in answers:
            waiter = self._waiters[answer.request.number]
            if not waiter.done():
                waiter.set_result(answer)
        self._note()

    def _expect_arrival(self) -> None:
        """Let nobody start past a request that begins to wait in the loop's next turn."""
        loop = asyncio.get_running_loop()
        self._arriving += 1
        loop.call_soon(loop.call_soon, self._has_arrived)

    def _has_arrived(self) -> None:
        self._arriving -= 1

    def _note(self) -> None:
        """After a change: let the owner look again."""
        if self._queue.waiting or self._queue.running:
            self._idle.clear()
        else:
            self._idle.set()
        self._on_change()

    def _show(self) -> None:
        """Let the metrics be read from the queue."""
        queue = self._queue
        metrics.QUEUED_BYTES.set_function(lambda: queue.queued_bytes)
        for priority in PriorityClass:
            depth = functools.partial(queue.depth, priority)
            metrics.QUEUE_DEPTH.labels(priority.name).set_function(depth)

    def _count(self, start: Start, now: float) -> None:
        request = start.request
        wait_s = now - request.arrived
        metrics.STARTS.count(request.priority.word, wait_s=wait_s, overdue=start.overdue)


def _refusal(reason: Reason) -> ForebayError:
    message, retry_after_s = _REFUSALS[reason]
    return ForebayError(reason, message, retry_after_s=retry_after_s)
