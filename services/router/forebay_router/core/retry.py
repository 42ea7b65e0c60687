"""Whether a failed attempt is tried elsewhere.

Only what speaks against the replica, or a refusal to take the request at all, is tried again, and
only while the caller has nothing of the answer. A caller's own mistake would fail everywhere.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

PUSHBACKS = frozenset({"NO_REPLICA", "QUEUE_FULL", "DRAINING", "MODEL_NOT_LOADED"})
_GONE = frozenset({"REPLICA_LOST", "NO_REPLICA", "DRAINING", "MODEL_NOT_LOADED"})


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt failed."""

    reason: str
    replica_fault: bool
    messages: int
    """What the caller already has of the answer."""
    attempts: int
    """Attempts so far, this one included."""


class Verdict(StrEnum):
    """What follows an attempt, and why."""

    RETRY_AT_ONCE = "retry_at_once"
    """Elsewhere if there is somewhere else now; otherwise the failure stands."""
    RETRY_WAITING = "retry_waiting"
    """Elsewhere, waiting a little for a replica to appear."""
    ALREADY_ANSWERED = "already_answered"
    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_SPENT = "attempts_spent"

    @property
    def retries(self) -> bool:
        """Whether there is another attempt."""
        return self in (Verdict.RETRY_AT_ONCE, Verdict.RETRY_WAITING)


def judge(failure: Failure, *, max_attempts: int) -> Verdict:
    """Decide what follows a failed attempt."""
    if failure.messages:
        return Verdict.ALREADY_ANSWERED
    if not failure.replica_fault and failure.reason not in PUSHBACKS:
        return Verdict.NOT_RETRYABLE
    if failure.attempts >= max_attempts:
        return Verdict.ATTEMPTS_SPENT
    # What is gone is about to be replaced; what is there and fails or is full is an answer by now.
    return Verdict.RETRY_WAITING if failure.reason in _GONE else Verdict.RETRY_AT_ONCE
