from __future__ import annotations

from forebay_router.core.quarantine import CONDEMNED, Quarantine


def test_two_deaths_condemn() -> None:
    quarantine = Quarantine(most=10, kept_s=60)
    assert not quarantine.has_suspects
    assert quarantine.suspect(b"q", 0.0, ("r1", 0.0)) == 1
    assert quarantine.suspect(b"q", 1.0, ("r2", 1.0)) == CONDEMNED
    assert quarantine.deaths(b"q", 2.0) == CONDEMNED
    assert quarantine.deaths(b"other", 2.0) == 0


def test_a_token_clears() -> None:
    quarantine = Quarantine(most=10, kept_s=60)
    quarantine.suspect(b"q", 0.0, ("r1", 0.0))
    quarantine.clear(b"q")
    assert quarantine.suspect(b"q", 1.0, ("r2", 1.0)) == 1


def test_suspicion_ends() -> None:
    quarantine = Quarantine(most=10, kept_s=60)
    quarantine.suspect(b"q", 0.0, ("r1", 0.0))
    assert quarantine.deaths(b"q", 60.0) == 0
    assert not quarantine.has_suspects


def test_memory_is_bounded() -> None:
    quarantine = Quarantine(most=2, kept_s=60)
    for digest in (b"a", b"b", b"c"):
        quarantine.suspect(digest, 0.0, ("r1", 0.0))
    assert [quarantine.deaths(digest, 1.0) for digest in (b"a", b"b", b"c")] == [0, 1, 1]


def test_a_suspect_has_its_replica_to_itself() -> None:
    quarantine = Quarantine(most=2, kept_s=60)
    quarantine.enter("r", b"a")
    assert quarantine.occupied == {"r"}
    assert not quarantine.leave("r", b"b")
    assert quarantine.leave("r", b"a")
    assert not quarantine.occupied


def test_the_same_asked_by_many_at_once_is_not_condemned_by_one_death() -> None:
    quarantine = Quarantine(most=10, kept_s=60.0)
    death = ("r1", 5.0)
    assert [quarantine.suspect(b"q", 5.0, death) for _ in range(4)] == [1, 1, 1, 1]
    assert quarantine.suspect(b"q", 6.0, ("r1", 6.0)) == CONDEMNED
