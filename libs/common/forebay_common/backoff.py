"""How long to wait before trying again.

Waits double from `base_s` to `cap_s`; each is drawn from the upper half, so that callers who failed
together do not return together, and none returns at once.
"""

from __future__ import annotations

import random


class Backoff:
    """The waits of one series of failures. `reset()` once something worked."""

    def __init__(self, *, base_s: float, cap_s: float, rng: random.Random) -> None:
        if not 0 < base_s <= cap_s:
            raise ValueError(f"need 0 < base_s <= cap_s, not {base_s} and {cap_s}")
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng
        self._next_s = base_s

    def next_s(self) -> float:
        """The wait after one more failure, in seconds."""
        ceiling_s = self._next_s
        self._next_s = min(self._cap_s, ceiling_s * 2)
        return ceiling_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again from the shortest wait."""
        self._next_s = self._base_s
