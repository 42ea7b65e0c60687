from __future__ import annotations

from forebay_router.core.breakers import Breakers, Options, State, Verdict
from hypothesis import given
from hypothesis import strategies as st

_WELL, _FAULT, _NOTHING = Verdict.WELL, Verdict.FAULT, Verdict.NOTHING


def _many() -> tuple[int, int]:
    return 10, 0


def test_faults_in_a_row_open() -> None:
    breakers = Breakers()
    outcomes = [breakers.ended("a", _FAULT, 0.1 * n, _many) for n in range(3)]
    assert outcomes == [None, None, State.OPEN]
    assert breakers.excluded == {"a"}


def test_a_replica_that_fails_every_other_time_is_out_within_a_dozen_requests() -> None:
    breakers = Breakers()
    sent = 0
    while breakers.state("a") is State.CLOSED:
        breakers.ended("a", _FAULT if sent % 2 else _WELL, sent / 7, _many)
        sent += 1
    assert sent <= 12


def test_rare_faults_open_nothing() -> None:
    breakers = Breakers()
    for n in range(1000):
        breakers.ended("a", _WELL if n % 10 else _FAULT, n / 20, _many)
    assert breakers.state("a") is State.CLOSED


def test_what_says_nothing_of_the_replica_opens_nothing() -> None:
    breakers = Breakers()
    for n in range(50):
        assert breakers.ended("a", _NOTHING, n, _many) is None
    assert breakers.state("a") is State.CLOSED


def test_half_of_the_replicas_stay() -> None:
    breakers = Breakers()
    ids = [f"r{n}" for n in range(7)]
    for n in range(100):
        for replica_id in ids:
            breakers.ended(replica_id, _FAULT, n / 10, lambda: (7, len(breakers.excluded)))
    assert len(breakers.excluded) == 3
    sole = Breakers()
    for n in range(100):
        sole.ended("a", _FAULT, n / 10, lambda: (1, 0))
    assert not sole.excluded


def _opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    for _ in range(3):
        breakers.ended("a", _FAULT, now, _many)
    return breakers


def test_probes_go_one_at_a_time_and_close() -> None:
    breakers = _opened()
    assert not breakers.advance(9.9)
    assert breakers.advance(10.0)
    assert breakers.state("a") is State.HALF_OPEN
    for n in range(3):
        assert "a" not in breakers.excluded
        assert breakers.sent("a")
        assert "a" in breakers.excluded
        breakers.ended("a", _WELL, 10.0 + n, _many, is_probe=True)
    assert breakers.state("a") is State.CLOSED
    assert "a" not in breakers.excluded


def test_a_probe_that_fails_opens_for_twice_as_long() -> None:
    breakers = _opened()
    breakers.advance(10.0)
    breakers.sent("a")
    assert breakers.ended("a", _FAULT, 11.0, _many) is State.OPEN
    assert not breakers.advance(30.9)
    assert breakers.advance(31.0)


def test_a_probe_whose_caller_leaves_is_followed_by_another() -> None:
    breakers = _opened()
    breakers.advance(10.0)
    breakers.sent("a")
    breakers.ended("a", _NOTHING, 11.0, _many, is_probe=True)
    assert breakers.state("a") is State.HALF_OPEN
    assert "a" not in breakers.excluded


def test_a_replica_that_leaves_is_forgotten() -> None:
    breakers = _opened()
    breakers.forget("a")
    assert not breakers.excluded
    assert not breakers.advance(10.0)


def test_a_long_good_time_makes_the_next_opening_a_first_one() -> None:
    breakers = _opened()
    breakers.advance(10.0)
    for n in range(3):
        breakers.sent("a")
        breakers.ended("a", _WELL, 10.0 + n, _many, is_probe=True)
    for n in range(400):
        breakers.ended("a", _WELL, 13.0 + n / 10, _many)
    for _ in range(20):
        breakers.ended("a", _FAULT, 60.0, _many)
    assert breakers.state("a") is State.OPEN
    assert breakers.advance(70.0)


def test_what_a_half_open_replica_had_before_proves_nothing() -> None:
    breakers = _opened()
    breakers.advance(10.0)
    breakers.sent("a")
    for n in range(5):
        assert breakers.ended("a", _WELL, 10.0 + n, _many) is None
    assert "a" in breakers.excluded
    assert breakers.state("a") is State.HALF_OPEN


def test_a_replica_that_dies_with_many_requests_was_lost_once() -> None:
    breakers = Breakers()
    verdicts = [breakers.lost("a", sent_s, 5.0 + sent_s / 100) for sent_s in (0.0, 1.0, 4.9, 5.0)]
    assert verdicts == [_FAULT, _NOTHING, _NOTHING, _NOTHING]
    assert breakers.lost("a", 5.1, 6.0) is _FAULT


def test_a_replica_that_dies_again_and_again_is_taken_out() -> None:
    breakers = Breakers()
    for death in range(3):
        verdict = breakers.lost("a", death, death + 0.5)
        breakers.ended("a", verdict, death + 0.5, _many)
    assert breakers.state("a") is State.OPEN


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.sampled_from(list(Verdict)), st.floats(0, 20), st.booleans()
        ),
        max_size=200,
    )
)
def test_never_more_than_half_are_out_but_for_running_probes(
    steps: list[tuple[str, Verdict, float, bool]],
) -> None:
    breakers = Breakers(Options(open_s=1.0))
    now = 0.0
    for replica_id, verdict, pause_s, sends in steps:
        now += pause_s
        breakers.advance(now)
        is_probe = False
        if sends and replica_id not in breakers.excluded:
            is_probe = breakers.sent(replica_id)
            assert is_probe is (breakers.state(replica_id) is State.HALF_OPEN)
        breakers.ended(
            replica_id, verdict, now, lambda: (4, len(breakers.excluded)), is_probe=is_probe
        )
        is_open = {one for one in "abcd" if breakers.state(one) is State.OPEN}
        assert is_open <= breakers.excluded
        assert sum(breakers.state(one) is not State.CLOSED for one in "abcd") <= 4
        for one in breakers.excluded - is_open:
            assert breakers.state(one) is State.HALF_OPEN
