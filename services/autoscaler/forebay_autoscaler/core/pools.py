"""From a pool as a caller describes it to a policy that nothing has to check again."""

from __future__ import annotations

import dataclasses
import re

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler

from forebay_autoscaler.core.model import Policy
from forebay_autoscaler.core.refusal import RefusedError

MAX_REPLICAS = 10_000
MAX_MODELS = 64
MAX_WINDOW_S = 86_400
_NAME = re.compile(r"[a-z0-9._-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRef:
    """A model version a pool wants, or all versions of a model that get traffic."""

    name: str
    version: str | None


def is_name(text: str) -> bool:
    """Whether a text can name a pool, a model or a version."""
    return _NAME.fullmatch(text) is not None and text.strip(".") != ""


def parse_ref(text: str) -> ModelRef | None:
    """Read `name` or `name@version`; None when it is neither."""
    name, at, version = text.partition("@")
    if not is_name(name) or (at and not is_name(version)):
        return None
    return ModelRef(name, version if at else None)


def check_pool(pool: autoscaler.Pool) -> autoscaler.Pool:
    """The pool itself, when it can be stored. Raises RefusedError: INVALID_ARGUMENT."""
    policy_of(pool)
    if not pool.models:
        raise _invalid("A pool must name at least one model.", "pool.models")
    if len(pool.models) > MAX_MODELS:
        raise _invalid(f"A pool may name at most {MAX_MODELS} models.", "pool.models")
    if any(parse_ref(model) is None for model in pool.models):
        raise _invalid("Models are named `name` or `name@version`.", "pool.models")
    return pool


def policy_of(pool: autoscaler.Pool) -> Policy:
    """The pool's policy. Raises RefusedError: INVALID_ARGUMENT."""
    if not is_name(pool.name):
        raise _invalid(
            "A pool's name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', and not only dots.",
            "pool.name",
        )
    if not 1 <= pool.max_replicas <= MAX_REPLICAS:
        raise _invalid(f"max_replicas must be 1 to {MAX_REPLICAS}.", "pool.max_replicas")
    if pool.min_replicas > pool.max_replicas:
        raise _invalid("min_replicas must not exceed max_replicas.", "pool.min_replicas")
    if pool.standby_replicas > pool.max_replicas:
        raise _invalid("standby_replicas must not exceed max_replicas.", "pool.standby_replicas")
    if pool.target_requests_per_replica < 1:
        raise _invalid(
            "target_requests_per_replica must be at least 1.", "pool.target_requests_per_replica"
        )
    if pool.scale_down_window_s > MAX_WINDOW_S:
        raise _invalid(
            f"scale_down_window_s must be at most {MAX_WINDOW_S}.", "pool.scale_down_window_s"
        )
    return Policy(
        name=pool.name,
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        standby_replicas=pool.standby_replicas,
        target_requests=pool.target_requests_per_replica,
        scale_down_window_s=float(pool.scale_down_window_s),
        paused=pool.paused,
    )


def _invalid(message: str, param: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", message, param=param)
