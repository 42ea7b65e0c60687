"""Follows the loads of a starting fleet, from the router's list and each batcher's own watch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher_pb
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.channel import connect

from forebay_client.fleet.core.loads import Loads, Seen
from forebay_client.fleet.core.state import Load

_LIST_INTERVAL_S = 0.3
_LOAD_INTERVAL_MS = 1000
_CALL_TIMEOUT_S = 5.0

Report = Callable[[tuple[Load, ...]], None]


class LoadFailedError(Exception):
    """A model cannot be loaded; the message says which."""


async def until_answering(
    router_address: str, model_versions: Sequence[str], report: Report, *, attempts: int
) -> None:
    """Wait until the router can place a request for each model version.

    Args:
        router_address: the router's gRPC.
        model_versions: `name@version` of each.
        report: told of every phase that a load comes to.
        attempts: how often a load may fail.

    Raises:
        LoadFailedError: a load has failed that often.
    """
    loads = Loads()
    following: dict[str, asyncio.Task[None]] = {}
    try:
        async with connect(router_address) as channel:
            router = router_rpc.RouterServiceStub(channel)
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
                    if failures >= attempts:
                        raise LoadFailedError(
                            f"{model_version} could not be loaded ({failures} attempts)"
                        )
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
