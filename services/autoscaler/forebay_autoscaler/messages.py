"""Between the core's values and the contract's messages."""

from __future__ import annotations

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler

from forebay_autoscaler.core.model import Decision

_UINT32_MAX = (1 << 32) - 1


def decision_message(decision: Decision) -> autoscaler.Decision:
    """A decision as the contract has it."""
    # A view that was never filled is infinitely old.
    age_ms = min(decision.observation_age_s * 1000, _UINT32_MAX)
    return autoscaler.Decision(
        time_unix_ms=decision.time_unix_ms,
        desired=decision.desired,
        demanded=decision.demanded,
        requests=decision.requests,
        observation_age_ms=int(age_ms),
        reason=decision.reason,
        effects=decision.effects,
    )


def decision_of(message: autoscaler.Decision) -> Decision:
    """A decision as the core has it."""
    return Decision(
        time_unix_ms=message.time_unix_ms,
        desired=message.desired,
        demanded=message.demanded,
        requests=message.requests,
        observation_age_s=message.observation_age_ms / 1000,
        reason=message.reason,
        effects=tuple(message.effects),
    )
