"""Follows the loads of a starting fleet: the router's list, each batcher's own watch, and what the
autoscaler has launched in vain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import grpc
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler_pb
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_rpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher_pb
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.channel import connect

from forebay_client.fleet.core import plan
from forebay_client.fleet.core.loads import Loads, Seen, lost_launches
from forebay_client.fleet.core.state import Load

_LIST_INTERVAL_S = 0.3
_LOAD_INTERVAL_MS = 1000
_CALL_TIMEOUT_S = 5.0
_DECISIONS = 100

Report = Callable[[tuple[Load, ...]], None]


class LoadFailedError(Exception):
    """A model cannot be loaded, or a replica not be run; the message says which.

    Args:
        message: for people.
        replica_id: where it was last tried.
    """

    def __init__(self, message: str, replica_id: str) -> None:
        super().__init__(message)
        self.replica_id = replica_id


async def until_answering(
    router_address: str,
    autoscaler_address: str,
    model_versions: Sequence[str],
    report: Report,
    *,
    attempts: int,
) -> None:
    """Wait until the router can place a request for each model version.

    Args:
        router_address: the router's gRPC.
        autoscaler_address: the autoscaler's.
        model_versions: `name@version` of each.
        report: told of every phase that a load comes to.
        attempts: how often a load, or a replica, may fail.

    Raises:
        LoadFailedError: it has failed that often.
    """
    loads = Loads()
    following: dict[str, asyncio.Task[None]] = {}
    try:
        async with connect(router_address) as channel, connect(autoscaler_address) as other:
            router = router_rpc.RouterServiceStub(channel)
            autoscaler = autoscaler_rpc.AutoscalerServiceStub(other)
            while True:
                replicas = await _list(router)
                for routed in replicas:
                    replica_id, address = routed.replica.replica_id, routed.replica.address
                    task = following.get(replica_id)
                    if task is None or task.done():
                        following[replica_id] = asyncio.create_task(
                            _follow(replica_id, address, loads, report)
                        )
                if _all_answer(replicas, model_versions):
                    return
                for model_version, failures in loads.failures.items():
                    if len(failures) >= attempts:
                        raise LoadFailedError(
                            f"{model_version} could not be loaded ({len(failures)} attempts)",
                            failures[-1],
                        )
                lost = await _lost_launches(autoscaler)
                if len(lost) >= attempts:
                    raise LoadFailedError(f"{len(lost)} replicas ended at their start", lost[0])
                if replicas:
                    gone = following.keys() - {r.replica.replica_id for r in replicas}
                    for replica_id in gone:
                        following.pop(replica_id).cancel()
                    if loads.forget(gone):
                        report(loads.all())
                await asyncio.sleep(_LIST_INTERVAL_S)
    finally:
        for task in following.values():
            task.cancel()
        await asyncio.gather(*following.values(), return_exceptions=True)


async def _lost_launches(autoscaler: autoscaler_rpc.AutoscalerServiceAsyncStub) -> Sequence[str]:
    try:
        # In this order, so that a replica launched in between is not taken for a lost one.
        explained = await autoscaler.ExplainPool(
            autoscaler_pb.ExplainPoolRequest(name=plan.POOL, limit=_DECISIONS),
            timeout=_CALL_TIMEOUT_S,
        )
        listed = await autoscaler.ListPools(
            autoscaler_pb.ListPoolsRequest(), timeout=_CALL_TIMEOUT_S
        )
    except grpc.RpcError:
        return ()
    alive = sum(
        pool.active + pool.standby + pool.starting + pool.draining
        for pool in listed.pools
        if pool.pool.name == plan.POOL
    )
    return lost_launches([list(one.effects) for one in explained.decisions], alive=alive)


async def _list(router: router_rpc.RouterServiceAsyncStub) -> Sequence[router_pb.RoutedReplica]:
    try:
        answer = await router.ListReplicas(router_pb.ListReplicasRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.RpcError:
        return ()
    return answer.replicas


def _all_answer(replicas: Sequence[router_pb.RoutedReplica], model_versions: Sequence[str]) -> bool:
    answering = {
        model.model_version
        for routed in replicas
        if routed.placeable
        for model in routed.replica.models
        if model.state == engine_pb.MODEL_STATE_ACTIVE
    }
    return answering >= set(model_versions)


async def _follow(replica_id: str, address: str, loads: Loads, report: Report) -> None:
    # The caller starts it again as long as the replica is listed.
    with contextlib.suppress(grpc.RpcError):
        async with connect(address) as channel:
            watch = batcher_rpc.BatcherServiceStub(channel).WatchReplica(
                batcher_pb.WatchReplicaRequest(load_interval_ms=_LOAD_INTERVAL_MS)
            )
            async for answer in watch:
                seen = [_seen(model) for model in answer.replica.models]
                if loads.observe(replica_id, seen, now=time.time()):
                    report(loads.all())


def _seen(model: batcher_pb.ReplicaModel) -> Seen:
    state = engine_pb.ModelState.Name(model.state).removeprefix("MODEL_STATE_").lower()
    phase = engine_pb.LoadPhase.Name(model.phase).removeprefix("LOAD_PHASE_").lower()
    is_loading = state == "loading" and phase != "unspecified"
    return Seen(model.model_version, state, phase if is_loading else "")
