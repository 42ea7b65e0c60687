"""Which version of a model answers to a name.

A sticky key gets the same version as long as the split stays the same: its hash is a point in
[0, sum of weights), and each version owns a range as long as its weight, in the order of versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from enum import StrEnum

from forebay_router.core.refusal import RefusedError

_HASH_BYTES = 8


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


class Via(StrEnum):
    """What chose the version."""

    PIN = "pin"
    SOLE = "sole"
    """It is the only one with weight."""
    SPLIT = "split"
    """The key did."""


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
        self._known: dict[str, str] = {}

    def model_version(self, catalogue: Catalogue, name: str, *, sticky_key: str) -> str:
        """The `name@version` that `resolve` gives, with its errors."""
        if catalogue is not self._catalogue:
            self._catalogue, self._known = catalogue, {}
        known = self._known.get(name)
        if known is not None:
            return known
        resolution = resolve(catalogue, name, sticky_key=sticky_key)
        if resolution.via is not Via.SPLIT:
            self._known[name] = resolution.model_version
        return resolution.model_version


def choose_version(model: Model, sticky_key: str) -> str | None:
    """The version whose range holds the key's point; None when every weight is 0."""
    weights = _weights(model)
    if not weights:
        return None
    if len(weights) == 1:
        return weights[0][0]
    total = sum(weight for _, weight in weights)
    point = _point(model.name, sticky_key, total)
    for version, weight in weights:
        if point < weight:
            return version
        point -= weight
    raise AssertionError("a point lies in one of the ranges")


def _weights(model: Model) -> list[tuple[str, int]]:
    return sorted((v, w) for v, w in model.split.items() if w > 0 and v in model.versions)


def _point(model_name: str, sticky_key: str, total: int) -> int:
    # The model's name is hashed too: a session is not in the first percent of every model.
    digest = hashlib.blake2b(
        sticky_key.encode(), digest_size=_HASH_BYTES, key=model_name.encode()[:64]
    ).digest()
    return int.from_bytes(digest, "big") * total >> 8 * _HASH_BYTES
