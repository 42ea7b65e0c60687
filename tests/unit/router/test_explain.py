"""What is remembered of recent requests."""

from forebay_router.core.explain import Recent, Record, most_telling
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
    assert most_telling(candidates, limit=4) == tuple(candidates)
