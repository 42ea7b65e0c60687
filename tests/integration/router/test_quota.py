"""Limits over several routers: real calls between them, real etcd, one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from forebay.router.v1 import quota_service_pb2_grpc as rpc
from forebay_common.discovery import Instance, Keys
from forebay_common.errors import ForebayError, Reason
from forebay_common.lease import Lease
from forebay_common.store import Store
from forebay_router.adapters.quota import PEER, Away, Hold, Options, Quota
from forebay_router.core.access import Limits, Tenant
from forebay_router.quota_metrics import QuotaMetrics
from forebay_router.quota_service import QuotaService
from forebay_wire.server import Server
from prometheus_client import CollectorRegistry

from tests.conftest import EtcdProcess
from tests.wire_tools import SOAK

pytestmark = pytest.mark.integration

WAIT_S = 10.0
# A busy machine must not look like one that is cut off.
OPTIONS = Options(timeout_s=2.0, tick_s=0.1)


def a_tenant(name: str = "acme", **limits: int) -> Tenant:
    return Tenant.of(name, limits=Limits(**limits), revision=1)


class Node:
    """The limits of one router, served and announced as a router does it."""

    def __init__(self, router_id: str, endpoint: str, namespace: str, options: Options) -> None:
        self.router_id = router_id
        self.store = Store.open([endpoint])
        self._keys = Keys(namespace)
        self.quota = Quota(self.store, self._keys, router_id, f"{router_id}/1", options)
        self.server = Server()
        self._lease = Lease.open(self.store, 2)
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        rpc.add_QuotaServiceServicer_to_server(QuotaService(self.quota), self.server.grpc)
        self.address = await self.server.listen("127.0.0.1:0")
        self.quota.announce(self.address)
        self._task = asyncio.create_task(self.quota.run())
        await self._lease.__aenter__()
        instance = Instance("router", self.router_id, "0", {PEER: self.address})
        await self._lease.attach(self._keys.instance("router", self.router_id), instance.encode())

    async def cut_off(self) -> None:
        """Answer no other router any more."""
        await self.server.stop()

    async def kill(self) -> None:
        """End as a process that is killed: nothing is told, the lease stays until it expires."""
        await self.server.stop()
        await self._lease.orphan()
        await self._stop()

    async def stop(self) -> None:
        """End in order."""
        await self._lease.close()
        await self.quota.close()
        await self.server.stop()
        await self._stop()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            with contextlib.suppress(Exception):
                await self.quota.close()
        await self.store.close()

    async def reserve(self, tenant: Tenant, tokens: int = 0, model: str = "chat") -> Hold:
        account, meters = self.quota.meters_for(tenant, model)
        hold = self.quota.reserve(account, meters, tokens)
        return hold if isinstance(hold, Hold) else await hold

    async def passes(self, tenant: Tenant, tokens: int = 0) -> bool:
        try:
            await self.reserve(tenant, tokens)
        except ForebayError as error:
            assert error.reason is Reason.RATE_LIMITED, error
            return False
        return True


Start = Callable[..., Any]


@pytest.fixture
async def start(etcd: str, namespace: str) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    async def start_nodes(
        count: int, *, options: Options = OPTIONS, endpoint: str = etcd
    ) -> list[Node]:
        started = [
            Node(f"r{len(nodes) + index}", endpoint, namespace, options) for index in range(count)
        ]
        nodes.extend(started)
        for node in started:
            await node.start()
        for node in nodes:
            await until(lambda node=node: len(node.quota._members) >= len(nodes))  # type: ignore[misc]
        return started

    yield start_nodes
    for node in nodes:
        if node._task is not None:
            await node.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


def holder_of(nodes: list[Node], tenant: str = "acme") -> Node:
    holding = [node for node in nodes if node.quota._holds(tenant)]
    assert len(holding) == 1
    return holding[0]


async def count(nodes: list[Node], tenant: Tenant, requests: int) -> int:
    """How many of so many concurrent requests pass, spread over routers."""
    passed = await asyncio.gather(
        *(nodes[index % len(nodes)].passes(tenant) for index in range(requests))
    )
    return sum(passed)


async def test_of_a_hundred_concurrent_requests_ten_a_minute_pass(start: Start) -> None:
    nodes = await start(3)
    began = time.monotonic()
    passed = await count(nodes, a_tenant(requests_per_min=10), 100)
    assert 10 <= passed <= 10 + int((time.monotonic() - began) / 6)
    assert holder_of(nodes)


async def test_many_tenants_are_held_by_all_routers(start: Start) -> None:
    nodes = await start(3)
    tenants = [a_tenant(f"t{index}", requests_per_min=3) for index in range(30)]
    passed = await asyncio.gather(*(count(nodes, tenant, 9) for tenant in tenants))
    assert passed == [3] * 30
    assert all(node.quota.held for node in nodes)
    assert sum(node.quota.held for node in nodes) == 30


async def test_a_refusal_says_when_to_come_again(start: Start) -> None:
    nodes = await start(2)
    tenant = a_tenant(requests_per_min=1, tokens_per_min=100)
    hold = await nodes[0].reserve(tenant, 40)
    assert dict(hold.answer)["x-ratelimit-remaining-tokens"] == "60"
    for node in nodes:
        with pytest.raises(ForebayError) as caught:
            await node.reserve(tenant, 1)
        error, told = caught.value, dict(caught.value.answer)
        assert error.message == "Requests per minute of the tenant are used up."
        assert error.retry_after_s is not None
        assert 50 < error.retry_after_s <= 60
        assert 50_000 < int(told["retry-after-ms"]) <= 60_000
        assert told["x-ratelimit-remaining-requests"] == "0"
        assert told["x-ratelimit-limit-requests"] == "1"
        with pytest.raises(ForebayError) as caught:
            await node.reserve(tenant, 101)
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert caught.value.param == "max_tokens"


async def test_what_was_reserved_and_not_used_comes_back(start: Start) -> None:
    nodes = await start(3)
    tenant = a_tenant(tokens_per_min=10_000)
    holds = [await node.reserve(tenant, 3000) for node in nodes]
    assert not await nodes[0].passes(tenant, 3000)
    for node, hold in zip(nodes, holds, strict=True):
        node.quota.settle(hold, 1000)

    async def back() -> None:
        while not await nodes[1].passes(tenant, 6900):
            await asyncio.sleep(0.005)

    await asyncio.wait_for(back(), WAIT_S)
    assert not await nodes[2].passes(tenant, 3000)


async def test_a_request_that_was_never_sent_costs_nothing(start: Start) -> None:
    nodes = await start(3)
    tenant = a_tenant(requests_per_min=1)
    for node in nodes:
        hold = await node.reserve(tenant)
        node.quota.release(hold)
        holder = holder_of(nodes)
        meter = holder.quota._books.account("acme").meters[""]
        await until(lambda meter=meter: meter.requests == 1)  # type: ignore[misc]


async def test_a_wait_that_is_cancelled_gives_back_what_it_got(start: Start) -> None:
    nodes = await start(2)
    tenant = a_tenant(requests_per_min=10, concurrent=5)
    await count(nodes, tenant, 1)
    holder = holder_of(nodes)
    asker = next(node for node in nodes if node is not holder)
    waiting = [asyncio.create_task(asker.reserve(tenant)) for _ in range(4)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    meter = holder.quota._books.account("acme").meters[""]
    await until(lambda: meter.requests >= 9 and meter.streams == 1)


async def test_the_holder_is_killed_in_the_middle(start: Start) -> None:
    nodes = await start(3)
    tenant = a_tenant(requests_per_min=20)
    began = time.monotonic()
    assert await count(nodes, tenant, 9) == 9
    holder = holder_of(nodes)
    left = [node for node in nodes if node is not holder]
    # The others hear of what it let through for its own callers with the next look round.
    await until(
        lambda: any(
            node.quota._books.account("acme").meters[""].version
            == holder.quota._books.account("acme").meters[""].version
            for node in left
        )
    )
    await holder.kill()
    passed = await count(left, tenant, 60)
    late = int((time.monotonic() - began) / 3)
    assert 11 <= passed <= 11 + late
    assert holder_of(left)


async def test_an_account_goes_with_all_that_is_known_when_its_holder_leaves(start: Start) -> None:
    nodes = await start(3)
    tenant = a_tenant(requests_per_min=20, concurrent=100)
    began = time.monotonic()
    assert await count(nodes, tenant, 15) == 15
    holder = holder_of(nodes)
    left = [node for node in nodes if node is not holder]
    await holder._lease.close()
    for node in left:
        await until(lambda node=node: len(node.quota._members) == 2)  # type: ignore[misc]
    passed = await count(left, tenant, 30)
    assert 5 <= passed <= 5 + int((time.monotonic() - began) / 3)


async def test_a_router_that_joins_gets_its_accounts_with_their_levels(start: Start) -> None:
    nodes = await start(1)
    tenants = [a_tenant(f"t{index}", requests_per_min=4) for index in range(20)]
    for tenant in tenants:
        assert await count(nodes, tenant, 3) == 3
    nodes += await start(2)
    passed = await asyncio.gather(*(count(nodes, tenant, 6) for tenant in tenants))
    assert passed == [1] * 20
    assert nodes[1].quota.held
    assert nodes[2].quota.held


async def test_streams_of_a_killed_router_are_freed(start: Start) -> None:
    options = Options(timeout_s=2.0, tick_s=0.1, streams_ttl_s=1.0)
    nodes = await start(3, options=options)
    tenant = a_tenant(concurrent=4)
    assert await count(nodes, tenant, 1) == 1
    holder = holder_of(nodes)
    asker = next(node for node in nodes if node is not holder)
    assert [await asker.passes(tenant) for _ in range(5)].count(True) == 3
    meter = holder.quota._books.account("acme").meters[""]
    # Streams that go on are renewed for as long as their router lives.
    await asyncio.sleep(1.5)
    assert not await holder.passes(tenant)
    await asker.kill()
    await until(lambda: meter.streams <= 1)
    assert await holder.passes(tenant)


async def test_of_a_hundred_at_once_as_many_run_as_may(start: Start) -> None:
    nodes = await start(3)
    tenant = a_tenant(concurrent=7)
    running: list[tuple[Node, Hold]] = []

    async def ask(node: Node) -> None:
        with contextlib.suppress(ForebayError):
            running.append((node, await node.reserve(tenant)))

    for _ in range(3):
        await asyncio.gather(*(ask(nodes[index % 3]) for index in range(100)))
        assert len(running) == 7
        for node, hold in running:
            node.quota.settle(hold, 0)
        running.clear()
        meter = holder_of(nodes).quota._books.account("acme").meters[""]
        await until(lambda meter=meter: meter.streams == 0)  # type: ignore[misc]


async def test_a_holder_that_answers_too_late_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, so nobody takes its account; those that ask let in their parts at most, and what
    it let in too late is undone."""
    nodes = await start(3, options=Options(timeout_s=0.5, tick_s=0.1))
    tenant = a_tenant(requests_per_min=30)
    assert await count(nodes, tenant, 3) == 3
    holder = holder_of(nodes)
    asker = next(node for node in nodes if node is not holder)
    answers, late = holder.quota.exchange, asyncio.Event()

    async def answer_late(request: Any) -> Any:
        response = await answers(request)
        await late.wait()
        return response

    monkeypatch.setattr(holder.quota, "exchange", answer_late)
    began = time.monotonic()
    passed = await count([asker], tenant, 40)
    assert time.monotonic() - began < WAIT_S
    # None, where the holder has told what it charged.
    assert passed <= 11
    monkeypatch.undo()
    late.set()
    assert holder_of(nodes) is holder
    meter = holder.quota._books.account("acme").meters[""]
    # The next batch, which comes by itself, tells that nobody heard the last one.
    await until(lambda: meter.requests >= 15)


async def test_while_etcd_is_away_limits_stay_exact(
    start: Start, etcd_process: Callable[[], EtcdProcess]
) -> None:
    process = etcd_process()
    nodes = await start(3, endpoint=process.endpoint)
    tenant = a_tenant(requests_per_min=20)
    began = time.monotonic()
    assert await count(nodes, tenant, 5) == 5
    process.kill()
    passed = await count(nodes, tenant, 60)
    assert 15 <= passed <= 15 + int((time.monotonic() - began) / 3)


@pytest.mark.parametrize(("away", "most"), [(Away.SHARE, 5), (Away.REFUSE, 0), (Away.ADMIT, 50)])
async def test_who_can_reach_nobody_lets_in_its_part(start: Start, away: Away, most: int) -> None:
    """And what it let in is known to the others once they are reached again."""
    nodes = await start(2, options=Options(timeout_s=1.0, tick_s=0.1, away=away))
    tenant = a_tenant(requests_per_min=20)
    assert await count(nodes, tenant, 10) == 10
    holder = holder_of(nodes)
    alone = next(node for node in nodes if node is not holder)
    await holder.cut_off()
    # The holder's levels were heard: ten are left, five for each.
    passed = 0
    for _ in range(50):
        try:
            await alone.reserve(tenant)
        except ForebayError as error:
            assert error.reason is (
                Reason.RATE_LIMITED if away is Away.SHARE else Reason.STORE_UNAVAILABLE
            )
        else:
            passed += 1
    assert most <= passed <= most + 1
    assert not alone.quota.is_quorate


async def test_what_was_let_in_alone_is_told_afterwards(start: Start) -> None:
    nodes = await start(2)
    tenant = a_tenant(requests_per_min=20)
    assert await count(nodes, tenant, 10) == 10
    holder = holder_of(nodes)
    alone = next(node for node in nodes if node is not holder)
    await holder.server.stop()
    holds = []
    with contextlib.suppress(ForebayError):
        while True:
            holds.append(await alone.reserve(tenant))
    assert len(holds) in (5, 6)
    for hold in holds:
        alone.quota.settle(hold, 0)
    server = Server()
    rpc.add_QuotaServiceServicer_to_server(QuotaService(holder.quota), server.grpc)
    await server.listen(holder.address)
    meter = holder.quota._books.account("acme").meters[""]
    await until(lambda: meter.requests < 7)
    await server.stop()


async def test_metrics_tell_where_and_how(start: Start) -> None:
    (node,) = await start(1)
    tenant = a_tenant(requests_per_min=1)
    assert await count([node], tenant, 3) == 1
    registry = CollectorRegistry()
    registry.register(QuotaMetrics(node.quota))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"forebay_router_quota_{name}", labels)

    assert value("reservations_total", where="here", result="granted") == 1
    assert value("reservations_total", where="here", result="requests") == 2
    assert value("takeovers_total") == 1
    assert value("accounts_held") == 1
    assert value("exact") == 1


@pytest.mark.timeout(600)
async def test_steady_traffic_just_under_a_limit_is_never_refused(start: Start) -> None:
    """Five minutes with FOREBAY_TEST_SOAK=1."""
    soak_s = 300.0 if SOAK else 3.0
    nodes = await start(3)
    tenant = a_tenant(requests_per_min=1200, tokens_per_min=120_000, request_burst=20)
    rng = random.Random(3)
    until_s = time.monotonic() + soak_s
    due_s = time.monotonic()
    used, began = 0, due_s
    while due_s < until_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        node = rng.choice(nodes)
        hold = await node.reserve(tenant, 200)
        tokens = rng.randrange(60, 120)
        node.quota.settle(hold, tokens)
        used += tokens
        due_s += 60 / 1200 * 1.02
    assert used <= 120_000 * (1 + (time.monotonic() - began) / 60)
