"""A replica in discovery, under orders, and at its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import prometheus_client
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay_common.channel import connect
from forebay_common.discovery import Instance, Keys, from_json
from forebay_common.errors import Reason, from_rpc_error
from forebay_common.store import Store
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .conftest import CHAT, WAIT_S, Host, Runner, Running, Start, loaded, state_of, within

pytestmark = pytest.mark.integration

INFERENCE = "forebay.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Discovery:
    """What etcd holds for one namespace."""

    def __init__(self, store: Store, endpoint: str, namespace: str) -> None:
        self.store = store
        self.where = (endpoint, namespace)
        self.keys = Keys(namespace)
        self._prefix = f"{namespace}/"

    async def until(
        self, holds: Callable[[Mapping[str, bytes]], bool], seconds: float = WAIT_S
    ) -> Mapping[str, bytes]:
        """Watch until the values by key are as wanted."""
        async with asyncio.timeout(seconds):
            async for snapshot in self.store.watch(self._prefix):
                values = {key: entry.value for key, entry in snapshot.entries.items()}
                if holds(values):
                    return values
        raise AssertionError("the watch ended")

    async def replica_becomes(
        self, holds: Callable[[batcher.Replica], bool], replica_id: str = "b1"
    ) -> batcher.Replica:
        key = self.keys.replica(replica_id)
        values = await self.until(
            lambda values: key in values and holds(from_json(batcher.Replica, values[key]))
        )
        return from_json(batcher.Replica, values[key])

    async def announced(self) -> batcher.Replica:
        return await self.replica_becomes(lambda r: state_of(r) == engine.MODEL_STATE_ACTIVE)


@pytest.fixture
async def discovery(etcd: str, namespace: str) -> AsyncIterator[Discovery]:
    async with Store.open([etcd]) as store:
        yield Discovery(store, etcd, namespace)


async def reason_of(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value).reason


async def health_becomes(running: Running, wanted: int, service: str = INFERENCE) -> None:
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(
        health_pb2.HealthCheckRequest(service=service)
    )
    try:
        async with asyncio.timeout(WAIT_S):
            async for answer in watch:
                if answer.status == wanted:
                    return
    finally:
        watch.cancel()


async def test_a_replica_is_announced_once_its_host_was_heard(
    start: Start, host: Host, discovery: Discovery
) -> None:
    await host.die()
    running = await start(*discovery.where, pool="gpu")
    instance_key = discovery.keys.instance("batcher", "b1")
    values = await discovery.until(lambda values: instance_key in values)
    assert discovery.keys.replica("b1") not in values
    instance = Instance.decode(instance_key, values[instance_key])
    assert instance.addresses == {"grpc": running.address}
    host.show(state=engine.MODEL_STATE_LOADING)
    await host.start()
    found = await discovery.replica_becomes(lambda r: state_of(r) == engine.MODEL_STATE_LOADING)
    assert (found.replica_id, found.pool, found.address) == ("b1", "gpu", running.address)
    assert (found.role, found.draining) == (batcher.ROLE_ACTIVE, False)
    assert found.batcher_version


async def test_states_are_announced_at_once_and_load_at_intervals(
    start: Start, host: Host, runner: Runner, discovery: Discovery
) -> None:
    running = await start(*discovery.where, announce_interval_s=0.5)
    await discovery.announced()
    calls = [running.generate() for _ in range(6)]
    found = await discovery.replica_becomes(lambda r: loaded(r).queued > 0)
    assert (loaded(found).in_flight, loaded(found).queued, loaded(found).slots) == (4, 2, 4)
    began = time.monotonic()
    host.show(path=runner.path, state=engine.MODEL_STATE_DRAINING)
    await discovery.replica_becomes(lambda r: state_of(r) == engine.MODEL_STATE_DRAINING)
    assert time.monotonic() - began < 0.3
    for call in calls:
        call.cancel()


async def test_load_is_announced_at_most_once_per_interval(
    start: Start, runner: Runner, discovery: Discovery
) -> None:
    runner.hold = False
    running = await start(*discovery.where, announce_interval_s=30)
    await discovery.announced()
    key = discovery.keys.replica("b1")
    before = await discovery.store.get(key)
    await asyncio.gather(*(running.answer(str(n)) for n in range(20)))
    after = await discovery.store.get(key)
    assert before is not None and after is not None
    assert before.mod_revision == after.mod_revision


async def test_a_lost_lease_is_replaced_and_the_record_put_again(
    start: Start, runner: Runner, discovery: Discovery
) -> None:
    await start(*discovery.where)
    await discovery.announced()
    key = discovery.keys.replica("b1")
    entry = await discovery.store.get(key)
    assert entry is not None
    await discovery.store.revoke_lease(entry.lease_id)
    await discovery.until(lambda values: key in values)
    async with asyncio.timeout(WAIT_S):
        async for snapshot in discovery.store.watch(key):
            again = snapshot.entries.get(key)
            if again is not None and again.lease_id != entry.lease_id:
                break


async def test_with_etcd_away_requests_are_served_and_the_replica_announced_later(
    start: Start, runner: Runner, namespace: str, etcd_process: Callable[[], Any]
) -> None:
    process = etcd_process()
    process.kill()
    runner.hold = False
    running = await start(process.endpoint, namespace)
    await running.becomes_active()
    assert await running.answer("away") == "first away"
    process.start()
    async with Store.open([process.endpoint]) as store:
        await Discovery(store, process.endpoint, namespace).announced()


async def test_a_standby_is_warm_until_it_is_activated(
    start: Start, host: Host, runner: Runner, discovery: Discovery
) -> None:
    running = await start(*discovery.where, role="standby", pool="gpu")
    warm = discovery.keys.warm("gpu", "b1")
    values = await discovery.until(lambda values: warm in values)
    assert from_json(batcher.Replica, values[warm]).address == running.address
    await health_becomes(running, NOT_SERVING)
    assert await running.reason() is Reason.NO_REPLICA
    host.show(path=runner.path, state=engine.MODEL_STATE_FAILED)
    await discovery.until(lambda values: warm not in values)
    activate = running.control.ActivateReplica
    refused = activate(batcher.ActivateReplicaRequest(fence=5))
    assert await reason_of(refused) is Reason.NO_REPLICA
    host.show(path=runner.path, generation=2)
    await discovery.until(lambda values: warm in values)

    answer = await activate(batcher.ActivateReplicaRequest(fence=5))
    assert (answer.replica.role, answer.replica.fence) == (batcher.ROLE_ACTIVE, 5)
    found = await discovery.replica_becomes(lambda r: r.role == batcher.ROLE_ACTIVE)
    assert found.fence == 5
    await discovery.until(lambda values: warm not in values)
    await health_becomes(running, SERVING)
    runner.hold = False
    assert await running.answer("now") == "first now"

    assert (await activate(batcher.ActivateReplicaRequest(fence=5))).replica.fence == 5
    stale = activate(batcher.ActivateReplicaRequest(fence=4))
    assert await reason_of(stale) is Reason.STALE_FENCE
    assert (await activate(batcher.ActivateReplicaRequest(fence=9))).replica.fence == 9
    drain = running.control.DrainReplica(batcher.DrainReplicaRequest(fence=8))
    assert await reason_of(drain) is Reason.STALE_FENCE


async def test_health_follows_the_models(start: Start, host: Host, runner: Runner) -> None:
    running = await start()
    await health_becomes(running, SERVING)
    host.show(path=runner.path, state=engine.MODEL_STATE_FAILED)
    await health_becomes(running, NOT_SERVING)
    await health_becomes(running, SERVING, "forebay.batcher.v1.BatcherService")


async def test_a_watch_has_no_gaps_and_tells_states_at_once(
    serving: Running, host: Host, runner: Runner
) -> None:
    watch = serving.control.WatchReplica(batcher.WatchReplicaRequest(load_interval_ms=60_000))
    first = await within(watch.read())
    assert (first.revision, state_of(first.replica)) == (1, engine.MODEL_STATE_ACTIVE)
    runner.hold = False
    for n in range(5):
        await serving.answer(str(n))
    began = time.monotonic()
    host.show(path=runner.path, state=engine.MODEL_STATE_SLEEPING)
    second = await within(watch.read())
    assert time.monotonic() - began < 0.3
    assert (second.revision, state_of(second.replica)) == (2, engine.MODEL_STATE_SLEEPING)
    watch.cancel()


async def test_a_drain_withdraws_finishes_and_refuses(
    start: Start, host: Host, runner: Runner, discovery: Discovery
) -> None:
    host.show(path=runner.path, slots=1)
    running = await start(*discovery.where)
    await discovery.announced()
    runs, waits = running.generate("runs"), running.generate("waits")
    await running.becomes(lambda r: (loaded(r).in_flight, loaded(r).queued) == (1, 1))
    drained = asyncio.ensure_future(running.control.DrainReplica(batcher.DrainReplicaRequest()))
    await running.becomes(lambda r: r.draining)
    key = discovery.keys.replica("b1")
    await discovery.until(lambda values: key not in values)
    await health_becomes(running, NOT_SERVING)
    assert await running.reason() is Reason.DRAINING
    late = running.control.DrainReplica(batcher.DrainReplicaRequest(fence=3), timeout=0.2)
    assert await reason_of(late) is Reason.DEADLINE_EXCEEDED
    activate = running.control.ActivateReplica(batcher.ActivateReplicaRequest(fence=4))
    assert await reason_of(activate) is Reason.DRAINING
    assert not drained.done()
    runner.let_all_go()
    for call, text in ((runs, "runs"), (waits, "waits")):
        assert "".join([part.text_delta async for part in call]) == f"first {text}"
    await within(drained)
    await within(running.control.DrainReplica(batcher.DrainReplicaRequest()))


async def test_requests_are_taken_until_others_heard_of_the_drain(
    start: Start, runner: Runner
) -> None:
    runner.hold = False
    running = await start(drain_linger_s=0.5)
    await running.becomes_active()
    drained = asyncio.ensure_future(running.control.DrainReplica(batcher.DrainReplicaRequest()))
    await running.becomes(lambda r: r.draining)
    assert await running.answer("late") == "first late"
    await within(drained)
    assert await running.reason() is Reason.DRAINING


async def test_sigterm_withdraws_finishes_what_runs_and_exits_with_0(
    host: Host, runner: Runner, discovery: Discovery
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "forebay_batcher",
        env={
            **os.environ,
            "FOREBAY_ETCD_ENDPOINTS": discovery.where[0],
            "FOREBAY_NAMESPACE": discovery.where[1],
            "FOREBAY_INSTANCE_ID": "b1",
            "FOREBAY_BATCHER_ENGINE_ADDRESS": host.address,
        },
    )
    try:
        found = await discovery.announced()
        async with connect(found.address) as channel:
            control: Any = batcher_rpc.BatcherServiceStub(channel)
            watch = control.WatchReplica(batcher.WatchReplicaRequest())
            first = await within(watch.read())
            assert not first.replica.draining
            call = inference_rpc.InferenceServiceStub(channel).Generate(
                inference.GenerateRequest(model=CHAT, text="to the end")
            )
            await within(call.read())
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while not (await watch.read()).replica.draining:
                    pass
            key = discovery.keys.replica("b1")
            await discovery.until(lambda values: key not in values)
            runner.let_all_go()
            assert (await within(call.read())).text_delta == "to the end"
            assert await within(call.code()) is grpc.StatusCode.OK
            assert await within(process.wait()) == 0
            await discovery.until(lambda values: not values)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_metrics_tell_what_happens(start: Start, runner: Runner) -> None:
    runner.hold = False
    running = await start()
    await running.becomes_active()
    await running.answer()
    await running.reason(model="other")
    text = prometheus_client.generate_latest().decode()
    for line in (
        f'forebay_batcher_slots{{model_version="{CHAT}"}} 4.0',
        f'forebay_batcher_in_flight{{model_version="{CHAT}"}} 0.0',
        'forebay_batcher_queue_depth{class="REALTIME"} 0.0',
        "forebay_batcher_engine_connected 1.0",
    ):
        assert line in text
    for name in ("refusals_total{reason", "dispatches_total{class", "queue_wait_seconds_bucket{"):
        assert f"forebay_batcher_{name}" in text
