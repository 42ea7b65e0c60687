"""AutoscalerService, with a launcher that launches nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_autoscaler.__main__ import serve
from forebay_autoscaler.config import Config
from forebay_common.channel import connect
from forebay_common.config import CommonConfig
from forebay_common.discovery import Instance, Keys, from_json, to_json
from forebay_common.errors import Reason, from_rpc_error
from forebay_common.store import Store
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytestmark = pytest.mark.integration

Start = Callable[..., Awaitable[Any]]


def a_pool(**changes: Any) -> autoscaler.Pool:
    fields: dict[str, Any] = {
        "name": "p",
        "models": ["chat"],
        "min_replicas": 1,
        "max_replicas": 3,
        "target_requests_per_replica": 2,
        **changes,
    }
    return autoscaler.Pool(**fields)


@pytest.fixture
async def store(etcd: str) -> AsyncIterator[Store]:
    async with Store.open((etcd,)) as store:
        yield store


@pytest.fixture
async def start(etcd: str, namespace: str, store: Store) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(instance_id: str = "a", **options: Any) -> Any:
            stopping = asyncio.Event()
            common = CommonConfig(
                etcd_endpoints=(etcd,), namespace=namespace, instance_id=instance_id, lease_ttl_s=2
            )
            config = Config(
                listen="127.0.0.1:0", launcher="dry-run", tick_interval_s=0.1, **options
            )
            serving = asyncio.create_task(serve(common, config, stopping, environ={}))

            async def stop() -> None:
                stopping.set()
                await asyncio.wait_for(serving, 15)

            stack.push_async_callback(stop)
            key = Keys(namespace).instance("autoscaler", instance_id)
            address = await _announced(store, key)
            channel = connect(address)
            stack.push_async_callback(channel.close)
            async with asyncio.timeout(15):
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        watch.cancel()
                        break
            return autoscaler_grpc.AutoscalerServiceStub(channel)

        yield start


async def _announced(store: Store, key: str) -> str:
    async with asyncio.timeout(10), contextlib.aclosing(store.watch(key)) as snapshots:
        async for snapshot in snapshots:
            if key in snapshot.entries:
                return Instance.decode(key, snapshot.entries[key].value).addresses["grpc"]
    raise AssertionError("the watch ended")


async def until_decided(
    store: Store, namespace: str, condition: Callable[[list[autoscaler.Decision]], bool]
) -> list[autoscaler.Decision]:
    """Wait until the decisions saved in etcd, newest first, say so."""
    key = Keys(namespace).decisions("p")
    async with asyncio.timeout(15), contextlib.aclosing(store.watch(key)) as snapshots:
        async for snapshot in snapshots:
            for entry in snapshot.entries.values():
                found = list(from_json(autoscaler.ExplainPoolResponse, entry.value).decisions)
                if condition(found):
                    return found
    raise AssertionError("the watch ended")


async def refused(call: Awaitable[Any]) -> tuple[Reason, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    return error.reason, error.param


async def test_a_pool_is_put_paused_and_resumed_through_any_instance(
    start: Start, store: Store, namespace: str
) -> None:
    stubs = [await start("a"), await start("b")]
    await stubs[0].PutPool(autoscaler.PutPoolRequest(pool=a_pool()))
    await until_decided(store, namespace, lambda found: bool(found))
    for stub in stubs:
        paused = await stub.PausePool(autoscaler.PausePoolRequest(name="p"))
        assert paused.pool.paused
        await until_decided(store, namespace, lambda found: found[0].reason == "paused")
        resumed = await stub.ResumePool(autoscaler.ResumePoolRequest(name="p"))
        assert not resumed.pool.paused
        await until_decided(store, namespace, lambda found: found[0].reason != "paused")


async def test_refusals_carry_their_reason(start: Start) -> None:
    stub = await start()
    wrong = autoscaler.PutPoolRequest(pool=a_pool(min_replicas=9))
    assert await refused(stub.PutPool(wrong)) == (Reason.INVALID_ARGUMENT, "pool.min_replicas")
    for call in (
        stub.PausePool(autoscaler.PausePoolRequest(name="none")),
        stub.ResumePool(autoscaler.ResumePoolRequest(name="a/b")),
        stub.PlanPool(autoscaler.PlanPoolRequest(name="none")),
        stub.ExplainPool(autoscaler.ExplainPoolRequest(name="")),
    ):
        assert await refused(call) == (Reason.POOL_NOT_FOUND, "name")


async def test_every_instance_lists_plans_and_explains(
    start: Start, store: Store, namespace: str
) -> None:
    stubs = [await start("a"), await start("b")]
    keys = Keys(namespace)
    busy = batcher.Replica(replica_id="r-1", pool="p", role=batcher.ROLE_ACTIVE)
    busy.models.add(state=engine.MODEL_STATE_ACTIVE, queued=3, in_flight=2)
    await store.put(keys.replica("r-1"), to_json(busy))
    await stubs[0].PutPool(autoscaler.PutPoolRequest(pool=a_pool()))
    # The catalogue is empty, so nothing can be launched, and the decision says so.
    await until_decided(store, namespace, lambda found: found[0].reason == "model_not_found")
    for stub in stubs:
        listed = await stub.ListPools(autoscaler.ListPoolsRequest())
        assert listed.leader in ("a", "b")
        (status,) = listed.pools
        # Replicas are watched, so an instance may hear of one a moment after the leader.
        async with asyncio.timeout(10):
            while not status.active:
                (status,) = (await stub.ListPools(autoscaler.ListPoolsRequest())).pools
        assert (status.active, status.standby, status.pool.name) == (1, 0, "p")
        assert status.decision.reason == "model_not_found"
        planned = (await stub.PlanPool(autoscaler.PlanPoolRequest(name="p"))).decision
        assert (planned.demanded, planned.desired, planned.requests) == (3, 3, 5)
        explained = await stub.ExplainPool(autoscaler.ExplainPoolRequest(name="p", limit=1))
        (newest,) = explained.decisions
        assert (newest.reason, newest.demanded) == ("model_not_found", 3)


async def test_a_dry_run_says_what_it_would_order_and_orders_nothing(
    start: Start, store: Store, namespace: str
) -> None:
    keys = Keys(namespace)
    model = {
        "name": "chat",
        "versions": [{"version": "1"}],
        "split": [{"version": "1", "weight": 1}],
    }
    await store.put(keys.model("chat"), json.dumps(model).encode())
    standby = batcher.Replica(replica_id="s", pool="p", role=batcher.ROLE_STANDBY)
    standby.models.add(state=engine.MODEL_STATE_ACTIVE)
    await store.put(keys.replica("s"), to_json(standby))
    await store.put(keys.warm("p", "s"), b"{}")
    await start()
    await store.put(keys.pool("p"), to_json(a_pool(standby_replicas=1)))
    found = await until_decided(store, namespace, lambda found: bool(found[0].effects or found[1:]))
    effects = [effect for decision in found for effect in decision.effects]
    assert effects[0] == "activate s"
    assert effects[1].startswith("launch ")
    assert await store.get(keys.claim("p", "s")) is None


async def test_a_bootstrap_is_put_once_and_another_one_replaces_it(
    start: Start, store: Store, namespace: str
) -> None:
    key = Keys(namespace).pool("p")

    async def stored() -> autoscaler.Pool:
        entry = await store.get(key)
        assert entry is not None
        return from_json(autoscaler.Pool, entry.value)

    def text(pool: autoscaler.Pool) -> str:
        return json.dumps([json_format.MessageToDict(pool)])

    stub = await start("a", bootstrap=text(a_pool()))
    await stub.PausePool(autoscaler.PausePoolRequest(name="p"))
    await start("b", bootstrap=text(a_pool()))
    assert (await stored()).paused, "what was changed since stays"
    await start("c", bootstrap=text(a_pool(max_replicas=7)))
    assert (await stored()) == a_pool(max_replicas=7)


async def test_a_pool_that_cannot_be_read_is_left_out(
    start: Start, store: Store, namespace: str, tmp_path: Path
) -> None:
    stub = await start()
    await store.put(Keys(namespace).pool("bad"), b'{"name": "bad", "maxReplicas": 0}')
    await store.put(Keys(namespace).pool("p"), to_json(a_pool()))
    await until_decided(store, namespace, lambda found: bool(found))
    listed = await stub.ListPools(autoscaler.ListPoolsRequest())
    assert [status.pool.name for status in listed.pools] == ["p"]
