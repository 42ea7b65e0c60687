"""How many attempts beyond the first a router may make, so that retries do not become the load.

Each request pays a share of an attempt in, each further attempt takes a whole one out; a small rate
comes on top, so that a router with little traffic can retry at all.
"""

from __future__ import annotations


class AttemptBudget:
    """Further attempts as a share of requests."""

    def __init__(self, *, share: float, per_s: float, most: float = 100.0) -> None:
        """
        Args:
            share: further attempts per request, 0 to 1.
            per_s: further attempts per second that need no requests.
            most: how many can be saved up.
        """
        self._share = share
        self._per_s = per_s
        self._most = most
        self._level = min(most, 10.0 * per_s)
        self._filled_s: float | None = None

    def pay_in(self) -> None:
        """A request came."""
        level = self._level + self._share
        self._level = level if level < self._most else self._most

    def take(self, now: float) -> bool:
        """Take one attempt out, if there is one."""
        if self._filled_s is not None:
            elapsed_s = max(0.0, now - self._filled_s)
            self._level = min(self._most, self._level + elapsed_s * self._per_s)
        self._filled_s = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
