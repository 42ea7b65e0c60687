"""Replicas that are held for down."""

from forebay_router.core.marks import Marks


def test_a_mark_is_seen_at_once() -> None:
    marks = Marks()
    assert marks.mark("r1")
    assert "r1" in marks
    assert "r2" not in marks


def test_newer_evidence_clears_a_mark() -> None:
    marks = Marks()
    marks.mark("r1")
    assert marks.clear("r1", marks.epoch("r1"))
    assert "r1" not in marks


def test_evidence_that_began_before_the_mark_does_not_clear_it() -> None:
    marks = Marks()
    before = marks.epoch("r1")
    marks.mark("r1")
    assert not marks.clear("r1", before)
    assert "r1" in marks


def test_a_second_mark_outlives_the_evidence_against_the_first() -> None:
    marks = Marks()
    marks.mark("r1")
    epoch = marks.epoch("r1")
    assert not marks.mark("r1")
    assert not marks.clear("r1", epoch)
    assert marks.clear("r1", marks.epoch("r1"))


def test_a_replica_that_left_is_forgotten() -> None:
    marks = Marks()
    marks.mark("r1")
    marks.forget("r1")
    assert "r1" not in marks
    assert marks.epoch("r1") == 0
