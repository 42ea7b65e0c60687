"""AutoscalerService: pools as they are wanted, as they are, and why."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import grpc
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_grpc
from forebay_common.election import Election
from forebay_common.errors import ForebayError, Reason

from forebay_autoscaler.adapters.pool_store import PoolStore
from forebay_autoscaler.adapters.world import World
from forebay_autoscaler.control_loop import ControlLoop
from forebay_autoscaler.core.model import Decision, Phase
from forebay_autoscaler.core.pools import check_pool, is_name
from forebay_autoscaler.core.refusal import RefusedError
from forebay_autoscaler.messages import decision_message

SERVICE = autoscaler.DESCRIPTOR.services_by_name["AutoscalerService"].full_name

_EXPLAINED_DEFAULT = 20

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


def _refusing(
    method: Callable[[_S, _Q, _Context], Awaitable[_A]],
) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """Turns the core's refusals into errors."""

    @functools.wraps(method)
    async def call(self: _S, request: _Q, context: _Context) -> _A:
        try:
            return await method(self, request, context)
        except RefusedError as refused:
            raise ForebayError(
                Reason(refused.reason), refused.message, param=refused.param
            ) from None

    return call


class AutoscalerServicer(autoscaler_grpc.AutoscalerServiceServicer):
    """Answers on every instance; what it writes, the leader finds in etcd."""

    def __init__(
        self, pools: PoolStore, world: World, loop: ControlLoop, election: Election
    ) -> None:
        self._pools = pools
        self._world = world
        self._loop = loop
        self._election = election

    @_refusing
    async def PutPool(  # noqa: N802
        self, request: autoscaler.PutPoolRequest, context: _Context
    ) -> autoscaler.PutPoolResponse:
        pool = check_pool(request.pool)
        await self._pools.put(pool)
        return autoscaler.PutPoolResponse(pool=pool)

    @_refusing
    async def ListPools(  # noqa: N802
        self, request: autoscaler.ListPoolsRequest, context: _Context
    ) -> autoscaler.ListPoolsResponse:
        response = autoscaler.ListPoolsResponse()
        # While etcd is away, what was last known is told without what only etcd knows.
        try:
            response.leader = await self._election.leader() or ""
        except ForebayError:
            response.leader = ""
        for _, pool in sorted((await self._now()).items()):
            response.pools.append(await self._status(pool))
        return response

    @_refusing
    async def PausePool(  # noqa: N802
        self, request: autoscaler.PausePoolRequest, context: _Context
    ) -> autoscaler.PausePoolResponse:
        pool = await self._set_paused(request.name, paused=True)
        return autoscaler.PausePoolResponse(pool=pool)

    @_refusing
    async def ResumePool(  # noqa: N802
        self, request: autoscaler.ResumePoolRequest, context: _Context
    ) -> autoscaler.ResumePoolResponse:
        pool = await self._set_paused(request.name, paused=False)
        return autoscaler.ResumePoolResponse(pool=pool)

    @_refusing
    async def PlanPool(  # noqa: N802
        self, request: autoscaler.PlanPoolRequest, context: _Context
    ) -> autoscaler.PlanPoolResponse:
        decision = self._loop.plan(await self._pool(request.name))
        return autoscaler.PlanPoolResponse(decision=decision_message(decision))

    @_refusing
    async def ExplainPool(  # noqa: N802
        self, request: autoscaler.ExplainPoolRequest, context: _Context
    ) -> autoscaler.ExplainPoolResponse:
        pool = await self._pool(request.name)
        decisions = await self._loop.history(pool.name)
        newest = decisions[: request.limit or _EXPLAINED_DEFAULT]
        return autoscaler.ExplainPoolResponse(decisions=map(decision_message, newest))

    async def _now(self) -> Mapping[str, autoscaler.Pool]:
        """The pools as etcd has them, so that whoever changed one through another instance finds it
        changed here; the last known ones while etcd is away."""
        try:
            return await self._pools.read_all()
        except ForebayError:
            return self._world.pools()

    async def _pool(self, name: str) -> autoscaler.Pool:
        pool = (await self._now()).get(name)
        if pool is None:
            raise RefusedError("POOL_NOT_FOUND", "No pool has this name.", param="name")
        return pool

    async def _set_paused(self, name: str, *, paused: bool) -> autoscaler.Pool:
        if not is_name(name):
            raise RefusedError("POOL_NOT_FOUND", "No pool has this name.", param="name")

        def change(pool: autoscaler.Pool) -> None:
            pool.paused = paused

        return await self._pools.change(name, change)

    async def _status(self, pool: autoscaler.Pool) -> autoscaler.PoolStatus:
        counts = dict.fromkeys(Phase, 0)
        for replica in self._world.replicas(pool.name):
            counts[replica.phase] += 1
        status = autoscaler.PoolStatus(
            pool=pool,
            active=counts[Phase.ACTIVE],
            standby=counts[Phase.STANDBY],
            starting=counts[Phase.STARTING],
            draining=counts[Phase.DRAINING],
        )
        newest = await self._newest(pool.name)
        if newest is not None:
            status.decision.CopyFrom(decision_message(newest))
        return status

    async def _newest(self, pool: str) -> Decision | None:
        try:
            return next(iter(await self._loop.history(pool)), None)
        except ForebayError:
            return None
