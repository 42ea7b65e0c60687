"""How much useless traffic a peer may send before its connection ends.

Every frame that makes us work and carries nothing costs one: a ping, settings, a reset, empty DATA.
Patience comes back with time, and with what we write: its reader has reason to acknowledge, to
measure, to abort. Credit for window updates is kept apart and hardly limited, because a reader that
was stalled may return all of them at once.
"""

from __future__ import annotations

_UPDATES_MAX = 1 << 20


class Patience:
    """What one peer has left."""

    __slots__ = ("_burst", "_left", "_per_s", "_since", "_updates")

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        """`burst` frames at once, `per_s` in the long run; `now` in seconds."""
        self._burst = float(burst)
        self._left = float(burst)
        self._per_s = per_s
        self._since = now
        self._updates = 0

    def earn(self, pieces: int) -> None:
        """We wrote something: a DATA frame is two pieces, any other frame one."""
        self._left = min(self._left + pieces / 2, self._burst)
        self._updates = min(self._updates + pieces, _UPDATES_MAX)

    def bear(self, now: float) -> bool:
        """Bear with one useless frame; False when there were too many."""
        self._left -= 1.0
        if self._left > 0:
            return True
        earned = (now - self._since) * self._per_s
        self._since = now
        self._left = min(self._left + earned, self._burst)
        return self._left > 0

    def bear_update(self, now: float) -> bool:
        """Bear with a WINDOW_UPDATE: each DATA frame of ours may be answered by two."""
        if self._updates > 0:
            self._updates -= 1
            return True
        return self.bear(now)
