"""How long a first token takes, learned from what happened.

Of each model version: `base + rate * tokens`, by a straight line through recent first tokens in
which old ones fade. Of each replica: by what factor it is slower than the others, which fades back
to 1 while nothing is heard of it, so that one that was slow is tried again.

The line follows what replicas have in common and the factors what sets them apart: the line learns
from what was observed, divided by the replica's factor and multiplied by the usual one. Without
that a fleet that is slower than was assumed would have factors above 1 everywhere, and whoever
joins it with a factor of 1 would look faster than all others.
"""

from __future__ import annotations

import math

_FADES = 0.98
"""What an observation's weight is multiplied with at each further one."""
_OUTLIER = 8.0
"""What differs more from the expected than by this factor counts as differing by it."""
_USUAL_SHARE = 0.02
_FACTOR_SHARE = 0.2
_FACTOR_MOST = 50.0
_NOISE = 0.2
"""Up to such a logarithm, a factor is taken for noise: first tokens differ by more."""
_FORGETS_S = 60.0
"""Time in which a factor loses half of its distance to 1, on a logarithmic scale."""
_STALE_S = 5.0
"""Time without an observation that makes the next one count as if it were two."""


class Line:
    """Milliseconds to the first token over the prompt tokens that were computed before it."""

    __slots__ = ("_n", "_usual", "_x", "_xx", "_xy", "_y", "base_ms", "rate_ms")

    def __init__(self, *, base_ms: float, rate_ms: float) -> None:
        """Starts with what is usual, which counts as one observation at 0 and at 1,000 tokens."""
        self.base_ms = base_ms
        self.rate_ms = rate_ms
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._usual = 0.0
        self._add(0.0, base_ms, base_ms)
        self._add(1000.0, base_ms + 1000.0 * rate_ms, base_ms + 1000.0 * rate_ms)

    def expected_ms(self, tokens: float) -> float:
        """Until the first token of a replica like most."""
        return self.base_ms + self.rate_ms * tokens

    def observe(self, tokens: float, took_ms: float, factor: Factor) -> None:
        """A first token took so long on a replica with this factor."""
        expected_ms = self.expected_ms(tokens)
        self._usual += _USUAL_SHARE * (factor.log - self._usual)
        relative = math.exp(factor.log - self._usual)
        took_ms = min(_OUTLIER * expected_ms, max(expected_ms / _OUTLIER, took_ms / relative))
        self._add(tokens, took_ms, expected_ms)
        variance = self._n * self._xx - self._x * self._x
        if variance > 1e-6 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / variance
            self.rate_ms = max(1e-4, slope)
        mean = (self._y - self.rate_ms * self._x) / self._n
        if mean < 0.1:
            # All of it is explained by the tokens: the line goes through the origin.
            mean = 0.1
            self.rate_ms = max(1e-4, self._xy / self._xx if self._xx else self.rate_ms)
        self.base_ms = mean

    def _add(self, tokens: float, took_ms: float, expected_ms: float) -> None:
        # How far first tokens are off grows with how long they take.
        weight = 1.0 / (expected_ms * expected_ms + 1.0)
        self._n = self._n * _FADES + weight
        self._x = self._x * _FADES + weight * tokens
        self._y = self._y * _FADES + weight * took_ms
        self._xx = self._xx * _FADES + weight * tokens * tokens
        self._xy = self._xy * _FADES + weight * tokens * took_ms


class Factor:
    """How much slower a replica is than its model's line."""

    __slots__ = ("_at_s", "log")

    def __init__(self, now: float) -> None:
        self.log = 0.0
        """The natural logarithm of the factor when it was last observed."""
        self._at_s = now

    def at(self, now: float) -> float:
        """The factor at a time; 1 where it may be noise."""
        log = self.log
        if -_NOISE <= log <= _NOISE:
            return 1.0
        faded: float = log * 0.5 ** (max(0.0, now - self._at_s) / _FORGETS_S)
        if faded > _NOISE:
            return math.exp(faded - _NOISE)
        return math.exp(faded + _NOISE) if faded < -_NOISE else 1.0

    def observe(self, took_ms: float, expected_ms: float, now: float) -> None:
        """What was expected to take `expected_ms` on a usual replica took `took_ms`."""
        ratio = took_ms / max(expected_ms, 0.1)
        observed = math.log(min(_FACTOR_MOST, max(1 / _FACTOR_MOST, ratio)))
        silent_s = max(0.0, now - self._at_s)
        # What is known is worth the less the older it is.
        kept = (1.0 - _FACTOR_SHARE) ** (1.0 + min(silent_s / _STALE_S, 20.0))
        self.log = kept * self.log * 0.5 ** (silent_s / _FORGETS_S) + (1.0 - kept) * observed
        self._at_s = now
