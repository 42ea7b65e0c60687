"""The queue's one owner: starts requests whenever one arrives, a slot is freed, the engine changes,
or a wait runs out. It sleeps between these events.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping

from forebay_common.errors import ForebayError, Reason

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
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queue(self) -> Queue:
        """To read from."""
        return self._queue

    async def acquire(
        self,
        *,
        request_id: str,
        model_version: str,
        priority: PriorityClass,
        size_bytes: int,
        deadline: float | None,
    ) -> Start:
        """Wait for a slot. Whoever gets one gives it back with `release`. A cancelled wait is
        forgotten at once.

        Raises:
            ForebayError: QUEUE_FULL, DEADLINE_EXCEEDED, or MODEL_NOT_LOADED.
        """
        now = self._clock()
        number = next(self._numbers)
        request = Request(number, request_id, model_version, priority, size_bytes, now, deadline)
        refusal = self._queue.offer(request, now)
        if refusal is not None:
            raise _refusal(refusal)
        self._waiters[number] = asyncio.get_running_loop().create_future()
        self._note(request)
        try:
            answer = await self._waiters[number]
        except asyncio.CancelledError:
            # It may have been given a slot in the same turn of the event loop.
            left = self._queue.withdraw(number) or self._queue.release(number)
            if left is not None:
                self._note(left)
            raise
        finally:
            del self._waiters[number]
        if isinstance(answer, Leave):
            raise _refusal(answer.reason)
        return answer

    def release(self, number: int) -> None:
        """Free a request's slot. Harmless for one that holds none."""
        if (request := self._queue.release(number)) is not None:
            self._note(request)

    def set_capacities(self, capacities: Mapping[str, Capacity]) -> None:
        """Replace what the runners can take."""
        self._queue.set_capacities(capacities)
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
            label = start.request.priority.name
            metrics.QUEUE_WAIT.labels(label).observe(now - start.request.arrived)
            metrics.DISPATCHES.labels(label, str(start.overdue).lower()).inc()
        answers: tuple[Start | Leave, ...] = (*batch.leaves, *batch.starts)
        for answer in answers:
            waiter = self._waiters[answer.request.number]
            if not waiter.done():
                waiter.set_result(answer)
        self._note(*(answer.request for answer in answers))

    def _note(self, *requests: Request) -> None:
        """After a change: let the owner look again, and show what these requests changed."""
        queue = self._queue
        self._wake.set()
        for priority in {request.priority for request in requests}:
            metrics.QUEUE_DEPTH.labels(priority.name).set(queue.depth(priority))
        for model_version in {request.model_version for request in requests}:
            metrics.IN_FLIGHT.labels(model_version).set(queue.in_flight(model_version))
        metrics.QUEUED_BYTES.set(queue.queued_bytes)
        if queue.waiting or queue.running:
            self._idle.clear()
        else:
            self._idle.set()
        self._on_change()


def _refusal(reason: Reason) -> ForebayError:
    message, retry_after_s = _REFUSALS[reason]
    return ForebayError(reason, message, retry_after_s=retry_after_s)
