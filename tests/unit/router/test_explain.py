"""What is remembered of recent requests."""

from forebay_router.core.explain import Attempt, Recent, Record, most_telling
from forebay_router.core.place import Candidate, Exclusion


def test_the_oldest_record_is_forgotten_first() -> None:
    recent = Recent(limit=2)
    for name in ("a", "b", "c"):
        recent.add(Record(name))
    assert recent.get("a") is None
    assert recent.get("b") is not None
    assert len(recent) == 2


def test_a_repeated_id_replaces_the_older_record() -> None:
    recent = Recent(limit=2)
    first, second = Record("a"), Record("a")
    recent.add(first)
    recent.add(second)
    assert recent.get("a") is second
    assert len(recent) == 1


def test_the_cheapest_candidates_are_kept_and_then_the_excluded() -> None:
    candidates = [
        Candidate("gone", None, Exclusion.DOWN),
        Candidate("dear", 2.0, None),
        Candidate("cheap", 0.5, None),
        Candidate("drained", None, Exclusion.DRAINING),
    ]
    kept = most_telling(candidates, limit=3)
    assert [candidate.replica_id for candidate in kept] == ["cheap", "dear", "gone"]
    assert most_telling(candidates, limit=4) == candidates


def test_an_attempt_says_when_it_was_answered_and_how_many_were_excluded() -> None:
    candidates = [Candidate("cheap", 0.5, None), Candidate("gone", None, Exclusion.DOWN)]
    attempt = Attempt("cheap", candidates, started_s=10.0)
    assert attempt.excluded == {"down": 1}
    assert attempt.first_message_ms is None
    attempt.first_message_s = 10.25
    assert attempt.first_message_ms == 250


def test_a_record_says_how_long_it_took() -> None:
    record = Record("a", began_s=5.0)
    assert record.duration_s(7.0) == 2.0
    record.ended_s = 6.0
    assert record.duration_s(7.0) == 1.0
