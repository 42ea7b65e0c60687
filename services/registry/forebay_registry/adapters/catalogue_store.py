"""The catalogue in etcd: one key per model and per alias, changed by optimistic transactions.

What spans keys (no name is both a model's and an alias's, no alias stands for what is gone) is kept
by one more key, which every change of that kind puts: two of them never both succeed on the same
reading. A change of one model alone depends on that model's revision only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Keys, from_json, to_json
from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Condition, Entry, Op, Snapshot, Store

from forebay_registry.core import catalogue
from forebay_registry.core.names import split_target

_log = logging.getLogger(__name__)

ModelChange = Callable[[registry.Model | None], registry.Model]


@dataclasses.dataclass(frozen=True, slots=True)
class _Guard:
    """A reading of the key that serialises changes across keys."""

    key: str
    revision: int

    @property
    def unchanged(self) -> Condition:
        if self.revision == 0:
            return Condition.absent(self.key)
        return Condition.mod_revision(self.key, self.revision)

    @property
    def touch(self) -> Op:
        return Op.put(self.key, b"{}")


class CatalogueStore:
    """Reads and changes of the catalogue; CONFLICT when `attempts` readings were overtaken."""

    def __init__(self, store: Store, keys: Keys, *, attempts: int) -> None:
        self._store = store
        self._keys = keys
        self._attempts = attempts
        self._guard_key = f"{keys.namespace}/registry/names"

    async def model(self, name: str) -> registry.Model | None:
        """A model with its revision; None when there is none."""
        return decode_model(await self._store.get(self._keys.model(name)))

    async def listing(self) -> registry.Catalogue:
        """Everything. Aliases are read first: one whose model was just created has its model."""
        aliases = await self._store.list(self._keys.aliases)
        models = await self._store.list(self._keys.models)
        return assemble(models, aliases)

    async def put_version(self, name: str, change: ModelChange) -> registry.Model:
        """Store what `change` makes of the model."""
        key = self._keys.model(name)
        for _ in range(self._attempts):
            guard = await self._guard()
            entry = await self._store.get(key)
            stored = decode_model(entry)
            changed = change(stored)
            if entry is not None and changed == stored:
                return changed
            put = Op.put(key, encode_model(changed))
            if entry is not None:
                result = await self._store.commit(
                    if_=[Condition.mod_revision(key, entry.mod_revision)], then=[put]
                )
            else:
                alias = await self._store.get(self._keys.alias(name))
                catalogue.check_new_model_name(names_alias=alias is not None)
                result = await self._store.commit(
                    if_=[Condition.absent(key), guard.unchanged], then=[put, guard.touch]
                )
            if result.succeeded:
                changed.revision = result.revision
                return changed
        raise _overtaken()

    async def change_model(self, name: str, change: ModelChange) -> registry.Model:
        """Store what `change` makes of a model that is there, or of None."""
        key = self._keys.model(name)
        for _ in range(self._attempts):
            entry = await self._store.get(key)
            stored = decode_model(entry)
            changed = change(stored)
            if changed == stored:
                return changed
            assert entry is not None, "a change of nothing must be refused"
            result = await self._store.commit(
                if_=[Condition.mod_revision(key, entry.mod_revision)],
                then=[Op.put(key, encode_model(changed))],
            )
            if result.succeeded:
                changed.revision = result.revision
                return changed
        raise _overtaken()

    async def delete_version(self, name: str, version: str) -> None:
        """Remove a version, and the model with its last one."""
        key = self._keys.model(name)
        for _ in range(self._attempts):
            guard = await self._guard()
            entry = await self._store.get(key)
            model = decode_model(entry)
            if entry is None or model is None:
                return
            aliases = decode_aliases(await self._store.list(self._keys.aliases))
            changed = catalogue.delete_version(model, version, aliases.values())
            if changed == model:
                return
            result = await self._store.commit(
                if_=[Condition.mod_revision(key, entry.mod_revision), guard.unchanged],
                then=[
                    Op.delete(key) if changed is None else Op.put(key, encode_model(changed)),
                    guard.touch,
                ],
            )
            if result.succeeded:
                return
        raise _overtaken()

    async def put_alias(self, alias: registry.Alias) -> registry.Alias:
        """Store an alias."""
        targets = {
            split_target(target, param=field)[0]
            for field, target in catalogue.targets_of(alias).items()
        }
        for _ in range(self._attempts):
            guard = await self._guard()
            models, aliases = await asyncio.gather(
                asyncio.gather(*(self.model(name) for name in {alias.name, *targets})),
                asyncio.gather(*(self._store.get(self._keys.alias(name)) for name in targets)),
            )
            checked = catalogue.check_alias(
                alias,
                models={model.name: model for model in models if model is not None},
                aliases={n for n, found in zip(targets, aliases, strict=True) if found is not None},
            )
            result = await self._store.commit(
                if_=[guard.unchanged],
                then=[Op.put(self._keys.alias(alias.name), to_json(checked)), guard.touch],
            )
            if result.succeeded:
                return checked
        raise _overtaken()

    async def delete_alias(self, name: str) -> None:
        """Remove an alias. Nothing depends on one, so nothing is checked."""
        await self._store.delete(self._keys.alias(name))

    async def _guard(self) -> _Guard:
        entry = await self._store.get(self._guard_key)
        return _Guard(self._guard_key, 0 if entry is None else entry.mod_revision)


def encode_model(model: registry.Model) -> bytes:
    """A model as stored. Its revision is etcd's own and not part of the value."""
    stored = registry.Model()
    stored.CopyFrom(model)
    stored.ClearField("revision")
    return to_json(stored)


def decode_model(entry: Entry | None) -> registry.Model | None:
    """A stored model with its revision."""
    if entry is None:
        return None
    model = from_json(registry.Model, entry.value)
    model.revision = entry.mod_revision
    return model


def decode_aliases(snapshot: Snapshot) -> Mapping[str, registry.Alias]:
    """Stored aliases by name; what cannot be read is left out and logged."""
    aliases: dict[str, registry.Alias] = {}
    for entry in snapshot.entries.values():
        try:
            alias = from_json(registry.Alias, entry.value)
        except ValueError:
            _log.warning("%s cannot be decoded and is left out", entry.key)
            continue
        aliases[alias.name] = alias
    return aliases


def assemble(models: Snapshot, aliases: Snapshot) -> registry.Catalogue:
    """A catalogue of two snapshots; what cannot be read is left out and logged."""
    decoded: list[registry.Model] = []
    for entry in models.entries.values():
        try:
            model = decode_model(entry)
        except ValueError:
            _log.warning("%s cannot be decoded and is left out", entry.key)
            continue
        if model is not None:
            decoded.append(model)
    return registry.Catalogue(
        revision=max(models.revision, aliases.revision),
        models=sorted(decoded, key=lambda model: model.name),
        aliases=[alias for _, alias in sorted(decode_aliases(aliases).items())],
    )


def _overtaken() -> ForebayError:
    return ForebayError(
        Reason.CONFLICT, "Others kept changing the same thing; try again.", retry_after_s=1
    )
