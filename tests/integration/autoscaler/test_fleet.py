"""A pool of real processes under real autoscalers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytestmark = pytest.mark.integration

Until = Callable[..., Awaitable[None]]


async def decisions(stub: Any) -> list[autoscaler.Decision]:
    """The pool's decisions, oldest first."""
    answer = await stub.ExplainPool(autoscaler.ExplainPoolRequest(name="p", limit=100))
    return list(reversed(answer.decisions))


def orders(found: list[autoscaler.Decision], kind: str) -> list[str]:
    return [
        effect.split()[1]
        for decision in found
        for effect in decision.effects
        if effect.startswith(kind)
    ]


async def test_a_pool_grows_from_its_standby_first_and_shrinks_back(
    fleet: Any, record_property: Callable[[str, object], None]
) -> None:
    await fleet.put_model()
    await fleet.put_pool()
    stub = await fleet.start("a")
    started_s = await fleet.until_sized(active=1, standby=1)
    (first,), (standby,) = fleet.active, fleet.standby

    held = [fleet.hold(first) for _ in range(3)]
    for call in held:
        await call.read()
    activated_s = await fleet.until(lambda: fleet.active >= {first, standby}, within_s=10)
    activated_ms = time.time() * 1000
    await fleet.until_sized(active=2, standby=1)
    grown = await decisions(stub)
    assert orders(grown, "activate") == [first, standby]
    growing = next(d for d in grown if f"activate {standby}" in d.effects)
    assert (growing.reason, growing.requests, growing.demanded) == ("queue_depth", 3, 2)
    assert growing.effects[0] == f"activate {standby}"  # the launch that refills comes behind
    record_property("replica_ready_s", round(started_s, 2))
    record_property("requests_to_active_s", round(activated_s, 3))
    obeyed_ms = activated_ms - growing.time_unix_ms
    print(
        f"from nothing to active and standby: {started_s:.2f} s; standby active "
        f"{activated_s:.3f} s after the load began, {obeyed_ms:.0f} ms after the decision"
    )
    assert obeyed_ms < 1000
    assert activated_s < 3

    for call in held:
        call.cancel()
    await fleet.until_sized(active=1, standby=1)
    found = await decisions(stub)
    drained = orders(found, "drain")
    assert len(drained) == 1
    assert fleet.active <= {first, standby}
    assert {d.reason for d in found} >= {"queue_depth", "scale_down_window"}
    status = (await stub.ListPools(autoscaler.ListPoolsRequest())).pools[0]
    assert (status.active, status.standby, status.starting) == (1, 1, 0)


@pytest.mark.parametrize("part", ["batcher", "engine"])
async def test_a_replica_that_loses_a_process_ends_and_is_replaced(
    fleet: Any, until_ended: Until, part: str
) -> None:
    await fleet.put_model()
    await fleet.put_pool()
    await fleet.start("a")
    await fleet.until_sized(active=1, standby=1)
    (victim,), (standby,) = fleet.active, fleet.standby
    pids = fleet.pids()[victim]
    os.kill(pids[part], signal.SIGKILL)
    taken_s = await fleet.until(lambda: standby in fleet.active, within_s=10)
    for pid in pids.values():
        await until_ended(pid)
    await fleet.until_sized(active=1, standby=1)
    assert victim not in fleet.replicas
    print(f"the standby was active {taken_s:.3f} s after the {part} was killed")


async def test_when_the_leader_is_killed_the_other_takes_over_what_runs(
    fleet: Any, until_ended: Until
) -> None:
    await fleet.put_model()
    await fleet.put_pool()
    stubs = {name: await fleet.start(name) for name in ("a", "b")}
    await fleet.until_sized(active=1, standby=1)
    leader = await fleet.leader()
    (other,) = {"a", "b"} - {leader}
    pids = fleet.pids()
    before = await decisions(stubs[other])
    launched = orders(before, "launch")

    await fleet.kill(leader)
    assert await fleet.leader(after=leader) == other
    last_ms = before[-1].time_unix_ms
    decided = await fleet.until_decided(lambda found: max(d.time_unix_ms for d in found) > last_ms)
    assert orders([d for d in decided if d.time_unix_ms > last_ms], "") == []
    assert fleet.pids() == pids

    (victim,) = fleet.active
    os.kill(pids[victim]["engine"], signal.SIGKILL)
    await until_ended(pids[victim]["batcher"])
    await fleet.until(lambda: fleet.active == set(pids) - {victim}, within_s=15)
    await fleet.until_sized(active=1, standby=1)
    after = orders(await decisions(stubs[other]), "launch")
    assert after[: len(launched)] == launched
    assert len(after) == len(launched) + 1
    assert set(pids) - {victim} < set(fleet.pids())


async def test_a_replica_that_leaves_finishes_what_it_has(fleet: Any) -> None:
    await fleet.put_model()
    await fleet.put_pool(min_replicas=2, standby_replicas=0)
    await fleet.start("a", drain_timeout_s="60", order_timeout_s="90")
    await fleet.until_sized(active=2, standby=0)
    held = {replica_id: fleet.hold(replica_id) for replica_id in fleet.active}
    for call in held.values():
        await call.read()
    await fleet.until(lambda: sum(fleet.in_flight(i) for i in held) == 2)
    await fleet.put_pool(min_replicas=1, standby_replicas=0, target_requests_per_replica=9)
    found = await fleet.until_decided(lambda found: len(orders(found, "drain")) == 1)
    (leaving,) = orders(found, "drain")
    await fleet.until(lambda: leaving not in fleet.replicas)
    assert leaving in fleet.pids()
    last = None
    while (answer := await held[leaving].read()) is not grpc.aio.EOF:
        last = answer
    assert await held[leaving].code() is grpc.StatusCode.OK
    assert last is not None
    assert last.usage.completion_tokens == fleet.HELD_TOKENS
    await fleet.until_sized(active=1, standby=0)
    (staying,) = fleet.active
    held[staying].cancel()


async def test_a_resigning_leader_leaves_at_once(fleet: Any) -> None:
    await fleet.put_model()
    await fleet.put_pool(standby_replicas=0)
    await fleet.start("a", stop_replicas_on_exit="false")
    await fleet.until_sized(active=1, standby=0)
    pids = fleet.pids()
    await fleet.stop("a")
    assert fleet.pids() == pids
    stub = await fleet.start("b")
    assert await fleet.leader() == "b"
    await fleet.until_sized(active=1, standby=0)
    plan = await stub.PlanPool(autoscaler.PlanPoolRequest(name="p"))
    assert list(plan.decision.effects) == []
    assert fleet.pids() == pids


async def test_while_etcd_is_away_nothing_starts_and_nothing_stops(
    make_fleet: Callable[[str], Any], etcd_process: Callable[[], Any]
) -> None:
    etcd = etcd_process()
    async with make_fleet(etcd.endpoint) as fleet:
        await fleet.put_model()
        await fleet.put_pool()
        stub = await fleet.start("a", stale_after_s="1")
        await fleet.until_sized(active=1, standby=1)
        pids = fleet.pids()
        channel = next(iter(fleet._channels.values()))
        health = health_pb2_grpc.HealthStub(channel)

        async def health_becomes(wanted: int) -> None:
            async with asyncio.timeout(20):
                watch = health.Watch(health_pb2.HealthCheckRequest())
                async for answer in watch:
                    if answer.status == wanted:
                        watch.cancel()
                        return

        etcd.freeze()
        await health_becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        # Leadership is over by the leader's own clock, and it still answers what it knows.
        listed = await stub.ListPools(autoscaler.ListPoolsRequest())
        assert (listed.leader, len(listed.pools)) == ("", 1)
        assert fleet.pids() == pids
        etcd.thaw()
        await health_becomes(health_pb2.HealthCheckResponse.SERVING)
        await fleet.leader()
        await fleet.until_sized(active=1, standby=1)
        assert fleet.pids() == pids
        assert len(orders(await decisions(stub), "launch")) == 2


async def test_launches_that_fail_are_backed_off_and_leave_nothing(fleet: Any) -> None:
    await fleet.put_model()
    await fleet.put_pool(standby_replicas=0)
    await fleet.start(
        "a", engine_command="/bin/false", batcher_command="/bin/sleep,1000", backoff_initial_s="0.1"
    )
    found = await fleet.until_decided(lambda found: "launch_backoff" in [d.reason for d in found])
    assert 2 <= len(orders(found, "launch")) < 10


async def test_what_never_becomes_ready_is_stopped(fleet: Any) -> None:
    await fleet.put_model()
    await fleet.put_pool(standby_replicas=0, max_replicas=1)
    await fleet.start(
        "a",
        engine_command="/bin/sleep,1000",
        batcher_command="/bin/sleep,1000",
        start_timeout_s="1",
    )
    found = await fleet.until_decided(lambda found: len(orders(found, "stop")) >= 2)
    stopped = orders(found, "stop")
    launched = orders(found, "launch")
    assert stopped == launched[: len(stopped)]
    assert len(set(launched)) == len(launched)
