"""The catalogue as etcd has it: models and aliases, the last known while etcd is away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Keys, View, from_json
from forebay_common.store import Store

from forebay_router.core.resolve import Catalogue, Model
from forebay_router.core.shadow import Shadow
from forebay_router.core.tiers import Tier, Tiers


class CatalogueView:
    """Follows the catalogue."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._models = View(store, keys.models, _decode_model)
        self._aliases = View(store, keys.aliases, _decode_alias)
        self._seen: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._current = Catalogue({}, {})
        self._listed = False

    @property
    def is_listed(self) -> bool:
        """Whether models and aliases were both read."""
        return self._listed

    async def ready(self) -> None:
        """Wait until both were read."""
        await self._models.ready()
        await self._aliases.ready()
        self._listed = True

    def age_s(self, now: float) -> float:
        """Seconds since etcd last showed that this is current."""
        return max(self._models.age_s(now), self._aliases.age_s(now))

    def current(self) -> Catalogue:
        """The catalogue, translated once per change."""
        seen = (self._models.entries, self._aliases.entries)
        if self._seen is None or seen[0] is not self._seen[0] or seen[1] is not self._seen[1]:
            self._current = Catalogue(
                {model.name: _translate(model) for model in seen[0].values()},
                {alias.name: alias.target for alias in seen[1].values()},
                {
                    alias.name: _tiers(alias.tiers)
                    for alias in seen[1].values()
                    if alias.HasField("tiers")
                },
                {
                    model.name: Shadow(
                        f"{model.name}@{model.shadow.version}", model.shadow.percent / 100
                    )
                    for model in seen[0].values()
                    if model.HasField("shadow")
                },
            )
            self._seen = seen
        return self._current

    def contract(self) -> registry.Catalogue:
        """The catalogue as the registry's contract has it."""
        return registry.Catalogue(
            revision=max(self._models.revision, self._aliases.revision),
            models=sorted(self._models.entries.values(), key=lambda model: model.name),
            aliases=sorted(self._aliases.entries.values(), key=lambda alias: alias.name),
        )

    def spec_of(self, model_version: str) -> engine.ModelSpec | None:
        """How to run a model version; None when it is not in the catalogue."""
        name, _, wanted = model_version.partition("@")
        for model in self._models.entries.values():
            if model.name != name:
                continue
            for version in model.versions:
                if version.version == wanted:
                    return version.spec
        return None

    async def run(self) -> None:
        """Follow both until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._models.run())
            tasks.create_task(self._aliases.run())
            tasks.create_task(self.ready())


def _translate(model: registry.Model) -> Model:
    return Model(
        name=model.name,
        versions=frozenset(version.version for version in model.versions),
        split={entry.version: entry.weight for entry in model.split},
    )


def _tiers(tiers: registry.Tiers) -> Tiers:
    return Tiers(
        tiers.small,
        tiers.large,
        tiers.classifier,
        Tier.SMALL if tiers.default_tier == registry.TIER_SMALL else Tier.LARGE,
        tiers.threshold if tiers.HasField("threshold") else None,
        tiers.small_prompt_tokens_max,
    )


def _decode_model(key: str, value: bytes) -> registry.Model:
    return from_json(registry.Model, value)


def _decode_alias(key: str, value: bytes) -> registry.Alias:
    return from_json(registry.Alias, value)
