"""When the next frame of a stream may leave.

With many streams open, what a token costs on its way is mostly the frame around it. Then frames of
a stream are an interval apart, and hold what the engine gave meanwhile. All streams wait for the
same ticks, so that what leaves at a tick leaves at once.

Ticks are an interval apart from when the first stream began to wait. A frame that leaves a little
after a tick counts as of that tick, so a frame waits for at most 1.75 intervals.
"""

import math

_LATE = 0.25
"""How far behind a tick, in intervals, a frame still counts as of that tick."""


class Pace:
    """Counts open streams, and says when each of them may go on."""

    def __init__(self, *, from_streams: int, interval_s: float) -> None:
        self.streams = 0
        self._from_streams = from_streams
        self._interval_s = interval_s
        self._begun = 0.0
        self._latest = -math.inf

    def next_tick(self, now: float) -> float | None:
        """Return when a stream whose frame has just left may send the next; None is at any time.

        Args:
            now: seconds, on the clock of the answer.
        """
        if self.streams < self._from_streams or not self._interval_s:
            return None
        if now >= self._latest:
            # Nobody waits: ticks begin anew, from here.
            self._begun = now
        ticks = math.ceil((now - self._begun) / self._interval_s + 1 - _LATE)
        tick = self._begun + ticks * self._interval_s
        self._latest = max(self._latest, tick)
        return tick
