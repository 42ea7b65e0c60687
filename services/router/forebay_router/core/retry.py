"""What follows a failed attempt.

Only what speaks against the replica, or a refusal to take the request at all, is tried elsewhere; a
caller's own mistake would fail everywhere. Once the caller has part of the answer, it is resumed.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

PUSHBACKS = frozenset({"NO_REPLICA", "QUEUE_FULL", "DRAINING", "MODEL_NOT_LOADED"})
_GONE = frozenset({"REPLICA_LOST", "NO_REPLICA", "DRAINING", "MODEL_NOT_LOADED"})


@dataclasses.dataclass(slots=True)
class Failure:
    """How an attempt failed."""

    reason: str
    replica_fault: bool
    messages: int
    """What the caller already has of the answer."""
    is_resumable: bool
    """Another replica can be told what that is."""
    attempts: int
    """Attempts so far that began the answer anew, this one included."""
    resumes: int
    """Attempts so far that went on with it, this one included."""


@dataclasses.dataclass(frozen=True, slots=True)
class Most:
    """How many attempts a request gets."""

    attempts: int
    resumes: int


class Verdict(StrEnum):
    """What follows an attempt, and why."""

    RETRY_AT_ONCE = "retry_at_once"
    """Elsewhere if there is somewhere else now; otherwise the failure stands."""
    RETRY_WAITING = "retry_waiting"
    """Elsewhere, waiting a little for a replica to appear."""
    RESUME = "resume"
    """Elsewhere, after what was delivered, waiting a little for a replica to appear."""
    NOT_RESUMABLE = "not_resumable"
    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_SPENT = "attempts_spent"


RETRIES = frozenset({Verdict.RETRY_AT_ONCE, Verdict.RETRY_WAITING})


def judge(failure: Failure, most: Most) -> Verdict:
    """Decide what follows a failed attempt."""
    if not failure.replica_fault and failure.reason not in PUSHBACKS:
        return Verdict.NOT_RETRYABLE
    if failure.messages:
        if not failure.is_resumable:
            return Verdict.NOT_RESUMABLE
        spent = failure.resumes >= most.resumes
        return Verdict.ATTEMPTS_SPENT if spent else Verdict.RESUME
    if failure.attempts >= most.attempts:
        return Verdict.ATTEMPTS_SPENT
    # What is gone is about to be replaced; what is there and fails or is full is an answer by now.
    return Verdict.RETRY_WAITING if failure.reason in _GONE else Verdict.RETRY_AT_ONCE


def is_budgeted(reason: str) -> bool:
    """Whether another attempt adds to a load that may be the cause of the failure. What is gone has
    done its last work, and its requests have to go somewhere."""
    return reason not in _GONE
