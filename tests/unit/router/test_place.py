"""Which replica a request goes to."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from forebay_router.core.place import (
    Exclusion,
    Ledger,
    ModelLoad,
    Replica,
    View,
    exclusion_of,
    place,
)
from hypothesis import given
from hypothesis import strategies as st

MODEL = "chat@v1"


def a_load(
    *, active: bool = True, queued: int = 0, in_flight: int = 0, slots: int = 4
) -> ModelLoad:
    return ModelLoad(active, queued, in_flight, slots)


def a_replica(
    replica_id: str = "r1",
    *,
    takes_traffic: bool = True,
    draining: bool = False,
    models: Mapping[str, ModelLoad] | None = None,
) -> Replica:
    loads = {MODEL: a_load()} if models is None else models
    return Replica(replica_id, f"{replica_id}:1", takes_traffic, draining, loads)


def a_view(
    ledger: Ledger | None = None,
    *,
    down: frozenset[str] = frozenset(),
    tried: frozenset[str] = frozenset(),
) -> View:
    return View(MODEL, ledger or Ledger(), down, tried)


@pytest.mark.parametrize(
    ("replica", "view", "exclusion"),
    [
        (a_replica(), a_view(), None),
        (a_replica(models={}), a_view(), Exclusion.MODEL_ABSENT),
        (a_replica(models={MODEL: a_load(active=False)}), a_view(), Exclusion.MODEL_NOT_ACTIVE),
        (a_replica(takes_traffic=False), a_view(), Exclusion.STANDBY),
        (a_replica(draining=True), a_view(), Exclusion.DRAINING),
        (a_replica(), a_view(down=frozenset({"r1"})), Exclusion.DOWN),
        (a_replica(), a_view(tried=frozenset({"r1"})), Exclusion.TRIED),
    ],
)
def test_each_exclusion_has_its_name(
    replica: Replica, view: View, exclusion: Exclusion | None
) -> None:
    assert exclusion_of(replica, view) is exclusion
    placement = place([replica], view, draw=random.Random(0))
    assert placement.chosen is (replica if exclusion is None else None)
    assert [candidate.excluded for candidate in placement.candidates] == [exclusion]


loads = st.builds(
    ModelLoad, st.booleans(), st.integers(0, 50), st.integers(0, 50), st.integers(0, 16)
)
replicas = st.lists(
    st.builds(
        Replica,
        st.integers(0, 30).map(lambda n: f"r{n}"),
        st.just("a:1"),
        st.booleans(),
        st.booleans(),
        st.dictionaries(st.sampled_from([MODEL, "other@v1"]), loads, max_size=2),
    ),
    max_size=12,
    unique_by=lambda replica: replica.replica_id,
)
some_ids = st.frozensets(st.integers(0, 30).map(lambda n: f"r{n}"), max_size=10)


@given(fleet=replicas, down=some_ids, tried=some_ids, seed=st.integers(0, 9))
def test_an_excluded_replica_is_never_placed_and_the_cheapest_other_is(
    fleet: list[Replica], down: frozenset[str], tried: frozenset[str], seed: int
) -> None:
    view = a_view(down=down, tried=tried)
    placement = place(fleet, view, draw=random.Random(seed))
    open_ = [replica for replica in fleet if exclusion_of(replica, view) is None]
    assert len(placement.candidates) == len(fleet)
    if placement.chosen is None:
        assert not open_
        return
    assert placement.chosen in open_
    costs = [view.ledger.cost(replica, MODEL) for replica in open_]
    assert view.ledger.cost(placement.chosen, MODEL) == min(costs)


def test_load_is_relative_to_the_slots() -> None:
    small = a_replica("small", models={MODEL: a_load(in_flight=2, slots=2)})
    large = a_replica("large", models={MODEL: a_load(in_flight=4, slots=16)})
    placement = place([small, large], a_view(), draw=random.Random(0))
    assert placement.chosen is large


def test_equal_replicas_share_by_chance() -> None:
    fleet = [a_replica(f"r{n}") for n in range(4)]
    draw = random.Random(1)
    counts = Counter(
        placement.chosen.replica_id
        for placement in (place(fleet, a_view(), draw=draw) for _ in range(4_000))
        if placement.chosen is not None
    )
    assert all(900 < count < 1_100 for count in counts.values())


def test_a_burst_between_two_reports_is_spread() -> None:
    fleet = [a_replica(f"r{n}", models={MODEL: a_load(slots=8)}) for n in range(4)]
    ledger, draw = Ledger(), random.Random(0)
    for _ in range(32):
        chosen = place(fleet, a_view(ledger), draw=draw).chosen
        assert chosen is not None
        ledger.begin(chosen.replica_id, MODEL)
    assert [ledger.in_flight(replica.replica_id, [MODEL]) for replica in fleet] == [8, 8, 8, 8]


def test_a_report_holds_our_requests_and_is_not_added_to_them() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.begin("r1", MODEL)
    reported = a_replica(models={MODEL: a_load(in_flight=3, slots=1)})
    ledger.note_report(reported)
    assert ledger.cost(reported, MODEL) == 3
    ledger.begin("r1", MODEL)
    assert ledger.cost(reported, MODEL) == 4


def test_ended_requests_leave_the_cost_before_the_next_report() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.begin("r1", MODEL)
    reported = a_replica(models={MODEL: a_load(in_flight=5, slots=1)})
    ledger.note_report(reported)
    ledger.end("r1", MODEL)
    assert ledger.cost(reported, MODEL) == 4


def test_a_report_that_missed_our_requests_does_not_hide_them() -> None:
    ledger = Ledger()
    ledger.begin("r1", MODEL)
    reported = a_replica(models={MODEL: a_load(in_flight=0, slots=1)})
    ledger.note_report(reported)
    assert ledger.cost(reported, MODEL) == 1


@given(st.lists(st.sampled_from(["begin", "end", "report"]), max_size=60), st.integers(0, 9))
def test_a_cost_is_never_below_our_own_requests(steps: list[str], reported: int) -> None:
    ledger = Ledger()
    replica = a_replica(models={MODEL: a_load(in_flight=reported, slots=1)})
    own = 0
    for step in steps:
        if step == "begin":
            ledger.begin("r1", MODEL)
            own += 1
        elif step == "end" and own:
            ledger.end("r1", MODEL)
            own -= 1
        elif step == "report":
            ledger.note_report(replica)
        assert ledger.cost(replica, MODEL) >= own
    assert ledger.in_flight("r1", [MODEL]) == own
