"""Whether a failed attempt is tried elsewhere."""

import pytest
from forebay_common.errors import TABLE, Reason
from forebay_router.core.retry import Failure, Verdict, judge

GONE = {Reason.REPLICA_LOST, Reason.NO_REPLICA, Reason.DRAINING, Reason.MODEL_NOT_LOADED}


def a_failure(reason: Reason, *, messages: int = 0, attempts: int = 1) -> Failure:
    return Failure(reason.value, TABLE[reason].replica_fault, messages, attempts)


@pytest.mark.parametrize("reason", Reason)
def test_only_replica_faults_and_pushbacks_are_tried_again(reason: Reason) -> None:
    verdict = judge(a_failure(reason), max_attempts=3)
    if reason in GONE:
        assert verdict is Verdict.RETRY_WAITING
    elif reason is Reason.QUEUE_FULL or TABLE[reason].replica_fault:
        assert verdict is Verdict.RETRY_AT_ONCE
    else:
        assert verdict is Verdict.NOT_RETRYABLE


@pytest.mark.parametrize("reason", Reason)
def test_a_callers_own_mistake_is_never_tried_again(reason: Reason) -> None:
    if TABLE[reason].http < 500 and reason is not Reason.QUEUE_FULL:
        assert not judge(a_failure(reason), max_attempts=3).retries


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("messages", [1, 64])
def test_nothing_is_tried_again_once_the_caller_has_some_of_the_answer(
    reason: Reason, messages: int
) -> None:
    verdict = judge(a_failure(reason, messages=messages), max_attempts=3)
    assert verdict is Verdict.ALREADY_ANSWERED


@pytest.mark.parametrize(("attempts", "retries"), [(1, True), (2, True), (3, False), (4, False)])
def test_attempts_are_bounded(attempts: int, retries: bool) -> None:
    verdict = judge(a_failure(Reason.REPLICA_LOST, attempts=attempts), max_attempts=3)
    assert verdict.retries is retries
