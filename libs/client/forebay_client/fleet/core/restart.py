"""When a process that died is started again: pauses that double up to a cap."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient a supervisor is. Seconds."""

    first_s: float
    most_s: float
    stable_s: float
    """A life this long is forgiven: the next pause is the first one again."""
    start_attempts: int
    """Deaths in a row, before the process was ever ready, after which it is given up."""


@dataclasses.dataclass(slots=True)
class Restarts:
    """The deaths of one process."""

    policy: RestartPolicy
    count: int = 0
    """All of them."""
    in_a_row: int = 0

    def on_death(self, *, lived_s: float, was_ever_ready: bool) -> float | None:
        """The pause before the next start, in seconds; None: give up."""
        self.count += 1
        self.in_a_row = 1 if lived_s >= self.policy.stable_s else self.in_a_row + 1
        if not was_ever_ready and self.in_a_row >= self.policy.start_attempts:
            return None
        # The exponent is capped too, so that no number of deaths overflows.
        return min(self.policy.most_s, self.policy.first_s * 2.0 ** min(self.in_a_row - 1, 30))
