"""Which model version a request means, and whether it can be served here.

A request whose model version was chosen by an earlier hop (`pinned`) is never told that the model
does not exist: that hop knows more, and shall try another replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from forebay_common.errors import ForebayError, Reason

from forebay_batcher.core.queue import Capacity

_LOST = "The runner does not answer."


class ModelState(IntEnum):
    """Where a model version is in its life. The numbers are the contract's."""

    UNKNOWN = 0
    COLD = 1
    LOADING = 2
    ACTIVE = 3
    DRAINING = 4
    SLEEPING = 5
    FAILED = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One model version, as the engine host last described it."""

    model_version: str
    state: ModelState
    phase: int = 0
    """The contract's LoadPhase."""
    task: int = 0
    """The contract's Task."""
    socket_path: str = ""
    generation: int = 0
    slots: int = 0
    context_tokens: int = 0
    kv_cache_usage: float = 0.0
    generated_tokens: int = 0
    reason: str = ""
    """Why it FAILED."""

    @property
    def is_active(self) -> bool:
        """Takes requests."""
        return self.state is ModelState.ACTIVE

    @property
    def name(self) -> str:
        """The part before the version."""
        return self.model_version.partition("@")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """What is known of the engine host."""

    heard: bool = False
    """It has described itself at least once."""
    models: Mapping[str, Model] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    lost: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """Generation of each runner that no longer answers, whatever the host says."""

    def described(self, models: Mapping[str, Model]) -> Engine:
        """After the host has described itself."""
        lost = {
            model_version: generation
            for model_version, generation in self.lost.items()
            if model_version in models and models[model_version].generation == generation
        }
        return Engine(True, _without(models, lost), MappingProxyType(lost))

    def silent(self) -> Engine:
        """After the host went away: nothing is known of its models."""
        models = {
            model_version: dataclasses.replace(model, state=ModelState.UNKNOWN, phase=0, reason="")
            for model_version, model in self.models.items()
        }
        return dataclasses.replace(self, models=MappingProxyType(models))

    def without_runner(self, model_version: str, generation: int) -> Engine:
        """After a runner was found dead, which its host may not have noticed yet."""
        model = self.models.get(model_version)
        if model is None or model.generation != generation:
            return self
        lost = {**self.lost, model_version: generation}
        return dataclasses.replace(
            self, models=_without(self.models, lost), lost=MappingProxyType(lost)
        )

    @property
    def active(self) -> list[Model]:
        """The models that take requests."""
        return [model for model in self.models.values() if model.is_active]

    @property
    def is_warm(self) -> bool:
        """Every model takes requests, and there is one."""
        return bool(self.models) and all(model.is_active for model in self.models.values())

    def capacities(self) -> dict[str, Capacity]:
        """What the runners that take requests can take."""
        return {
            model.model_version: Capacity(
                model.generation, model.slots, model.kv_cache_usage, model.socket_path
            )
            for model in self.active
        }

    def resolve(self, wanted: str, *, pinned: bool) -> Model:
        """The model that `wanted` means: `name@version`, or a name with one version here.

        Raises:
            ForebayError: MODEL_NOT_LOADED, MODEL_NOT_FOUND, or INVALID_ARGUMENT.
        """
        if not wanted:
            raise ForebayError(
                Reason.INVALID_ARGUMENT, "model is required: give name@version.", param="model"
            )
        if "@" in wanted:
            found = [self.models[wanted]] if wanted in self.models else []
        else:
            named = [model for model in self.models.values() if model.name == wanted]
            found = [model for model in named if model.is_active] or named
        if len(found) > 1:
            raise ForebayError(
                Reason.INVALID_ARGUMENT,
                "The model has several versions here: give name@version.",
                param="model",
            )
        if found and found[0].is_active:
            return found[0]
        if found or pinned or not self.heard:
            state = found[0].state.name.lower() if found else "not loaded"
            raise ForebayError(
                Reason.MODEL_NOT_LOADED,
                f"The model cannot be served here at the moment: it is {state}.",
                retry_after_s=1,
            )
        raise ForebayError(
            Reason.MODEL_NOT_FOUND, "The model does not exist on this replica.", param="model"
        )


def _without(models: Mapping[str, Model], lost: Mapping[str, int]) -> Mapping[str, Model]:
    return MappingProxyType(
        {
            model_version: dataclasses.replace(
                model, state=ModelState.FAILED, phase=0, reason=_LOST
            )
            if model_version in lost and model.is_active
            else model
            for model_version, model in models.items()
        }
    )
