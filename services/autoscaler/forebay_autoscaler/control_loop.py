"""The control loop: one task of the leader looks at each pool, decides, and orders.

It wakes when something changes, at most every `gap_s`, and at the latest when the decision said.
Orders run beside it; each replica has at most one at a time, which the core sees to. When the
leadership ends, so do the loop and the orders under way; what a replica was told stays true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.election import Leadership
from forebay_common.errors import ForebayError

from forebay_autoscaler import metrics
from forebay_autoscaler.adapters.decision_store import DecisionStore
from forebay_autoscaler.adapters.orders import Orders
from forebay_autoscaler.adapters.world import World
from forebay_autoscaler.core import history
from forebay_autoscaler.core.model import Decision, Effect, Limits, Phase, PoolState, ReplicaSeen
from forebay_autoscaler.core.pools import policy_of
from forebay_autoscaler.core.refusal import RefusedError
from forebay_autoscaler.core.tick import on_tick
from forebay_autoscaler.launcher import Launcher

_log = logging.getLogger(__name__)


class ControlLoop:
    """Sizes every pool while it leads. Whoever sets `changed` makes it look again."""

    def __init__(
        self,
        world: World,
        launcher: Launcher,
        orders: Orders,
        decisions: DecisionStore,
        *,
        changed: asyncio.Event,
        limits: Limits,
        gap_s: float,
        order_timeout_s: float,
        history_limit: int,
        history_interval_s: float,
    ) -> None:
        self._world = world
        self._launcher = launcher
        self._orders = orders
        self._decisions = decisions
        self._limits = limits
        self._gap_s = gap_s
        self._order_timeout_s = order_timeout_s
        self._history_limit = history_limit
        self._history_interval_s = history_interval_s
        self._changed = changed
        self._term: _Term | None = None

    async def lead(self, leadership: Leadership) -> None:
        """Act until cancelled, or until the leadership is over."""
        term = _Term(leadership)
        try:
            await self._launcher.begin(leadership.fence)
            self._term = term
            metrics.LEADS.set(1)
            async with asyncio.TaskGroup() as group:
                saving = group.create_task(self._save(term), name="decisions")
                await self._act(term, group)
                for task in (saving, *term.orders):
                    task.cancel()
        finally:
            self._term = None
            metrics.LEADS.set(0)

    def plan(self, pool: autoscaler.Pool) -> Decision:
        """What the next tick would decide."""
        state = PoolState(fence=0)
        if self._term is not None:
            state = self._term.states.get(pool.name, state)
        return on_tick(policy_of(pool), self._limits, state, self._world.observe(pool)).decision

    async def history(self, pool: str) -> tuple[Decision, ...]:
        """The pool's decisions, newest first. Raises ForebayError while etcd is away."""
        if self._term is not None and pool in self._term.histories:
            return self._term.histories[pool]
        return await self._decisions.load(pool)

    async def _act(self, term: _Term, group: asyncio.TaskGroup) -> None:
        while term.leadership.is_valid(time.monotonic()):
            self._changed.clear()
            pools = self._world.pools()
            wait_s = self._limits.tick_interval_s
            for pool in pools.values():
                wait_s = min(wait_s, await self._tick(pool, term, group))
            term.forget_others(pools)
            # A burst of changes is one look: the first wait gathers them, the second ends early.
            await asyncio.sleep(self._gap_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s - self._gap_s)):
                    await self._changed.wait()

    async def _tick(self, pool: autoscaler.Pool, term: _Term, group: asyncio.TaskGroup) -> float:
        name = pool.name
        if name not in term.histories:
            term.histories[name] = await self._load_history(name)
        observation = self._world.observe(pool, failed=term.failed.pop(name, frozenset()))
        state = term.states.get(name) or PoolState(fence=term.leadership.fence)
        plan = on_tick(policy_of(pool), self._limits, state, observation)
        term.states[name] = plan.state
        for replica in observation.replicas:
            if replica.is_owned and replica.phase is Phase.ACTIVE and not replica.was_active:
                self._launcher.mark_active(replica.replica_id)
        specs: tuple[engine.ModelSpec, ...] = ()
        with contextlib.suppress(RefusedError):
            specs = self._world.specs(pool)
        addresses = self._world.addresses()
        for effect in plan.effects:
            order = group.create_task(
                self._carry_out(effect, name, specs=specs, addresses=addresses, term=term),
                name=str(effect),
            )
            term.orders.add(order)
            order.add_done_callback(term.orders.discard)
        self._record(name, plan.decision, term)
        _measure(name, plan.decision, observation.replicas)
        return plan.next_tick_s

    async def _load_history(self, pool: str) -> tuple[Decision, ...]:
        try:
            return (await self._decisions.load(pool))[: self._history_limit]
        except ForebayError:
            return ()

    async def _carry_out(
        self,
        effect: Effect,
        pool: str,
        *,
        specs: tuple[engine.ModelSpec, ...],
        addresses: Mapping[str, str],
        term: _Term,
    ) -> None:
        began_s = time.monotonic()
        outcome = "failed"
        try:
            async with asyncio.timeout(self._order_timeout_s):
                await self._orders.carry_out(
                    effect,
                    pool=pool,
                    specs=specs,
                    addresses=addresses,
                    leadership=term.leadership,
                )
            outcome = "done"
            _log.info("%s of pool %s took %.3f s", effect, pool, time.monotonic() - began_s)
        except ForebayError as error:
            outcome = error.reason.value.lower()
            _log.warning("%s of pool %s failed: %s", effect, pool, error)
        except TimeoutError:
            outcome = "timeout"
            _log.warning("%s of pool %s took too long", effect, pool)
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        except Exception:
            # One order must not end the loop that keeps every pool in size.
            _log.exception("%s of pool %s failed", effect, pool)
        finally:
            metrics.ORDERS.labels(pool, effect.kind.value, outcome).inc()
            metrics.ORDER_SECONDS.labels(effect.kind.value).observe(time.monotonic() - began_s)
            if outcome != "done":
                term.failed[pool] = term.failed.get(pool, frozenset()) | {effect.replica_id}
            self._changed.set()

    def _record(self, pool: str, decision: Decision, term: _Term) -> None:
        before = term.histories[pool]
        after = history.record(before, decision, limit=self._history_limit)
        term.histories[pool] = after
        term.unsaved.add(pool)
        if not before or not history.is_repeated(before[0], decision):
            if decision.effects:
                _log.info(
                    "pool %s: %d of %d wanted (%s): %s",
                    pool,
                    decision.desired,
                    decision.demanded,
                    decision.reason,
                    ", ".join(decision.effects),
                )
            term.is_news.set()

    async def _save(self, term: _Term) -> None:
        """Write decisions: news at once, repetitions now and then."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._history_interval_s):
                    await term.is_news.wait()
            term.is_news.clear()
            for pool in list(term.unsaved):
                term.unsaved.discard(pool)
                try:
                    await self._decisions.save(pool, term.histories[pool], term.leadership)
                except ForebayError as error:
                    term.unsaved.add(pool)
                    _log.warning("the decisions of pool %s were not saved: %s", pool, error)


class _Term:
    """What one time in office has come to know."""

    def __init__(self, leadership: Leadership) -> None:
        self.leadership = leadership
        self.states: dict[str, PoolState] = {}
        self.histories: dict[str, tuple[Decision, ...]] = {}
        self.failed: dict[str, frozenset[str]] = {}
        self.orders: set[asyncio.Task[None]] = set()
        self.unsaved: set[str] = set()
        self.is_news = asyncio.Event()

    def forget_others(self, pools: Mapping[str, autoscaler.Pool]) -> None:
        """Drop what belongs to pools that are no more."""
        for known in (self.states, self.histories, self.failed):
            for name in known.keys() - pools.keys():
                del known[name]
        self.unsaved &= pools.keys()


def _measure(pool: str, decision: Decision, replicas: tuple[ReplicaSeen, ...]) -> None:
    counts = dict.fromkeys(Phase, 0)
    for replica in replicas:
        counts[replica.phase] += 1
    for phase, count in counts.items():
        metrics.REPLICAS.labels(pool, phase.value).set(count)
    metrics.DESIRED.labels(pool).set(decision.desired)
    metrics.DEMANDED.labels(pool).set(decision.demanded)
    metrics.REQUESTS.labels(pool).set(decision.requests)
    metrics.AGE.labels(pool).set(decision.observation_age_s)
    metrics.TICKS.labels(pool, decision.reason).inc()
