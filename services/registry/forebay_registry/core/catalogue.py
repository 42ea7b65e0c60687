"""The rules of the catalogue: each function takes what is stored and returns what will be.

A version's artifact never changes: the same sha256 where both have one, else the same place. Every
model has at least one version and a split whose weights are above 0. A name is a model's or an
alias's, never both, and an alias stands for models, never for an alias, so there are no cycles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry

from forebay_registry.core.names import check_name, split_target
from forebay_registry.core.refusal import RefusedError

MAX_WEIGHT = 10_000
_MAX_PATH = 4096
_MAX_TENSOR_PARALLEL = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What an artifact is, besides where it lies and its sha256.
_FIXED_FIELDS = ("backend", "precision", "task", "profile")


def put_version(
    model: registry.Model | None,
    name: str,
    version: registry.ModelVersion,
    *,
    now_unix_s: int,
    max_versions: int,
) -> registry.Model:
    """The model with the version in it, created or replaced.

    Args:
        model: as stored; None when there is no such model yet.
        name: the model's name.
        version: as the caller wants it; its `spec.model_version` may be empty.
        now_unix_s: becomes the time of creation of what is new.
        max_versions: most versions of a model.

    Raises:
        RefusedError: INVALID_ARGUMENT, or VERSION_IMMUTABLE when the artifact would change.
    """
    checked = _check_version(check_name(name, param="model"), version)
    changed = registry.Model()
    if model is None:
        changed.name = name
        changed.created_unix_s = now_unix_s
        changed.split.add(version=checked.version, weight=MAX_WEIGHT)
    else:
        changed.CopyFrom(model)
    stored = find_version(changed, checked.version)
    if stored is not None:
        _check_same_artifact(stored, checked)
        checked.created_unix_s = stored.created_unix_s
        checked.artifact_sha256 = checked.artifact_sha256 or stored.artifact_sha256
        stored.CopyFrom(checked)
        return changed
    if len(changed.versions) >= max_versions:
        raise RefusedError(
            "INVALID_ARGUMENT",
            f"The model has {max_versions} versions, the most it may have; delete one first.",
            param="version.version",
        )
    checked.created_unix_s = now_unix_s
    changed.versions.append(checked)
    changed.versions.sort(key=lambda each: each.version)
    return changed


def delete_version(
    model: registry.Model, version: str, aliases: Iterable[registry.Alias]
) -> registry.Model | None:
    """The model without the version; None when that was its only one and the model goes too.

    Raises:
        RefusedError: VERSION_IN_USE while it gets traffic, or copies of it, beside other versions,
            or an alias stands for what would be gone.
    """
    if find_version(model, version) is None:
        return model
    is_last = len(model.versions) == 1
    gone = {f"{model.name}@{version}", *([model.name] if is_last else [])}
    holder = next((a.name for a in aliases if not gone.isdisjoint(targets_of(a).values())), None)
    if holder is not None:
        raise RefusedError(
            "VERSION_IN_USE", f"The alias {holder} stands for it; delete or move the alias first."
        )
    if is_last:
        return None
    if any(entry.version == version and entry.weight > 0 for entry in model.split):
        raise RefusedError(
            "VERSION_IN_USE", "The version gets traffic; set a split without it first."
        )
    if model.HasField("shadow") and model.shadow.version == version:
        raise RefusedError(
            "VERSION_IN_USE", "The version gets copies of requests; set no shadow first."
        )
    changed = registry.Model()
    changed.CopyFrom(model)
    del changed.versions[:]
    changed.versions.extend(each for each in model.versions if each.version != version)
    return changed


def set_split(
    model: registry.Model,
    split: Iterable[registry.SplitEntry],
    *,
    expected_revision: int,
) -> registry.Model:
    """The model with another split; entries of weight 0 are left out.

    Raises:
        RefusedError: CONFLICT when the model is not at `expected_revision` (0: wherever it is),
            else INVALID_ARGUMENT.
    """
    _check_revision(model, expected_revision)
    weights: dict[str, int] = {}
    for entry in split:
        if find_version(model, entry.version) is None:
            raise _invalid("split names a version that the model does not have.", "split")
        if entry.version in weights:
            raise _invalid("split names a version twice.", "split")
        if entry.weight > MAX_WEIGHT:
            raise _invalid(f"A weight must be 0 to {MAX_WEIGHT}.", "split")
        weights[entry.version] = entry.weight
    if not any(weights.values()):
        raise _invalid("At least one weight must be above 0.", "split")
    changed = registry.Model()
    changed.CopyFrom(model)
    del changed.split[:]
    for version, weight in sorted(weights.items()):
        if weight > 0:
            changed.split.add(version=version, weight=weight)
    return changed


def set_shadow(
    model: registry.Model, shadow: registry.Shadow | None, *, expected_revision: int
) -> registry.Model:
    """The model with another shadow; None for none.

    Raises:
        RefusedError: CONFLICT as of `set_split`, else INVALID_ARGUMENT.
    """
    _check_revision(model, expected_revision)
    changed = registry.Model()
    changed.CopyFrom(model)
    if shadow is None:
        changed.ClearField("shadow")
        return changed
    if find_version(model, shadow.version) is None:
        raise _invalid("The model has no such version.", "shadow.version")
    # A comparison with NaN is false.
    if not 0 < shadow.percent <= 100:
        raise _invalid("percent must be above 0 and at most 100.", "shadow.percent")
    changed.shadow.CopyFrom(shadow)
    return changed


def targets_of(alias: registry.Alias) -> Mapping[str, str]:
    """What an alias stands for, by the field that says so."""
    if not alias.HasField("tiers"):
        return {"alias.target": alias.target}
    return {"alias.tiers.small": alias.tiers.small, "alias.tiers.large": alias.tiers.large}


def check_alias(
    alias: registry.Alias,
    *,
    models: Mapping[str, registry.Model],
    aliases: Collection[str],
) -> registry.Alias:
    """The alias as it may be stored. The target of a tiered one becomes that of its default tier.

    Args:
        alias: as the caller wants it.
        models: those of the models that it names, itself or in its targets, that exist.
        aliases: those of its targets' names that are aliases.

    Raises:
        RefusedError: INVALID_ARGUMENT, or MODEL_NOT_FOUND when a target does not exist.
    """
    check_name(alias.name, param="alias.name")
    checked = registry.Alias(name=alias.name, target=alias.target)
    if alias.HasField("tiers"):
        _check_tiers(alias.tiers)
        tiers = checked.tiers
        tiers.CopyFrom(alias.tiers)
        tiers.default_tier = tiers.default_tier or registry.TIER_LARGE
        target = tiers.small if tiers.default_tier == registry.TIER_SMALL else tiers.large
        if alias.target not in ("", target):
            raise _invalid("A tiered alias has no target but its default tier's.", "alias.target")
        checked.target = target
    if alias.name in models:
        raise _invalid("A model has this name.", "alias.name")
    for field, target in targets_of(checked).items():
        _check_target(alias.name, target, models, aliases, param=field)
    return checked


def _check_target(
    alias: str,
    target: str,
    models: Mapping[str, registry.Model],
    aliases: Collection[str],
    *,
    param: str,
) -> None:
    name, version = split_target(target, param=param)
    model = models.get(name)
    if model is None and (name in aliases or name == alias):
        raise _invalid("An alias stands for a model, not for an alias.", param)
    if model is None:
        raise RefusedError("MODEL_NOT_FOUND", "No model has the target's name.", param=param)
    if version is not None and find_version(model, version) is None:
        raise RefusedError("MODEL_NOT_FOUND", "The model has no such version.", param=param)


def _check_tiers(tiers: registry.Tiers) -> None:
    if tiers.small == tiers.large:
        raise _invalid("The tiers must be two.", "alias.tiers.large")
    if tiers.default_tier not in registry.Tier.values():
        raise _invalid("default_tier is not known.", "alias.tiers.default_tier")
    check_name(tiers.classifier, param="alias.tiers.classifier")
    if tiers.HasField("threshold") and not 0 <= tiers.threshold <= 1:
        raise _invalid("threshold must be from 0 to 1.", "alias.tiers.threshold")


def check_new_model_name(*, names_alias: bool) -> None:
    """RefusedError with INVALID_ARGUMENT when an alias already has a new model's name."""
    if names_alias:
        raise _invalid("An alias has this name.", "model")


def find_version(model: registry.Model, version: str) -> registry.ModelVersion | None:
    """The model's version of that name, the stored one itself; None when there is none."""
    return next((each for each in model.versions if each.version == version), None)


def _check_revision(model: registry.Model, expected_revision: int) -> None:
    if expected_revision not in (0, model.revision):
        raise RefusedError("CONFLICT", "The model has changed since; read it again.")


def _check_version(name: str, version: registry.ModelVersion) -> registry.ModelVersion:
    check_name(version.version, param="version.version")
    checked = registry.ModelVersion()
    checked.CopyFrom(version)
    checked.ClearField("created_unix_s")
    model_version = f"{name}@{version.version}"
    if checked.spec.model_version not in ("", model_version):
        raise _invalid(
            "spec.model_version must be empty or the model's name, '@' and the version.",
            "version.spec.model_version",
        )
    checked.spec.model_version = model_version
    checked.artifact_sha256 = version.artifact_sha256.lower()
    if checked.artifact_sha256 and _SHA256.fullmatch(checked.artifact_sha256) is None:
        raise _invalid("artifact_sha256 must be 64 hex digits.", "version.artifact_sha256")
    _check_spec(checked.spec)
    return checked


def _check_spec(spec: engine.ModelSpec) -> None:
    for field, kind in (
        ("backend", engine.Backend),
        ("precision", engine.Precision),
        ("task", engine.Task),
    ):
        if getattr(spec, field) not in kind.values():
            raise _invalid(f"spec.{field} is not known.", f"version.spec.{field}")
    if spec.backend == engine.BACKEND_UNSPECIFIED:
        raise _invalid("spec.backend is required.", "version.spec.backend")
    if spec.backend == engine.BACKEND_VLLM and not spec.artifact_path:
        raise _invalid(
            "spec.artifact_path is required for this back end.", "version.spec.artifact_path"
        )
    if spec.artifact_path:
        _check_path(spec.artifact_path)
    if spec.tensor_parallel > _MAX_TENSOR_PARALLEL:
        raise _invalid(
            f"spec.tensor_parallel must be at most {_MAX_TENSOR_PARALLEL}.",
            "version.spec.tensor_parallel",
        )
    if spec.profile:
        check_name(spec.profile, param="version.spec.profile")


def _check_path(path: str) -> None:
    is_plain = (
        path.startswith("/")
        and len(path) <= _MAX_PATH
        and path.isprintable()
        and ".." not in path.split("/")
    )
    if not is_plain:
        raise _invalid(
            "spec.artifact_path must be an absolute path without '..'.",
            "version.spec.artifact_path",
        )


def _check_same_artifact(stored: registry.ModelVersion, wanted: registry.ModelVersion) -> None:
    has_both = bool(stored.artifact_sha256 and wanted.artifact_sha256)
    is_same = (
        stored.artifact_sha256 == wanted.artifact_sha256
        if has_both
        else stored.spec.artifact_path == wanted.spec.artifact_path
    ) and all(getattr(stored.spec, field) == getattr(wanted.spec, field) for field in _FIXED_FIELDS)
    if not is_same:
        raise RefusedError(
            "VERSION_IMMUTABLE",
            "A version's artifact cannot change once created; put another version.",
        )


def _invalid(message: str, param: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", message, param=param)
