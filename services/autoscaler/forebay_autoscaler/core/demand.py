"""How many active replicas demand wants, and the clamps on the way to what is desired.

Demand is ceil(requests / target). A replica of which nothing is known counts as idle on the way up,
as busy on the way down, and while there is one nothing is taken away. Every clamp has a name; the
last one that changed the number is the decision's reason. Bounds come after steps and windows, so
that what is desired never lies outside them; only a pause overrules them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from forebay_autoscaler.core.model import Limits, Policy

STEADY = "steady"
QUEUE_DEPTH = "queue_depth"


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What the clamps look at."""

    policy: Policy
    limits: Limits
    active: int
    missing: int
    """Active replicas of which nothing is known."""
    is_draining: bool
    """A replica is on its way out."""
    recent_demand: int
    """The highest demand within the window, this one included."""


def demand(requests: Sequence[int | None], *, target: int) -> int:
    """Active replicas wanted for the requests on each active replica."""
    known = sum(each for each in requests if each is not None)
    missing = sum(each is None for each in requests)
    as_idle = -(-known // target)
    if as_idle >= len(requests):
        return as_idle
    as_busy = -(-known // target) + missing
    return min(len(requests), as_busy)


def _missing_data(wanted: int, at: Situation) -> int:
    return max(wanted, at.active) if at.missing else wanted


def _scale_down_window(wanted: int, at: Situation) -> int:
    return wanted if wanted >= at.active else min(at.active, max(wanted, at.recent_demand))


def _scale_up_step(wanted: int, at: Situation) -> int:
    return min(wanted, at.active + at.limits.scale_up_step)


def _scale_down_step(wanted: int, at: Situation) -> int:
    return max(wanted, at.active - (0 if at.is_draining else 1))


def _min_replicas(wanted: int, at: Situation) -> int:
    return max(wanted, at.policy.min_replicas)


def _max_replicas(wanted: int, at: Situation) -> int:
    return min(wanted, at.policy.max_replicas)


def _paused(wanted: int, at: Situation) -> int:
    return at.active if at.policy.paused else wanted


CLAMPS: tuple[tuple[str, Callable[[int, Situation], int]], ...] = (
    ("missing_data", _missing_data),
    ("scale_down_window", _scale_down_window),
    ("scale_up_step", _scale_up_step),
    ("scale_down_step", _scale_down_step),
    ("min_replicas", _min_replicas),
    ("max_replicas", _max_replicas),
    ("paused", _paused),
)


def clamp(demanded: int, at: Situation) -> tuple[int, str]:
    """What is desired, and one word for why."""
    reason = STEADY if demanded == at.active else QUEUE_DEPTH
    wanted = demanded
    for name, apply in CLAMPS:
        clamped = apply(wanted, at)
        if clamped != wanted:
            wanted, reason = clamped, name
    return wanted, "paused" if at.policy.paused else reason


def remember(
    demands: tuple[tuple[float, int], ...], demanded: int, *, now_s: float, window_s: float
) -> tuple[tuple[float, int], ...]:
    """The demands that can still be the window's maximum, the highest and oldest first."""
    kept = [
        (at_s, wanted) for at_s, wanted in demands if now_s - at_s < window_s and wanted > demanded
    ]
    return (*kept, (now_s, demanded))
