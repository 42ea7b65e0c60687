"""Makes streams wait for the ticks of their pace, all on one timer, so that they go on together."""

import asyncio
from types import TracebackType
from typing import Self

from forebay_engine.core.pace import Pace
from forebay_engine.runner.backend import Call


class Ticker:
    """Wakes the streams that wait for a tick. It belongs to one event loop."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._waiting: dict[float, list[asyncio.Future[None]]] = {}

    def stream(self, call: Call) -> "Stream":
        """Return the pacing of one call's answer, as a context manager."""
        return Stream(self, call)

    def waiter(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return what ends at the next tick; None where nothing needs to wait."""
        tick = self.pace.next_tick(loop.time())
        if tick is None:
            return None
        waiting = self._waiting.get(tick)
        if waiting is None:
            waiting = self._waiting[tick] = []
            loop.call_at(tick, self._wake, tick)
        waiter = loop.create_future()
        waiting.append(waiter)
        return waiter

    def _wake(self, tick: float) -> None:
        for waiter in self._waiting.pop(tick):
            _end(waiter)


class Stream:
    """One answer. It counts as a stream from its first frame that is not its last."""

    def __init__(self, ticker: Ticker, call: Call) -> None:
        self._ticker = ticker
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._counted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._counted:
            self._ticker.pace.streams -= 1

    def wait(self) -> asyncio.Future[None] | None:
        """Return what to await after a frame that is not the last; None is to go on at once.

        It ends sooner when the engine has ended the answer.
        """
        if not self._counted:
            self._counted = True
            self._ticker.pace.streams += 1
        if self._call.generating == 0:
            return None
        waiter = self._ticker.waiter(self._loop)
        if waiter is not None:
            self._call.on_generated = lambda: _end(waiter)
        return waiter


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
