"""Which version of a model answers to a name.

Versions of a split compete for each sticky key with a score of their own (weighted rendezvous
hashing: Thaler and Ravishankar, 1998; with weights, Schindelhauer and Schomaker, 2005). Each wins
the share of keys that its weight says, everywhere alike, and a change of weights moves no more keys
than it has to: those that a version gains come from the others in proportion, and no key moves
between two versions whose weights keep their ratio.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from enum import StrEnum

from forebay_router.core.refusal import RefusedError
from forebay_router.core.shadow import Shadow
from forebay_router.core.tiers import Tiers

_HASH_BYTES = 6
# A hash and one more is a whole number that a float holds exactly.
_HASHES = 1 << 8 * _HASH_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model of the catalogue."""

    name: str
    versions: frozenset[str]
    split: Mapping[str, int]
    """Weight by version. A version without one is reached by a pin alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Catalogue:
    """Every name that can be asked for."""

    models: Mapping[str, Model]
    aliases: Mapping[str, str]
    """Alias to a model's name or `name@version`."""
    tiers: Mapping[str, Tiers] = dataclasses.field(default_factory=dict)
    """How tiered aliases choose; each is in `aliases` with the target of its default tier."""
    shadows: Mapping[str, Shadow] = dataclasses.field(default_factory=dict)
    """What requests are copied to, by model."""


class Via(StrEnum):
    """What chose the version."""

    PIN = "pin"
    SOLE = "sole"
    """It is the only one with weight."""
    SPLIT = "split"
    """The key did."""
    TIER = "tier"
    """The classifier of a tiered alias, and then whatever else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution:
    """The version that answers a request."""

    requested: str
    model: str
    version: str
    via: Via

    @property
    def model_version(self) -> str:
        """`name@version`."""
        return f"{self.model}@{self.version}"


def resolve(catalogue: Catalogue, name: str, *, sticky_key: str) -> Resolution:
    """Resolve a model's name, an alias or `name@version`.

    Args:
        catalogue: what is known.
        name: what the caller asked for.
        sticky_key: requests with the same key get the same version of a split.

    Raises:
        RefusedError: MODEL_NOT_FOUND when the name is not known; NO_REPLICA when the model is known
            but no version of it takes traffic.
    """
    target = name if name in catalogue.models else catalogue.aliases.get(name, name)
    model_name, pins, pinned = target.partition("@")
    model = catalogue.models.get(model_name)
    if model is None or (pins and pinned not in model.versions):
        raise RefusedError("MODEL_NOT_FOUND", "The model does not exist.", param="model")
    if pins:
        return Resolution(name, model.name, pinned, Via.PIN)
    version = choose_version(model, sticky_key)
    if version is None:
        raise RefusedError(
            "NO_REPLICA", "No version of the model takes traffic now.", param="model"
        )
    via = Via.SOLE if len(_weights(model)) == 1 else Via.SPLIT
    return Resolution(name, model.name, version, via)


class Resolver:
    """Resolves by whatever catalogue is current, and remembers what no key decides.

    It remembers names that resolve, and for one catalogue: not more than that one can hold.
    """

    def __init__(self) -> None:
        self._catalogue: Catalogue | None = None
        self._known: dict[str, tuple[str, Via]] = {}

    def resolve(self, catalogue: Catalogue, name: str, *, sticky_key: str) -> tuple[str, Via]:
        """The `name@version` that `resolve` gives and what chose it, with its errors."""
        if catalogue is not self._catalogue:
            self._catalogue, self._known = catalogue, {}
        known = self._known.get(name)
        if known is not None:
            return known
        resolution = resolve(catalogue, name, sticky_key=sticky_key)
        found = resolution.model_version, resolution.via
        if resolution.via is not Via.SPLIT:
            self._known[name] = found
        return found


def choose_version(model: Model, sticky_key: str) -> str | None:
    """The version that wins the key; None when every weight is 0."""
    weights = _weights(model)
    if not weights:
        return None
    if len(weights) == 1:
        return weights[0][0]
    # The model's name is hashed too: a session is not in the first percent of every model.
    name, key = model.name.encode()[:64], sticky_key.encode()
    return min(weights, key=lambda each: _arrival(name, each[0], key) / each[1])[0]


def _weights(model: Model) -> list[tuple[str, int]]:
    return sorted((v, w) for v, w in model.split.items() if w > 0 and v in model.versions)


def _arrival(model_name: bytes, version: str, sticky_key: bytes) -> float:
    """A draw of the exponential distribution: over its weight, the least of several is each
    version's as often as its share of the weights."""
    digest = hashlib.blake2b(
        b"%b\x00%b" % (version.encode(), sticky_key), digest_size=_HASH_BYTES, key=model_name
    ).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / _HASHES)
