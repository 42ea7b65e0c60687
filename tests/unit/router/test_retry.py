"""What follows a failed attempt."""

import pytest
from forebay_common.errors import TABLE, Reason
from forebay_router.core.retry import RETRIES, Failure, Most, Verdict, is_budgeted, judge

GONE = {Reason.REPLICA_LOST, Reason.NO_REPLICA, Reason.DRAINING, Reason.MODEL_NOT_LOADED}
MOST = Most(attempts=3, resumes=5)
PARTS = pytest.mark.parametrize("messages", [1, 64])


def a_failure(
    reason: Reason,
    *,
    messages: int = 0,
    is_resumable: bool = True,
    attempts: int = 1,
    resumes: int = 0,
) -> Failure:
    fault = TABLE[reason].replica_fault
    return Failure(reason.value, fault, messages, is_resumable, attempts, resumes)


@pytest.mark.parametrize("reason", Reason)
def test_only_replica_faults_and_pushbacks_are_tried_again(reason: Reason) -> None:
    verdict = judge(a_failure(reason), MOST)
    if reason in GONE:
        assert verdict is Verdict.RETRY_WAITING
    elif reason is Reason.QUEUE_FULL or TABLE[reason].replica_fault:
        assert verdict is Verdict.RETRY_AT_ONCE
    else:
        assert verdict is Verdict.NOT_RETRYABLE


@PARTS
@pytest.mark.parametrize("reason", Reason)
def test_an_answer_that_has_begun_is_resumed_or_fails(reason: Reason, messages: int) -> None:
    verdict = judge(a_failure(reason, messages=messages), MOST)
    can = reason in GONE or reason is Reason.QUEUE_FULL or TABLE[reason].replica_fault
    assert verdict is (Verdict.RESUME if can else Verdict.NOT_RETRYABLE)
    lost = judge(a_failure(reason, messages=messages, is_resumable=False), MOST)
    assert lost is (Verdict.NOT_RESUMABLE if can else Verdict.NOT_RETRYABLE)


@pytest.mark.parametrize("messages", [0, 3])
@pytest.mark.parametrize("reason", Reason)
def test_a_callers_own_mistake_is_never_tried_again(reason: Reason, messages: int) -> None:
    if TABLE[reason].http < 500 and reason is not Reason.QUEUE_FULL:
        verdict = judge(a_failure(reason, messages=messages), MOST)
        assert verdict is Verdict.NOT_RETRYABLE


@pytest.mark.parametrize(("attempts", "retries"), [(1, True), (2, True), (3, False), (4, False)])
def test_attempts_are_bounded(attempts: int, retries: bool) -> None:
    verdict = judge(a_failure(Reason.REPLICA_LOST, attempts=attempts), MOST)
    assert (verdict in RETRIES) is retries


@pytest.mark.parametrize(("resumes", "resumed"), [(0, True), (4, True), (5, False)])
def test_resumes_are_bounded_apart(resumes: int, resumed: bool) -> None:
    failure = a_failure(Reason.REPLICA_LOST, messages=1, attempts=9, resumes=resumes)
    assert (judge(failure, MOST) is Verdict.RESUME) is resumed


def test_what_may_be_overload_is_budgeted() -> None:
    assert {reason for reason in Reason if not is_budgeted(reason.value)} == GONE
