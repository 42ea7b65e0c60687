"""What one tick orders, and what a series of ticks never does."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from forebay_autoscaler.core.model import (
    Effect,
    Kind,
    Limits,
    Observation,
    Phase,
    Plan,
    Policy,
    PoolState,
    ReplicaSeen,
)
from forebay_autoscaler.core.tick import new_replica_id, on_tick
from hypothesis import example, given, settings
from hypothesis import strategies as st

LIMITS = Limits(
    start_timeout_s=100,
    backoff_initial_s=1,
    backoff_max_s=8,
    backoff_reset_s=50,
    order_timeout_s=60,
    lost_after_s=10,
)


def a_policy(**changes: object) -> Policy:
    fields: dict[str, object] = {
        "name": "p",
        "min_replicas": 1,
        "max_replicas": 4,
        "standby_replicas": 0,
        "target_requests": 4,
        "scale_down_window_s": 30.0,
    }
    return Policy(**{**fields, **changes})  # type: ignore[arg-type]


def a_replica(
    replica_id: str,
    phase: Phase = Phase.ACTIVE,
    *,
    requests: int | None = 0,
    age_s: float = 500.0,
    is_owned: bool = True,
    is_announced: bool = True,
    was_active: bool = False,
) -> ReplicaSeen:
    return ReplicaSeen(replica_id, phase, requests, age_s, is_owned, is_announced, was_active)


def seen(*replicas: ReplicaSeen, now_s: float = 1000.0, **changes: object) -> Observation:
    fields: dict[str, object] = {"time_unix_ms": 0, "age_s": 0.1}
    return Observation(
        now_s=now_s,
        replicas=replicas,
        **{**fields, **changes},  # type: ignore[arg-type]
    )


class Ticks:
    """A pool under on_tick, with its state carried on."""

    def __init__(self, limits: Limits = LIMITS, **policy: object) -> None:
        self.policy = a_policy(**policy)
        self.limits = limits
        self.state = PoolState(fence=7)

    def __call__(self, *replicas: ReplicaSeen, **changes: object) -> Plan:
        plan = on_tick(self.policy, self.limits, self.state, seen(*replicas, **changes))  # type: ignore[arg-type]
        self.state = plan.state
        return plan


def kinds(plan: Plan) -> list[str]:
    return [effect.kind.value for effect in plan.effects]


def ordered(plan: Plan) -> list[tuple[str, str]]:
    return [(effect.kind.value, effect.replica_id) for effect in plan.effects]


def test_an_empty_pool_is_launched_up_to_its_minimum_and_its_standbys() -> None:
    plan = Ticks(min_replicas=1, standby_replicas=1)()
    assert kinds(plan) == ["launch", "launch"]
    assert (plan.decision.desired, plan.decision.reason) == (1, "min_replicas")


def test_only_so_many_start_at_a_time() -> None:
    ticks = Ticks(min_replicas=4)
    first = ticks()
    assert kinds(first) == ["launch"] * LIMITS.max_starting
    ids = [effect.replica_id for effect in first.effects]
    starting = [a_replica(i, Phase.STARTING, requests=None, age_s=1) for i in ids]
    assert kinds(ticks(*starting)) == []
    ready = [a_replica(i, Phase.STANDBY, age_s=9) for i in ids]
    assert kinds(ticks(*ready)) == ["activate", "activate", "launch", "launch"]


def test_ids_are_never_used_twice() -> None:
    ids = {new_replica_id(p, f, n) for p in "ab" for f in (7, 8) for n in range(100)}
    assert len(ids) == 400


def test_a_warm_standby_is_activated_before_anything_is_launched() -> None:
    ticks = Ticks(standby_replicas=1)
    plan = ticks(a_replica("a", requests=8), a_replica("s", Phase.STANDBY))
    assert plan.effects[0] == Effect(Kind.ACTIVATE, "s")
    assert kinds(plan) == ["activate", "launch"]  # the launch refills behind
    assert (plan.decision.reason, plan.decision.demanded) == ("queue_depth", 2)


def test_the_standby_that_has_proven_itself_longest_goes_first() -> None:
    plan = Ticks(standby_replicas=2)(
        a_replica("a", requests=8),
        a_replica("new", Phase.STANDBY, age_s=5),
        a_replica("old", Phase.STANDBY, age_s=50),
    )
    assert ordered(plan)[0] == ("activate", "old")


def test_a_standby_is_no_part_of_what_is_active() -> None:
    plan = Ticks(standby_replicas=1)(a_replica("a", requests=2), a_replica("s", Phase.STANDBY))
    assert plan.effects == ()
    assert plan.decision.reason == "steady"


def test_a_missing_standby_is_refilled() -> None:
    plan = Ticks(standby_replicas=1)(a_replica("a", requests=2))
    assert kinds(plan) == ["launch"]
    assert plan.decision.reason == "warm_pool"


def test_there_are_never_more_than_the_maximum_whatever_they_do() -> None:
    plan = Ticks(max_replicas=3, standby_replicas=1)(
        a_replica("a", requests=90),
        a_replica("b", Phase.DRAINING),
        a_replica("c", Phase.STARTING, requests=None),
    )
    assert kinds(plan) == ["drain"]
    assert plan.decision.desired == 3


def test_standbys_give_way_to_active_ones_at_the_maximum() -> None:
    plan = Ticks(max_replicas=2, standby_replicas=1)(
        a_replica("a", requests=8), a_replica("s", Phase.STANDBY)
    )
    assert ordered(plan) == [("activate", "s")]


@pytest.mark.parametrize("phase", [Phase.STANDBY, Phase.STARTING])
def test_what_is_ordered_is_not_ordered_again_while_it_is_under_way(phase: Phase) -> None:
    ticks = Ticks(standby_replicas=1)
    world = (a_replica("a", requests=8), a_replica("s", phase))
    first = ticks(*world)
    for second in range(1, 30):
        assert ticks(*world, now_s=1000.0 + second).effects == ()
    assert first.effects != ()


def test_an_order_that_failed_is_given_again_after_a_while() -> None:
    ticks = Ticks()
    world = (a_replica("a", requests=8), a_replica("s", Phase.STANDBY))
    assert ordered(ticks(*world)) == [("activate", "s")]
    failed = ticks(*world, now_s=1000.5, failed=frozenset({"s"}))
    assert "activate" not in kinds(failed)
    assert failed.next_tick_s == pytest.approx(LIMITS.retry_after_s)
    assert ("activate", "s") in ordered(ticks(*world, now_s=1002.0))


def test_an_order_whose_result_is_never_seen_is_given_again_in_the_end() -> None:
    ticks = Ticks(max_replicas=2)
    world = (a_replica("a", requests=8), a_replica("s", Phase.STANDBY))
    ticks(*world)
    assert ticks(*world, now_s=1059.0).effects == ()
    assert ticks(*world, now_s=1061.0).effects == ()
    assert ordered(ticks(*world, now_s=1063.0)) == [("activate", "s")]


def test_one_replica_leaves_at_a_time_the_least_loaded_first_then_the_newest() -> None:
    ticks = Ticks(scale_down_window_s=0.0)
    world = [
        a_replica("busy", requests=3, age_s=1),
        a_replica("old", requests=0, age_s=90),
        a_replica("new", requests=0, age_s=9),
    ]
    first = ticks(*world)
    assert ordered(first) == [("drain", "new")]
    assert first.decision.reason == "scale_down_step"
    draining = dataclasses.replace(world[2], phase=Phase.DRAINING)
    assert ticks(*world[:2], draining, now_s=1001.0).effects == ()
    assert ordered(ticks(*world[:2], now_s=1002.0)) == [("drain", "old")]
    assert ticks(world[0], now_s=1003.0).effects == ()


def test_nothing_leaves_before_demand_was_low_for_the_whole_window() -> None:
    ticks = Ticks(scale_down_window_s=30.0)
    busy = [a_replica("a", requests=4), a_replica("b", requests=4)]
    idle = [a_replica("a"), a_replica("b")]
    ticks(*busy)
    for second in range(1, 30):
        plan = ticks(*idle, now_s=1000.0 + second)
        assert (plan.effects, plan.decision.reason) == ((), "scale_down_window")
    assert kinds(ticks(*idle, now_s=1031.0)) == ["drain"]


def test_a_new_leader_waits_a_whole_window_before_it_takes_anything_away() -> None:
    ticks = Ticks(scale_down_window_s=30.0)
    idle = [a_replica("a"), a_replica("b")]
    assert ticks(*idle).decision.reason == "scale_down_window"
    assert ticks(*idle, now_s=1029.0).effects == ()
    assert kinds(ticks(*idle, now_s=1031.0)) == ["drain"]


def test_what_nobody_waits_for_any_more_is_stopped_while_it_starts() -> None:
    plan = Ticks(scale_down_window_s=0.0)(
        a_replica("a", requests=1), a_replica("s", Phase.STARTING, requests=None)
    )
    assert ordered(plan) == [("stop", "s")]


def test_a_surplus_standby_is_drained() -> None:
    plan = Ticks(standby_replicas=1)(
        a_replica("a", requests=1),
        a_replica("s1", Phase.STANDBY, age_s=50),
        a_replica("s2", Phase.STANDBY, age_s=5),
    )
    assert ordered(plan) == [("drain", "s2")]


def test_only_what_the_launcher_runs_is_drained() -> None:
    world = [a_replica("a", is_owned=False), a_replica("b", requests=1)]
    plan = Ticks(scale_down_window_s=0.0)(*world)
    assert ordered(plan) == [("drain", "b")]
    plan = Ticks(scale_down_window_s=0.0)(world[0], dataclasses.replace(world[1], is_owned=False))
    assert plan.effects == ()


def test_a_drain_that_an_earlier_leader_began_is_finished() -> None:
    plan = Ticks()(a_replica("a", requests=1), a_replica("b", Phase.DRAINING))
    assert ordered(plan) == [("drain", "b")]


def test_paused_means_no_order_at_all() -> None:
    ticks = Ticks(paused=True, min_replicas=3)
    plan = ticks(a_replica("a", requests=90), a_replica("b", Phase.DRAINING))
    assert (plan.effects, plan.decision.reason) == ((), "paused")


def test_stale_figures_are_no_ground_for_orders() -> None:
    plan = Ticks(min_replicas=3)(a_replica("a", requests=90), age_s=LIMITS.stale_after_s + 1)
    assert (plan.effects, plan.decision.reason) == ((), "stale_data")


def test_after_stale_figures_the_window_begins_again() -> None:
    ticks = Ticks(scale_down_window_s=30.0)
    idle = [a_replica("a"), a_replica("b")]
    ticks(*idle)
    ticks(*idle, now_s=1020.0, age_s=99.0)
    assert ticks(*idle, now_s=1035.0).effects == ()
    assert kinds(ticks(*idle, now_s=1066.0)) == ["drain"]


def test_with_a_silent_replica_nothing_is_taken_away_and_it_is_replaced_once_lost() -> None:
    ticks = Ticks(min_replicas=2, scale_down_window_s=0.0)
    ticks(a_replica("a"), a_replica("b"), a_replica("s", Phase.STANDBY, is_owned=False))
    silent = [
        a_replica("a"),
        a_replica("b", Phase.STARTING, requests=None, is_announced=False),
        a_replica("s", Phase.STANDBY, is_owned=False),
    ]
    plan = ticks(*silent, now_s=1001.0)
    assert (plan.effects, plan.decision.demanded) == ((), 1)
    assert plan.decision.reason == "missing_data"
    lost = ticks(*silent, now_s=1012.0)
    assert ordered(lost)[0] == ("activate", "s")


def test_a_new_leader_waits_for_the_active_ones_to_be_announced_again() -> None:
    """After an outage of etcd every lease has expired, and standbys may be back first."""
    ticks = Ticks(min_replicas=1, standby_replicas=1)
    silent = a_replica("a", Phase.STARTING, requests=None, is_announced=False, was_active=True)
    standby = a_replica("s", Phase.STANDBY)
    plan = ticks(silent, dataclasses.replace(standby, phase=Phase.STARTING, is_announced=False))
    assert (plan.effects, plan.decision.reason) == ((), "steady")
    assert ticks(silent, standby, now_s=1005.0).effects == ()
    assert ordered(ticks(silent, standby, now_s=1011.0))[0] == ("activate", "s")


def test_a_replica_whose_models_are_gone_is_replaced_at_once() -> None:
    ticks = Ticks(min_replicas=1, standby_replicas=1)
    ticks(a_replica("a"), a_replica("s", Phase.STANDBY))
    plan = ticks(a_replica("a", Phase.STARTING), a_replica("s", Phase.STANDBY), now_s=1001.0)
    assert ordered(plan) == [("activate", "s")]


def test_a_replica_that_is_killed_is_replaced_in_the_same_tick() -> None:
    ticks = Ticks(min_replicas=2)
    ticks(a_replica("a"), a_replica("b"))
    assert kinds(ticks(a_replica("a"), now_s=1001.0)) == ["launch"]


def test_what_does_not_become_ready_is_stopped_and_launched_again() -> None:
    ticks = Ticks()
    stuck = a_replica("x", Phase.STARTING, requests=None)
    assert ticks(stuck).effects == ()
    assert ticks(stuck, now_s=1099.0).effects == ()
    plan = ticks(stuck, now_s=1100.0)
    assert [str(effect) for effect in plan.effects] == ["stop x (start_timeout)"] + [
        str(effect) for effect in plan.effects[1:]
    ]
    assert kinds(plan) == ["stop", "launch"]
    assert plan.decision.reason == "start_timeout"
    assert ticks(stuck, now_s=1101.0).effects == ()


def test_launches_that_keep_failing_wait_longer_each_time_and_up_to_a_bound() -> None:
    ticks = Ticks(max_replicas=1)
    now_s, moments = 1000.0, []
    (launch,) = ticks(now_s=now_s).effects
    for _ in range(9):
        now_s += 0.1
        plan = ticks(now_s=now_s, gone=frozenset({launch.replica_id}))
        while not plan.effects:
            assert plan.decision.reason == "launch_backoff"
            now_s += plan.next_tick_s
            plan = ticks(now_s=now_s)
        (launch,) = plan.effects
        moments.append(now_s)
    gaps = [round(b - a - 0.1, 3) for a, b in itertools.pairwise(moments)]
    assert gaps == [1, 2, 4, 8, 8, 8, 8, 8]


def test_failures_are_forgotten_after_a_time_without_any() -> None:
    ticks = Ticks(max_replicas=1)
    (launch,) = ticks().effects
    (launch,) = ticks(now_s=1001.0, gone=frozenset({launch.replica_id})).effects
    ready = a_replica(launch.replica_id)
    ticks(ready, now_s=1010.0)
    ticks(ready, now_s=1070.0)
    assert kinds(ticks(now_s=1071.0)) == ["launch"]


def test_nothing_is_launched_while_its_models_are_unknown() -> None:
    plan = Ticks()(launch_blocker="model_not_found")
    assert (plan.effects, plan.decision.reason) == ((), "model_not_found")


def test_a_drained_replica_is_no_failed_launch() -> None:
    ticks = Ticks(scale_down_window_s=0.0)
    world = [a_replica("a", requests=1), a_replica("b", age_s=5)]
    assert ordered(ticks(*world)) == [("drain", "b")]
    assert ticks(world[0], now_s=1001.0).state.failures == 0


class World:
    """A pool whose orders take a random time, fail at random, and whose replicas die at random."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self.policy = policy
        self.rng = rng
        self.now_s = 0.0
        self.replicas: dict[str, ReplicaSeen] = {}
        self.open: dict[str, tuple[Effect, float]] = {}
        self.failed: set[str] = set()
        self.gone: set[str] = set()

    def order(self, effect: Effect) -> None:
        assert effect.replica_id not in self.open, f"a second order while one is open: {effect}"
        if effect.kind is Kind.LAUNCH:
            assert effect.replica_id not in self.replicas
            launching = [e for e, _ in self.open.values() if e.kind is Kind.LAUNCH]
            assert len(self.replicas) + len(launching) < self.policy.max_replicas
        if effect.kind is Kind.DRAIN and self.replicas[effect.replica_id].phase is Phase.ACTIVE:
            active = [r for r in self.replicas.values() if r.phase is Phase.ACTIVE]
            assert len(active) > self.policy.min_replicas
        self.open[effect.replica_id] = (effect, self.now_s + self.rng.uniform(0, 5))

    def pass_time(self) -> None:
        self.now_s += self.rng.uniform(0.1, 3)
        for replica_id, (effect, due_s) in list(self.open.items()):
            if due_s <= self.now_s:
                del self.open[replica_id]
                if self.rng.random() < 0.2:
                    self.failed.add(replica_id)
                else:
                    self.carry_out(effect)
        for replica in list(self.replicas.values()):
            self.live(replica)

    def carry_out(self, effect: Effect) -> None:
        replica_id = effect.replica_id
        replica = self.replicas.get(replica_id)
        if effect.kind is Kind.LAUNCH:
            self.replicas[replica_id] = a_replica(
                replica_id, Phase.STARTING, requests=None, age_s=0, is_announced=False
            )
        elif replica is None:
            self.failed.add(replica_id)
        elif effect.kind is Kind.ACTIVATE:
            self.replicas[replica_id] = dataclasses.replace(replica, phase=Phase.ACTIVE)
        else:
            del self.replicas[replica_id]

    def live(self, replica: ReplicaSeen) -> None:
        chance = self.rng.random()
        changes: dict[str, object] = {"age_s": replica.age_s + 1}
        if chance < 0.01:
            del self.replicas[replica.replica_id]
            self.gone.add(replica.replica_id)
            return
        if replica.phase is Phase.STARTING and chance < 0.5:
            changes |= {"phase": Phase.STANDBY, "is_announced": True, "requests": 0}
        if replica.phase is Phase.ACTIVE:
            changes["requests"] = self.rng.choice([0, 0, 1, 4, 9, None])
        self.replicas[replica.replica_id] = dataclasses.replace(replica, **changes)  # type: ignore[arg-type]

    def observe(self) -> Observation:
        failed, self.failed = self.failed, set()
        return Observation(
            now_s=self.now_s,
            time_unix_ms=0,
            age_s=self.rng.choice([0.1, 0.1, 0.1, 99.0]),
            replicas=tuple(self.replicas[i] for i in sorted(self.replicas)),
            failed=frozenset(failed),
            gone=frozenset(self.gone),
        )


# While a starting replica was being stopped, the pool's size was held and the warm pool refilled.
@example(seed=12, low=2, extra=3, standby=1, window_s=0.0)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    low=st.integers(0, 3),
    extra=st.integers(0, 3),
    standby=st.integers(0, 2),
    window_s=st.sampled_from([0.0, 5.0, 60.0]),
)
def test_no_series_of_ticks_orders_twice_or_leaves_the_bounds(
    seed: int, low: int, extra: int, standby: int, window_s: float
) -> None:
    high = max(1, low + extra)
    policy = a_policy(
        min_replicas=low,
        max_replicas=high,
        standby_replicas=min(standby, high),
        scale_down_window_s=window_s,
    )
    world = World(policy, random.Random(seed))
    state = PoolState(fence=1)
    for _ in range(60):
        observation = world.observe()
        plan = on_tick(policy, LIMITS, state, observation)
        state = plan.state
        decision = plan.decision
        if decision.reason == "stale_data":
            assert plan.effects == ()
        else:
            assert low <= decision.desired <= high
        missing = [
            r for r in observation.replicas if r.phase is Phase.ACTIVE and r.requests is None
        ]
        by_id = {replica.replica_id: replica for replica in observation.replicas}
        for effect in plan.effects:
            if effect.kind is Kind.DRAIN and missing:
                assert by_id[effect.replica_id].phase is not Phase.ACTIVE
            world.order(effect)
        assert len(plan.effects) == len({effect.replica_id for effect in plan.effects})
        assert sum(effect.kind in (Kind.DRAIN, Kind.STOP) for effect in plan.effects) <= 1
        assert 0 < plan.next_tick_s <= LIMITS.tick_interval_s
        again = on_tick(policy, LIMITS, state, dataclasses.replace(observation, failed=frozenset()))
        assert again.effects == ()
        world.pass_time()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_a_quiet_world_comes_to_rest_at_its_minimum(seed: int, low: int) -> None:
    policy = a_policy(min_replicas=low, max_replicas=5, standby_replicas=1, scale_down_window_s=5.0)
    world = World(policy, random.Random(seed))
    state = PoolState(fence=1)
    for step in range(200):
        observation = dataclasses.replace(world.observe(), age_s=0.1)
        if step > 60:
            calm = [dataclasses.replace(r, requests=0) for r in observation.replicas]
            observation = dataclasses.replace(observation, replicas=tuple(calm))
            world.rng.random = lambda: 0.3  # type: ignore[method-assign]  # nothing fails or dies
        plan = on_tick(policy, LIMITS, state, observation)
        state = plan.state
        for effect in plan.effects:
            world.order(effect)
        world.pass_time()
    phases = [replica.phase for replica in world.replicas.values()]
    assert phases.count(Phase.ACTIVE) == low
    assert phases.count(Phase.STANDBY) == 1
    assert len(phases) == low + 1
