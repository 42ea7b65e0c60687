"""Waits between attempts."""

import random

import pytest
from forebay_common.backoff import Backoff


def test_waits_double_up_to_the_cap_and_start_again() -> None:
    backoff = Backoff(base_s=0.1, cap_s=1.0, rng=random.Random(1))
    ceilings = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for ceiling in ceilings:
        assert ceiling / 2 <= backoff.next_s() <= ceiling
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_those_who_failed_together_do_not_return_together() -> None:
    waits = {Backoff(base_s=1, cap_s=1, rng=random.Random(n)).next_s() for n in range(50)}
    assert len(waits) == 50
    assert max(waits) - min(waits) > 0.4


def test_an_endless_outage_does_not_overflow() -> None:
    backoff = Backoff(base_s=0.1, cap_s=2.0, rng=random.Random(1))
    assert max(backoff.next_s() for _ in range(5000)) <= 2.0


@pytest.mark.parametrize(("base_s", "cap_s"), [(0, 1), (2, 1), (-1, 1)])
def test_waits_that_make_no_sense_are_refused(base_s: float, cap_s: float) -> None:
    with pytest.raises(ValueError, match="base_s"):
        Backoff(base_s=base_s, cap_s=cap_s, rng=random.Random(1))
