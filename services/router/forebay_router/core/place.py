"""Which replica a request goes to: filters, then the least loaded, then a draw among equals.

cost = requests on the replica / its sequence slots, where the requests are those of its last report
corrected by what this router has started and ended since. Other routers' requests count therefore,
and a burst does not pile up on one replica between two reports.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

_SAME_COST = 1e-9


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


class Candidate(NamedTuple):
    """A replica and what spoke for or against it."""

    replica_id: str
    cost: float | None
    excluded: Exclusion | None


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A choice with its reasons."""

    chosen: Replica | None
    candidates: tuple[Candidate, ...]


class Draw(Protocol):
    """The one thing placement needs of a random generator."""

    def randrange(self, stop: int, /) -> int:
        """A whole number in [0, stop)."""
        ...


class Ledger:
    """This router's own requests on each replica, now and when the replica last reported."""

    def __init__(self) -> None:
        self._now: Counter[tuple[str, str]] = Counter()
        self._at_report: dict[str, dict[str, int]] = {}

    def begin(self, replica_id: str, model_version: str) -> None:
        """Count a request that was sent."""
        self._now[replica_id, model_version] += 1

    def end(self, replica_id: str, model_version: str) -> None:
        """Count a request out that had begun."""
        key = (replica_id, model_version)
        assert self._now[key] > 0, "a request ends once"
        self._now[key] -= 1
        if self._now[key] == 0:
            del self._now[key]

    def note_report(self, replica: Replica) -> None:
        """Remember which of our requests a new report already holds."""
        self._at_report[replica.replica_id] = {
            version: self._now.get((replica.replica_id, version), 0) for version in replica.models
        }

    def forget(self, replica_id: str) -> None:
        """Drop the report of a replica that left; its requests in flight still count."""
        self._at_report.pop(replica_id, None)

    def in_flight(self, replica_id: str, model_versions: Iterable[str]) -> int:
        """Our requests on a replica now."""
        return sum(self._now.get((replica_id, version), 0) for version in model_versions)

    def cost(self, replica: Replica, model_version: str) -> float:
        """Requests per sequence slot; lower is better."""
        load = replica.models[model_version]
        own = self._now.get((replica.replica_id, model_version), 0)
        since_report = own - self._at_report.get(replica.replica_id, {}).get(model_version, 0)
        requests = max(own, load.queued + load.in_flight + since_report)
        return requests / max(1, load.slots)


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What a placement looks at besides the replicas."""

    model_version: str
    ledger: Ledger
    down: Container[str]
    tried: Container[str] = ()


def place(replicas: Iterable[Replica], view: View, *, draw: Draw) -> Placement:
    """Choose the least loaded replica that no filter excludes."""
    candidates: list[Candidate] = []
    best: list[Replica] = []
    lowest = float("inf")
    for replica in replicas:
        excluded = exclusion_of(replica, view)
        if excluded is not None:
            candidates.append(Candidate(replica.replica_id, None, excluded))
            continue
        cost = view.ledger.cost(replica, view.model_version)
        candidates.append(Candidate(replica.replica_id, cost, None))
        if cost < lowest - _SAME_COST:
            best, lowest = [replica], cost
        elif cost <= lowest + _SAME_COST:
            best.append(replica)
    chosen = best[draw.randrange(len(best))] if best else None
    return Placement(chosen, tuple(candidates))


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
    return None
