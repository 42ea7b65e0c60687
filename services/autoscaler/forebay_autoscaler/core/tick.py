"""One turn of the control loop: `on_tick(policy, limits, state, observation) -> Plan`.

Every replica is launched as a standby and becomes active by being claimed, so whichever is warm
first serves first. An order stays open until its result is seen: until then its replica counts as
what it was ordered to be and gets no second order. Nothing is ordered on stale figures.

Occupied = active + standby + starting + draining never exceeds `max_replicas` by a launch; active
never falls below `min_replicas` by a drain; replicas leave one at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence, Set

from forebay_autoscaler.core import demand as demands
from forebay_autoscaler.core.model import (
    READY,
    Decision,
    Effect,
    Kind,
    Limits,
    Observation,
    Order,
    Phase,
    Plan,
    Policy,
    PoolState,
    ReplicaSeen,
    Sighting,
    frozen,
)

STALE = "stale_data"
LAUNCH_BACKOFF = "launch_backoff"
START_TIMEOUT = "start_timeout"
WARM_POOL = "warm_pool"

_PHASE_ONCE_DONE = {
    Kind.LAUNCH: Phase.STARTING,
    Kind.ACTIVATE: Phase.ACTIVE,
    Kind.DRAIN: Phase.DRAINING,
    Kind.STOP: Phase.DRAINING,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Fleet:
    """The pool's replicas, each in the phase its open order leads to."""

    active: tuple[ReplicaSeen, ...]
    standby: tuple[ReplicaSeen, ...]
    starting: tuple[ReplicaSeen, ...]
    draining: tuple[ReplicaSeen, ...]

    @property
    def total(self) -> int:
        return len(self.active) + len(self.standby) + len(self.starting)

    @property
    def occupied(self) -> int:
        return self.total + len(self.draining)


def on_tick(policy: Policy, limits: Limits, state: PoolState, observation: Observation) -> Plan:
    """Decide for one pool.

    Args:
        policy: the pool's.
        limits: bounds that hold for every pool.
        state: what the last tick returned, or `PoolState(fence)` at the start of a leadership.
        observation: what is known now.
    """
    if observation.age_s > limits.stale_after_s:
        return _wait_for_data(limits, state, observation)
    leaving = _ids_of(state.orders, Kind.DRAIN, Kind.STOP)
    state = _settle(limits, state, observation)
    state, late = _track(limits, state, observation, leaving)
    fleet = _sort_out(limits, state, observation)
    requests = [replica.requests for replica in fleet.active]
    demanded = demands.demand(requests, target=policy.target_requests)
    now_s = observation.now_s
    # The first demand of a leadership is at least what there is: the window before is not known.
    recent = state.demands or ((now_s, len(fleet.active)),)
    window_s = policy.scale_down_window_s
    recent = demands.remember(recent, demanded, now_s=now_s, window_s=window_s)
    situation = demands.Situation(
        policy=policy,
        limits=limits,
        active=len(fleet.active),
        missing=requests.count(None),
        is_draining=bool(fleet.draining),
        recent_demand=max(wanted for _, wanted in recent),
    )
    desired, reason = demands.clamp(demanded, situation)
    # One that leaves holds the next one back; what is only held back needs no warm pool behind it.
    unheld, _ = demands.clamp(demanded, dataclasses.replace(situation, is_draining=False))
    effects: tuple[Effect, ...] = ()
    if not policy.paused:
        effects, held_by = _orders(
            policy,
            limits,
            state,
            observation,
            fleet=fleet,
            late=late,
            desired=desired,
            needed=min(desired, unheld),
        )
        if held_by:
            reason = held_by
        elif late:
            reason = START_TIMEOUT
        elif effects and len(fleet.active) == desired:
            reason = WARM_POOL
    decision = Decision(
        time_unix_ms=observation.time_unix_ms,
        desired=desired,
        demanded=demanded,
        requests=sum(each for each in requests if each is not None),
        observation_age_s=observation.age_s,
        reason=reason,
        effects=tuple(map(str, effects)),
    )
    return Plan(
        effects=effects,
        decision=decision,
        next_tick_s=_next_tick_s(limits, state, now_s),
        state=_note(dataclasses.replace(state, demands=recent, desired=desired), effects, now_s),
    )


def new_replica_id(pool: str, fence: int, number: int) -> str:
    """An id that no other launch has: the fence is this leader's alone, the number this pool's."""
    digest = hashlib.blake2s(f"{pool}/{fence}/{number}".encode(), digest_size=4)
    return f"r-{digest.hexdigest()}"


def _wait_for_data(limits: Limits, state: PoolState, observation: Observation) -> Plan:
    decision = Decision(
        time_unix_ms=observation.time_unix_ms,
        desired=state.desired,
        demanded=0,
        requests=0,
        observation_age_s=observation.age_s,
        reason=STALE,
    )
    # What was demanded before says nothing about the time that could not be seen.
    waiting = dataclasses.replace(
        state, demands=(), orders=_without(state.orders, observation.failed)
    )
    return Plan((), decision, limits.tick_interval_s, waiting)


def _settle(limits: Limits, state: PoolState, observation: Observation) -> PoolState:
    """Close the orders whose result is seen, that failed, or that took too long."""
    now_s = observation.now_s
    phases = {replica.replica_id: replica.phase for replica in observation.replicas}
    failed = (observation.failed & state.orders.keys()) | (
        observation.gone & _ids_of(state.orders, Kind.LAUNCH)
    )
    overdue = {
        replica_id
        for replica_id, order in state.orders.items()
        if now_s - order.ordered_at_s >= limits.order_timeout_s
    }
    seen = {
        replica_id
        for replica_id, order in state.orders.items()
        if _is_done(order.kind, phases.get(replica_id))
    }
    shunned = {id_: until_s for id_, until_s in state.shunned.items() if until_s > now_s}
    lost_launches = 0
    for replica_id in (failed | overdue) - seen:
        shunned[replica_id] = now_s + limits.retry_after_s
        lost_launches += state.orders[replica_id].kind is Kind.LAUNCH
    settled = dataclasses.replace(
        state,
        orders=_without(state.orders, failed | overdue | seen),
        shunned=frozen(shunned),
    )
    return _count_failures(limits, settled, lost_launches, now_s)


def _is_done(kind: Kind, phase: Phase | None) -> bool:
    if kind is Kind.LAUNCH:
        return phase is not None
    if kind is Kind.ACTIVATE:
        return phase is not Phase.STANDBY
    return phase is None


def _track(
    limits: Limits, state: PoolState, observation: Observation, leaving: Set[str]
) -> tuple[PoolState, frozenset[str]]:
    """Follow each replica's readiness; also say which ones are not ready for too long.

    Args:
        leaving: replicas that were ordered to go before this tick.
    """
    now_s = observation.now_s
    sightings: dict[str, Sighting] = {}
    for replica in observation.replicas:
        before = state.sightings.get(replica.replica_id)
        is_ready = replica.phase in READY or replica.phase is Phase.DRAINING
        if is_ready:
            since_s = before.ready_since_s if before is not None else None
            sightings[replica.replica_id] = Sighting(
                replica.phase, replica.is_owned, now_s if since_s is None else since_s, None
            )
            continue
        since_s = before.unready_since_s if before is not None else None
        phase = replica.phase
        if not replica.is_announced:
            # The phase before it fell silent is kept: it may be back before it counts as lost.
            if before is not None:
                phase = before.phase
            elif replica.was_active:
                phase = Phase.ACTIVE
        sightings[replica.replica_id] = Sighting(
            phase, replica.is_owned, None, now_s if since_s is None else since_s
        )
    vanished = [
        sighting
        for replica_id, sighting in state.sightings.items()
        if replica_id not in sightings
        and replica_id not in leaving
        and sighting.is_owned
        and sighting.phase is not Phase.DRAINING
    ]
    failed = sum(
        sighting.ready_since_s is None or now_s - sighting.ready_since_s < limits.backoff_reset_s
        for sighting in vanished
    )
    late = frozenset(
        replica_id
        for replica_id, sighting in sightings.items()
        if sighting.unready_since_s is not None
        and now_s - sighting.unready_since_s >= limits.start_timeout_s
        and sighting.is_owned
        and replica_id not in state.orders
        and replica_id not in state.shunned
    )
    tracked = dataclasses.replace(state, sightings=frozen(sightings))
    if now_s - max(state.last_failure_s, state.launch_not_before_s) >= limits.backoff_reset_s:
        tracked = dataclasses.replace(tracked, failures=0)
    return _count_failures(limits, tracked, failed + len(late), now_s), late


def _count_failures(limits: Limits, state: PoolState, count: int, now_s: float) -> PoolState:
    """The first failure is made good at once; each further one waits twice as long."""
    if count == 0:
        return state
    failures = state.failures + count
    doublings = min(failures - 2, 30)
    wait_s = 0.0 if failures == 1 else limits.backoff_initial_s * 2.0**doublings
    return dataclasses.replace(
        state,
        failures=failures,
        last_failure_s=now_s,
        launch_not_before_s=now_s + min(limits.backoff_max_s, wait_s),
    )


def _sort_out(limits: Limits, state: PoolState, observation: Observation) -> _Fleet:
    phases: dict[Phase, list[ReplicaSeen]] = {phase: [] for phase in Phase}
    for replica in observation.replicas:
        counted = _as_counted(limits, state, observation.now_s, replica)
        phases[counted.phase].append(counted)
    seen = {replica.replica_id for replica in observation.replicas}
    phases[Phase.STARTING].extend(
        ReplicaSeen(replica_id, Phase.STARTING, None, 0.0, is_owned=False, is_announced=False)
        for replica_id, order in state.orders.items()
        if order.kind is Kind.LAUNCH and replica_id not in seen
    )
    return _Fleet(
        active=tuple(phases[Phase.ACTIVE]),
        standby=tuple(phases[Phase.STANDBY]),
        starting=tuple(phases[Phase.STARTING]),
        draining=tuple(phases[Phase.DRAINING]),
    )


def _as_counted(
    limits: Limits, state: PoolState, now_s: float, replica: ReplicaSeen
) -> ReplicaSeen:
    kind = _kind_of(state, replica.replica_id)
    if kind is not None:
        # Just claimed: it has no requests yet, which is not the same as not knowing.
        requests = (replica.requests or 0) if kind is Kind.ACTIVATE else replica.requests
        return dataclasses.replace(replica, phase=_PHASE_ONCE_DONE[kind], requests=requests)
    sighting = state.sightings[replica.replica_id]
    is_silent = (
        sighting.unready_since_s is not None
        and sighting.phase in READY
        and now_s - sighting.unready_since_s < limits.lost_after_s
    )
    if is_silent:
        return dataclasses.replace(replica, phase=sighting.phase, requests=None)
    return replica


def _orders(
    policy: Policy,
    limits: Limits,
    state: PoolState,
    observation: Observation,
    *,
    fleet: _Fleet,
    late: frozenset[str],
    desired: int,
    needed: int,
) -> tuple[tuple[Effect, ...], str]:
    """What to order, and the reason why launches that are needed are held back, if they are.

    Args:
        needed: of the desired active replicas, those that are wanted beyond the next drain.
    """
    standby_target = min(policy.standby_replicas, policy.max_replicas - desired)
    wanted = needed + standby_target
    claimed = _claims(state, fleet, desired)
    leaving = None
    if not fleet.draining and not late:
        leaving = _pick_leaving(
            state, fleet, claimed, desired=desired, standby_target=standby_target
        )
    staying = fleet.total - len(late) - (leaving is not None)
    launchable = min(
        wanted - staying,
        policy.max_replicas - fleet.occupied,
        limits.max_starting - sum(each.replica_id not in late for each in fleet.starting),
    )
    held_by = ""
    if launchable > 0:
        is_early = observation.now_s < state.launch_not_before_s
        held_by = observation.launch_blocker or (LAUNCH_BACKOFF if is_early else "")
    launched = range(0 if held_by else max(0, launchable))
    effects = (
        *(Effect(Kind.STOP, replica_id, START_TIMEOUT) for replica_id in sorted(late)),
        # A drain that was begun by an earlier leader, or whose order failed, is ordered again.
        *(Effect(Kind.DRAIN, e.replica_id) for e in fleet.draining if _can_order(state, e)),
        *(Effect(Kind.ACTIVATE, each.replica_id) for each in claimed),
        *(() if leaving is None else (leaving,)),
        *(
            Effect(Kind.LAUNCH, new_replica_id(policy.name, state.fence, state.launches + number))
            for number in launched
        ),
    )
    return effects, held_by


def _claims(state: PoolState, fleet: _Fleet, desired: int) -> list[ReplicaSeen]:
    """The standbys to activate: those that have waited longest have proven themselves longest."""
    claimable = [each for each in fleet.standby if each.is_announced and _is_free(state, each)]
    lacking = max(0, desired - len(fleet.active))
    return sorted(claimable, key=_oldest_first)[:lacking]


def _pick_leaving(
    state: PoolState,
    fleet: _Fleet,
    claimed: Sequence[ReplicaSeen],
    *,
    desired: int,
    standby_target: int,
) -> Effect | None:
    """The one to leave, if one should: what nobody waits for first, then the least loaded, then the
    newest. An active one leaves only if without it, and without those whose activation may yet
    fail, there are still enough."""
    is_surplus = fleet.total > desired + standby_target
    serving = [each for each in fleet.active if each.is_announced and _is_free(state, each)]
    waiting = [each for each in fleet.standby if each not in claimed]
    lacking = max(0, desired - len(fleet.active) - len(claimed))
    for replicas, kind, is_wanted in (
        (fleet.starting, Kind.STOP, is_surplus),
        (serving, Kind.DRAIN, len(serving) > desired),
        (waiting, Kind.DRAIN, len(waiting) - lacking > standby_target),
    ):
        able = [replica for replica in replicas if _can_order(state, replica)]
        if is_wanted and able:
            return Effect(kind, min(able, key=_least_missed_first).replica_id)
    return None


def _oldest_first(replica: ReplicaSeen) -> tuple[float, str]:
    return (-replica.age_s, replica.replica_id)


def _least_missed_first(replica: ReplicaSeen) -> tuple[int, float, str]:
    return (replica.requests or 0, replica.age_s, replica.replica_id)


def _is_free(state: PoolState, replica: ReplicaSeen) -> bool:
    return replica.replica_id not in state.orders and replica.replica_id not in state.shunned


def _can_order(state: PoolState, replica: ReplicaSeen) -> bool:
    return replica.is_owned and _is_free(state, replica)


def _note(state: PoolState, effects: Sequence[Effect], now_s: float) -> PoolState:
    orders = dict(state.orders)
    orders.update((effect.replica_id, Order(effect.kind, now_s)) for effect in effects)
    launches = sum(effect.kind is Kind.LAUNCH for effect in effects)
    return dataclasses.replace(state, orders=frozen(orders), launches=state.launches + launches)


def _next_tick_s(limits: Limits, state: PoolState, now_s: float) -> float:
    moments = (state.launch_not_before_s, *state.shunned.values())
    waits = [moment - now_s for moment in moments if moment > now_s]
    return min([limits.tick_interval_s, *waits])


def _kind_of(state: PoolState, replica_id: str) -> Kind | None:
    order = state.orders.get(replica_id)
    return None if order is None else order.kind


def _ids_of(orders: Mapping[str, Order], *kinds: Kind) -> frozenset[str]:
    return frozenset(id_ for id_, order in orders.items() if order.kind in kinds)


def _without(orders: Mapping[str, Order], ids: Set[str]) -> Mapping[str, Order]:
    return frozen({id_: order for id_, order in orders.items() if id_ not in ids})
