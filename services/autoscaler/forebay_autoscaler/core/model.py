"""The values a tick works on: policy and limits, what is seen, what is ordered, what is concluded.

Times are seconds on one monotonic clock that the caller reads; ages are seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def frozen(mapping: Mapping[_K, _V]) -> Mapping[_K, _V]:
    """A copy that cannot be changed."""
    return MappingProxyType(dict(mapping))


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """How a pool is to be sized; `check_pool` makes one of what a caller sends."""

    name: str
    min_replicas: int
    """Fewest active replicas."""
    max_replicas: int
    """Most replicas, whatever they do."""
    standby_replicas: int
    """Loaded replicas kept in waiting, as far as `max_replicas` leaves room."""
    target_requests: int
    """Requests, queued and running, that one active replica should have."""
    scale_down_window_s: float
    """For how long demand must have been lower before a replica is taken away."""
    paused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every pool alike."""

    tick_interval_s: float = 1.0
    stale_after_s: float = 5.0
    """Older figures are no ground for any order."""
    lost_after_s: float = 10.0
    """A replica that runs but is no longer announced counts as busy for so long, then as lost."""
    scale_up_step: int = 4
    """Most active replicas more than there are that one decision may want."""
    max_starting: int = 2
    """Most replicas of a pool that start at the same time."""
    start_timeout_s: float = 600.0
    """A replica that is not ready for so long is killed and another one launched."""
    backoff_initial_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_reset_s: float = 120.0
    """A replica that was ready for so long did not fail to start, whatever ends it; without a
    failure for so long, earlier ones are forgotten."""
    order_timeout_s: float = 180.0
    """When an order whose result is not seen counts as failed."""
    retry_after_s: float = 1.0
    """How long a replica is left alone after an order to it failed."""


class Phase(StrEnum):
    """What a replica does."""

    STARTING = "starting"
    STANDBY = "standby"
    ACTIVE = "active"
    DRAINING = "draining"


READY = frozenset({Phase.STANDBY, Phase.ACTIVE})


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """One replica at the moment of an observation."""

    replica_id: str
    phase: Phase
    requests: int | None
    """Queued and running; None while nothing is known about it."""
    age_s: float
    """Since it was launched; 0 where that is not known."""
    is_owned: bool
    """Whether the launcher runs it; only then can it be stopped."""
    is_announced: bool
    """Whether discovery knows it."""
    was_active: bool = False
    """Whether it was active when it was last announced, also under earlier leaders."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """All that a tick knows of the world."""

    now_s: float
    time_unix_ms: int
    """The same moment for people; only copied into the decision."""
    age_s: float
    """Since the replicas' records were last known to be current."""
    replicas: tuple[ReplicaSeen, ...]
    gone: Set[str] = frozenset()
    """Replicas whose processes have ended."""
    failed: Set[str] = frozenset()
    """Replicas of which an order failed since the last tick."""
    launch_blocker: str = ""
    """One word for why nothing can be launched at the moment; empty when it can."""


class Kind(StrEnum):
    """What can be ordered."""

    LAUNCH = "launch"
    ACTIVATE = "activate"
    DRAIN = "drain"
    STOP = "stop"


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An order to carry out."""

    kind: Kind
    replica_id: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.replica_id}" + (f" ({self.why})" if self.why else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """An effect whose result has not been seen yet."""

    kind: Kind
    ordered_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sighting:
    """What earlier ticks saw of a replica that is still there."""

    phase: Phase
    """The last one it was announced in, or STARTING."""
    is_owned: bool
    ready_since_s: float | None
    unready_since_s: float | None
    """Exactly one of the two is given."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolState:
    """What a tick hands to the next one of the same pool and leader."""

    fence: int
    orders: Mapping[str, Order] = dataclasses.field(default_factory=lambda: frozen({}))
    sightings: Mapping[str, Sighting] = dataclasses.field(default_factory=lambda: frozen({}))
    shunned: Mapping[str, float] = dataclasses.field(default_factory=lambda: frozen({}))
    """Replicas that get no order before a moment."""
    demands: tuple[tuple[float, int], ...] = ()
    """Demands by time, each higher than all later ones: enough for the window's maximum."""
    desired: int = 0
    """As the last tick with data concluded."""
    failures: int = 0
    """Launches that came to nothing, since they were last forgotten."""
    last_failure_s: float = 0.0
    launch_not_before_s: float = 0.0
    launches: int = 0
    """Launches ordered by this leader."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a tick concluded, and why."""

    time_unix_ms: int
    desired: int
    demanded: int
    requests: int
    observation_age_s: float
    reason: str
    effects: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, why, and when to look again."""

    effects: tuple[Effect, ...]
    decision: Decision
    next_tick_s: float
    """Seconds from now."""
    state: PoolState
