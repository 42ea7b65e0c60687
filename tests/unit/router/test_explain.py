"""What is remembered of recent requests."""

from forebay_router.core.explain import Attempt, Recent, Record, most_telling
from forebay_router.core.place import Candidate, Exclusion, Weighed


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
    weighed: list[Weighed] = [
        ("gone", Exclusion.DOWN),
        ("dear", 2.0),
        ("cheap", 0.5),
        ("drained", Exclusion.DRAINING),
    ]
    kept = most_telling(weighed, limit=3)
    assert [replica_id for replica_id, _ in kept] == ["cheap", "dear", "gone"]
    assert most_telling(weighed, limit=4) == weighed


def test_an_attempt_says_what_spoke_for_each_candidate_and_when_it_was_answered() -> None:
    attempt = Attempt("cheap", [("cheap", 0.5), ("gone", Exclusion.DOWN)], started_s=10.0)
    assert attempt.candidates == (
        Candidate("cheap", 0.5, None),
        Candidate("gone", None, Exclusion.DOWN),
    )
    assert attempt.first_message_ms is None
    attempt.first_message_s = 10.25
    assert attempt.first_message_ms == 250
