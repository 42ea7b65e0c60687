"""Demand, and each clamp on the way to what is desired."""

import itertools

import pytest
from forebay_autoscaler.core.demand import CLAMPS, Situation, clamp, demand, remember
from forebay_autoscaler.core.model import Limits, Policy
from hypothesis import given
from hypothesis import strategies as st

REQUESTS = st.lists(st.one_of(st.none(), st.integers(0, 50)), max_size=8)


def at(
    active: int,
    *,
    missing: int = 0,
    recent_demand: int = 0,
    is_draining: bool = False,
    low: int = 0,
    high: int = 10,
    paused: bool = False,
    scale_up_step: int = 100,
) -> Situation:
    return Situation(
        policy=Policy(
            name="p",
            min_replicas=low,
            max_replicas=high,
            standby_replicas=0,
            target_requests=4,
            scale_down_window_s=60,
            paused=paused,
        ),
        limits=Limits(scale_up_step=scale_up_step),
        active=active,
        missing=missing,
        is_draining=is_draining,
        recent_demand=recent_demand,
    )


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [
        ([], 0),
        ([0], 0),
        ([1], 1),
        ([4], 1),
        ([5], 2),
        ([4, 4, 1], 3),
        ([40], 10),
    ],
)
def test_demand_is_requests_over_the_target_rounded_up(
    requests: list[int | None], wanted: int
) -> None:
    assert demand(requests, target=4) == wanted


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [
        ([None], 1),  # busy on the way down
        ([None, 0], 1),
        ([None, None, 0], 2),
        ([9, None], 3),  # idle on the way up: 9 known requests alone
        ([4, None], 2),
        ([8, None, None], 3),  # never more than there are because of what is not known
    ],
)
def test_a_replica_of_which_nothing_is_known_is_idle_going_up_and_busy_going_down(
    requests: list[int | None], wanted: int
) -> None:
    assert demand(requests, target=4) == wanted


@pytest.mark.parametrize(
    ("name", "demanded", "situation", "desired"),
    [
        ("steady", 2, at(2, recent_demand=2), 2),
        ("queue_depth", 5, at(2, recent_demand=5), 5),
        ("queue_depth", 1, at(2, recent_demand=1), 1),
        ("missing_data", 1, at(3, missing=1, recent_demand=1), 3),
        ("scale_down_window", 1, at(3, recent_demand=3), 3),
        ("scale_down_window", 1, at(4, recent_demand=3), 3),
        ("scale_down_window", 1, at(2, recent_demand=9), 2),
        ("scale_up_step", 9, at(1, recent_demand=9, scale_up_step=2), 3),
        ("scale_down_step", 0, at(4, recent_demand=0), 3),
        ("scale_down_step", 3, at(4, recent_demand=3, is_draining=True), 4),
        ("min_replicas", 0, at(1, recent_demand=0, low=1), 1),
        ("min_replicas", 0, at(0, recent_demand=0, low=3, scale_up_step=1), 3),
        ("max_replicas", 9, at(2, recent_demand=9, high=5), 5),
        ("max_replicas", 8, at(8, recent_demand=8, high=5), 5),
        ("paused", 9, at(2, recent_demand=9, paused=True), 2),
        ("paused", 2, at(2, recent_demand=2, paused=True), 2),
        ("paused", 0, at(7, recent_demand=0, high=5, paused=True), 7),
    ],
)
def test_each_clamp_names_itself(
    name: str, demanded: int, situation: Situation, desired: int
) -> None:
    assert clamp(demanded, situation) == (desired, name)


def test_every_clamp_is_tested_above() -> None:
    parameters = test_each_clamp_names_itself.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for name, _ in CLAMPS} <= {case[0] for case in parameters}


PULLS = {
    "missing_data": (1, {"missing": 1, "recent_demand": 1}),
    "scale_down_window": (1, {"recent_demand": 4}),
    "scale_up_step": (9, {"scale_up_step": 1, "recent_demand": 9}),
    "scale_down_step": (0, {"recent_demand": 0}),
    "min_replicas": (0, {"low": 6, "recent_demand": 0}),
    "max_replicas": (9, {"high": 3, "recent_demand": 9}),
    "paused": (9, {"paused": True, "recent_demand": 9}),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PULLS, 2)))
def test_of_two_clamps_the_later_one_has_the_last_word(first: str, second: str) -> None:
    """Both pull at once; whatever both allow, the bounds and a pause hold."""
    demanded, options = PULLS[second]
    merged = {**PULLS[first][1], **options}
    if merged.get("low", 0) > merged.get("high", 10):
        merged["high"] = merged["low"]
    situation = at(5, **merged)  # type: ignore[arg-type]
    desired, reason = clamp(demanded, situation)
    if situation.policy.paused:
        assert (desired, reason) == (5, "paused")
        return
    assert situation.policy.min_replicas <= desired <= situation.policy.max_replicas
    if reason not in ("steady", "queue_depth"):
        order = [name for name, _ in CLAMPS]
        after = order[order.index(reason) + 1 :]
        applied = dict(CLAMPS)
        assert all(applied[name](desired, situation) == desired for name in after)


@given(
    REQUESTS,
    st.integers(1, 8),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.integers(0, 12),
    st.booleans(),
)
def test_what_is_desired_is_never_out_of_bounds_nor_lower_for_missing_data(
    requests: list[int | None], target: int, bounds: tuple[int, int], recent: int, draining: bool
) -> None:
    low, extra = bounds
    demanded = demand(requests, target=target)
    situation = at(
        len(requests),
        missing=requests.count(None),
        recent_demand=max(recent, demanded),
        is_draining=draining,
        low=low,
        high=max(1, low + extra),
    )
    desired, _ = clamp(demanded, situation)
    assert low <= desired <= max(1, low + extra)
    if None in requests:
        assert desired >= min(len(requests), situation.policy.max_replicas)


@given(REQUESTS, st.integers(1, 8))
def test_knowing_less_never_raises_demand_above_what_is_there(
    requests: list[int | None], target: int
) -> None:
    known = [each for each in requests if each is not None]
    assert demand(requests, target=target) <= max(len(requests), demand(known, target=target))
    assert demand(requests, target=target) >= demand(known, target=target)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0, 60),
)
def test_what_is_remembered_is_the_windows_maximum_and_bounded(
    steps: list[tuple[float, int]], window_s: float
) -> None:
    now_s = 0.0
    demands: tuple[tuple[float, int], ...] = ()
    all_demands: list[tuple[float, int]] = []
    for wait_s, demanded in steps:
        now_s += wait_s
        all_demands.append((now_s, demanded))
        demands = remember(demands, demanded, now_s=now_s, window_s=window_s)
        inside = [wanted for at_s, wanted in all_demands if now_s - at_s < window_s]
        assert max(wanted for _, wanted in demands) == max([demanded, *inside])
        assert len(demands) <= 10
