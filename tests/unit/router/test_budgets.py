from __future__ import annotations

from forebay_router.core.budgets import AttemptBudget


def test_a_share_of_requests_can_be_tried_again() -> None:
    budget = AttemptBudget(share=0.2, per_s=0.0)
    taken = 0
    for _ in range(1000):
        budget.pay_in()
        taken += budget.take(0.0)
    assert taken == 200


def test_a_quiet_router_can_retry_too_but_not_save_up_for_ever() -> None:
    budget = AttemptBudget(share=0.0, per_s=1.0, most=5.0)
    assert sum(budget.take(0.0) for _ in range(10)) == 5
    assert sum(budget.take(2.0) for _ in range(10)) == 2
    assert sum(budget.take(1000.0) for _ in range(10)) == 5


def test_a_clock_that_stands_gives_nothing() -> None:
    budget = AttemptBudget(share=0.0, per_s=0.0)
    assert not budget.take(0.0)
