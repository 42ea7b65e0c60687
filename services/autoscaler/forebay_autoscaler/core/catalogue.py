"""Which model versions a replica of a pool loads, by the catalogue as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry

from forebay_autoscaler.core.pools import parse_ref
from forebay_autoscaler.core.refusal import RefusedError


def resolve(
    wanted: Iterable[str],
    models: Mapping[str, registry.Model],
    aliases: Mapping[str, registry.Alias],
) -> tuple[engine.ModelSpec, ...]:
    """The specs to load, each version once.

    Args:
        wanted: `name@version`, or `name` for every version of it that gets traffic; a name may be
            an alias.
        models: by name.
        aliases: by name.

    Raises:
        RefusedError: MODEL_NOT_FOUND when one of them does not exist.
    """
    specs: dict[str, engine.ModelSpec] = {}
    for text in wanted:
        for version in _versions(text, models, aliases):
            specs.setdefault(version.spec.model_version, version.spec)
    return tuple(specs.values())


def _versions(
    text: str, models: Mapping[str, registry.Model], aliases: Mapping[str, registry.Alias]
) -> list[registry.ModelVersion]:
    alias = aliases.get(text)
    ref = parse_ref(text if alias is None else alias.target)
    model = None if ref is None else models.get(ref.name)
    if ref is None or model is None:
        raise RefusedError("MODEL_NOT_FOUND", "A model of the pool is not in the catalogue.")
    if ref.version is not None:
        chosen = {ref.version}
    else:
        chosen = {entry.version for entry in model.split if entry.weight > 0}
    found = [version for version in model.versions if version.version in chosen]
    if not found:
        raise RefusedError("MODEL_NOT_FOUND", "A version of the pool is not in the catalogue.")
    return found
