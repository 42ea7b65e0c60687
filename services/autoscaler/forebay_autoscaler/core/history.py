"""The newest decisions of a pool, newest first and bounded; ticks that only repeat are one."""

from __future__ import annotations

from forebay_autoscaler.core.model import Decision


def record(
    decisions: tuple[Decision, ...], decision: Decision, *, limit: int
) -> tuple[Decision, ...]:
    """The decisions with one more; it takes the newest one's place when it only repeats it."""
    if decisions and is_repeated(decisions[0], decision):
        return (decision, *decisions[1:])
    return (decision, *decisions)[:limit]


def is_repeated(newest: Decision, decision: Decision) -> bool:
    """Whether a decision says nothing that the newest one does not: no order, the same outcome."""
    return (
        not newest.effects
        and not decision.effects
        and newest.reason == decision.reason
        and newest.desired == decision.desired
    )
