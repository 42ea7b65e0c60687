"""Leaving in an order that loses no request: tell, wait until it was heard, refuse, finish."""

from __future__ import annotations

import asyncio

from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Replica


class Drain:
    """Takes the replica out of service, once, whoever orders it and however often."""

    def __init__(self, replica: Replica, queue: QueueLoop, *, linger_s: float) -> None:
        self._replica = replica
        self._queue = queue
        self._linger_s = linger_s
        self._closing: asyncio.Task[None] | None = None

    def begin(self, fence: int) -> None:
        """Obey the order. Watchers and discovery hear of it at once.

        Raises:
            ForebayError: STALE_FENCE.
        """
        self._replica.set_standing(self._replica.standing.drain(fence))
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="drain")

    async def finished(self) -> None:
        """Wait until no request is left. The drain goes on if the waiter leaves."""
        assert self._closing is not None, "begin() comes first"
        await asyncio.shield(self._closing)
        await self._queue.idle()

    async def _close(self) -> None:
        await asyncio.sleep(self._linger_s)
        self._replica.set_standing(self._replica.standing.close())
