"""Which replica a request goes to: filters, then the least loaded, then a draw among equals.

cost = requests on the replica / its sequence slots, where the requests are those of its last report
corrected by what this router has started and ended since. Other routers' requests count therefore,
and a burst does not pile up on one replica between two reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

_SAME_COST = 1e-9
_NOTHING: Mapping[str, int] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model version on a replica, as last reported."""

    active: bool
    queued: int = 0
    in_flight: int = 0
    slots: int = 0
    """0 while unknown, which counts as one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """A replica, as last reported."""

    replica_id: str
    address: str
    takes_traffic: bool
    """It is no standby."""
    draining: bool
    models: Mapping[str, ModelLoad]


class Exclusion(StrEnum):
    """Why a replica cannot be chosen."""

    MODEL_ABSENT = "model_absent"
    MODEL_NOT_ACTIVE = "model_not_active"
    STANDBY = "standby"
    DRAINING = "draining"
    DOWN = "down"
    TRIED = "tried"
    EJECTED = "ejected"
    SUSPECT = "suspect"


Weighed: TypeAlias = tuple[str, "float | Exclusion"]
"""A replica's id, and its cost or why it is excluded. A plain tuple: every request makes one per
replica."""


class Candidate(NamedTuple):
    """A replica and what spoke for or against it."""

    replica_id: str
    cost: float | None
    excluded: Exclusion | None


# Not frozen, like `View`: every request makes one, and takes a third of the time to do so.
@dataclasses.dataclass(slots=True, eq=False)
class Placement:
    """A choice with its reasons."""

    chosen: Replica | None
    weighed: list[Weighed]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The reasons, to read."""
        return candidates_of(self.weighed)


class Draw(Protocol):
    """The one thing placement needs of a random generator."""

    def randrange(self, stop: int, /) -> int:
        """A whole number in [0, stop)."""
        ...


class Ledger:
    """This router's own requests on each replica, now and when the replica last reported."""

    def __init__(self) -> None:
        self._now: dict[str, dict[str, int]] = {}
        """Those that run, by model version and replica; no zeros."""
        self._at_report: dict[str, dict[str, int]] = {}
        """By replica and model version."""

    def begin(self, replica_id: str, model_version: str) -> None:
        """Count a request that was sent."""
        running = self._now.get(model_version)
        if running is None:
            running = self._now[model_version] = {}
        running[replica_id] = running.get(replica_id, 0) + 1

    def end(self, replica_id: str, model_version: str) -> None:
        """Count a request out that had begun."""
        running = self._now.get(model_version, {})
        assert replica_id in running, "a request ends once"
        if running[replica_id] > 1:
            running[replica_id] -= 1
            return
        del running[replica_id]
        if not running:
            del self._now[model_version]

    def note_report(self, replica: Replica) -> None:
        """Remember which of our requests a new report already holds."""
        self._at_report[replica.replica_id] = {
            version: self._own(replica.replica_id, version) for version in replica.models
        }

    def forget(self, replica_id: str) -> None:
        """Drop the report of a replica that left; its requests in flight still count."""
        self._at_report.pop(replica_id, None)

    def in_flight(self, replica_id: str, model_versions: Iterable[str]) -> int:
        """Our requests on a replica now."""
        return sum(self._own(replica_id, version) for version in model_versions)

    def cost(self, replica: Replica, model_version: str) -> float:
        """Requests per sequence slot; lower is better."""
        load = replica.models[model_version]
        own = self._now.get(model_version, _NOTHING).get(replica.replica_id, 0)
        known = self._at_report.get(replica.replica_id, _NOTHING).get(model_version, 0)
        requests = load.queued + load.in_flight + own - known
        return (own if own > requests else requests) / (load.slots or 1)

    def _own(self, replica_id: str, model_version: str) -> int:
        return self._now.get(model_version, _NOTHING).get(replica_id, 0)


@dataclasses.dataclass(slots=True, eq=False)
class View:
    """What a placement looks at besides the replicas."""

    model_version: str
    ledger: Ledger
    down: Container[str]
    tried: Container[str] = ()
    ejected: Container[str] = ()
    occupied: Container[str] = ()
    """Replicas that a suspect must not go to, because they have another."""


def place(replicas: Iterable[Replica], view: View, *, draw: Draw) -> Placement:
    """Choose the least loaded replica that no filter excludes."""
    weighed: list[Weighed] = []
    best: list[Replica] = []
    lowest = float("inf")
    for replica in replicas:
        excluded = exclusion_of(replica, view)
        if excluded is not None:
            weighed.append((replica.replica_id, excluded))
            continue
        cost = view.ledger.cost(replica, view.model_version)
        weighed.append((replica.replica_id, cost))
        if cost <= lowest + _SAME_COST:
            if cost < lowest - _SAME_COST:
                best, lowest = [], cost
            best.append(replica)
    if not best:
        return Placement(None, weighed)
    return Placement(best[draw.randrange(len(best)) if len(best) > 1 else 0], weighed)


def candidates_of(weighed: Sequence[Weighed]) -> tuple[Candidate, ...]:
    """What was weighed, to read."""
    return tuple(
        Candidate(replica_id, None, reason)
        if isinstance(reason, Exclusion)
        else Candidate(replica_id, reason, None)
        for replica_id, reason in weighed
    )


def exclusion_of(replica: Replica, view: View) -> Exclusion | None:
    """The first filter that speaks against a replica, in this order."""
    load = replica.models.get(view.model_version)
    if load is None:
        return Exclusion.MODEL_ABSENT
    if replica.replica_id in view.down:
        return Exclusion.DOWN
    if replica.draining:
        return Exclusion.DRAINING
    if not replica.takes_traffic:
        return Exclusion.STANDBY
    if not load.active:
        return Exclusion.MODEL_NOT_ACTIVE
    if replica.replica_id in view.tried:
        return Exclusion.TRIED
    if replica.replica_id in view.ejected:
        return Exclusion.EJECTED
    if replica.replica_id in view.occupied:
        return Exclusion.SUSPECT
    return None
