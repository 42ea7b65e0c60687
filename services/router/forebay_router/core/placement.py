"""What placement is asked, what it weighs and what it answers; nothing is decided here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

Wait = tuple[float, float, float, float, bool]
"""What a request finds at a replica, whatever its prompt.

Milliseconds of queue, and of what else there is; milliseconds per prompt token; the share of its
usual load that it is to take, below 1 while it starts slowly; whether every slot is taken. A plain
tuple, because each request makes one per candidate.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model version on a replica, as last reported."""

    active: bool
    queued: int = 0
    in_flight: int = 0
    slots: int = 0
    """0 while unknown, which counts as one."""
    waiting_tokens: int = 0
    """Prompt tokens of requests without a first message."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """A replica, as last reported."""

    replica_id: str
    address: str
    takes_traffic: bool
    """It is no standby."""
    draining: bool
    models: Mapping[str, ModelLoad]
    pool: str = ""


class Exclusion(StrEnum):
    """Why a replica cannot be chosen."""

    MODEL_ABSENT = "model_absent"
    MODEL_NOT_ACTIVE = "model_not_active"
    STANDBY = "standby"
    DRAINING = "draining"
    WRONG_CLASS = "wrong_class"
    DOWN = "down"
    TRIED = "tried"
    EJECTED = "ejected"
    SUSPECT = "suspect"


class Candidate(NamedTuple):
    """A replica and what spoke for or against it."""

    replica_id: str
    cost: float | None
    """Predicted milliseconds to the first token."""
    excluded: Exclusion | None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    other_ms: float = 0.0
    cached_tokens: int = 0


Weighed = tuple[str, float | None, Exclusion | None, float, float, float, int]
"""A candidate as a plain tuple: each request makes some, and few are ever read."""


class Draw(Protocol):
    """What placement needs of a random generator."""

    def random(self) -> float:
        """A number in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """A whole number in [0, stop)."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Ask:
    """A request to be placed. Not frozen: every request makes one."""

    model_version: str
    prompt_tokens: int = 0
    prompt: Callable[[], bytes] | None = None
    """The prompt's bytes as prefixes are named by; made only where it matters."""
    priority_class: str = ""
    tells_first: bool = True
    """Its first message comes with its first token: false of what is generated and not streamed."""
    names: Sequence[int] | None = None
    """The prompt's prefixes, once they were needed."""
    thin_names: Sequence[int] = ()
    prompt_bytes: int = 0


# Not frozen, like `Ask`: every request makes one, and takes a third of the time to do so.
@dataclasses.dataclass(slots=True, eq=False)
class Placement:
    """A choice with its reasons."""

    chosen: Replica | None
    weighed: Sequence[Weighed]
    placeable: int = 0
    """Replicas that could be chosen, as far as is known without looking at each."""
    predicted_ms: float = 0.0
    cached_tokens: int = 0
    wait: Wait | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What was weighed, to read."""
        return tuple(map(Candidate._make, self.weighed))


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How placement weighs."""

    slow_start_s: float = 10.0
    """A replica that has just joined comes to take its full share over this time."""
    explore_share: float = 0.005
    """Requests that go to a replica that seems slow, to learn whether it still is."""
    prefixes_most: int = 20_000
    """Names of prefixes kept per replica and model version."""
    prefixes_most_of_all: int = 1_000_000
    """Names of prefixes kept of all replicas, shared out evenly; one takes about 150 bytes."""
    prefix_ttl_s: float = 600.0
    """How long a prompt is taken to be cached where it was sent, unless the engine tells."""
    pool_classes: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Classes that a pool takes, by pool; a pool that is not named takes all."""


class Exclusions:
    """What stands against replicas beside their own reports; each is somebody's live set."""

    __slots__ = ("down", "ejected", "occupied", "tried")

    def __init__(
        self,
        down: Container[str] = (),
        ejected: Container[str] = (),
        tried: Container[str] = (),
        occupied: Container[str] = (),
    ) -> None:
        self.down = down
        self.ejected = ejected
        self.tried = tried
        self.occupied = occupied
        """Replicas that a suspect must not go to, because they have another."""


NOTHING = Exclusions()


def standing_of(replica: Replica, load: ModelLoad | None) -> Exclusion | None:
    """What a replica's own report speaks against it with, for one model version."""
    if load is None:
        return Exclusion.MODEL_ABSENT
    if replica.draining:
        return Exclusion.DRAINING
    if not replica.takes_traffic:
        return Exclusion.STANDBY
    if not load.active:
        return Exclusion.MODEL_NOT_ACTIVE
    return None
