"""What clients notice of replicas that die, fail, or are slow: as little as can be."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, from_rpc_error

from .conftest import (
    WAIT_S,
    RunningRouter,
    Script,
    StandIn,
    StartRouter,
    StartStandIn,
    a_refusal,
    eventually,
)
from .test_placement import explanation, replicas_of

_numbers = itertools.count()
pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]


async def ask(router: RunningRouter) -> float:
    """The seconds to the first token of an answer that came whole."""
    began, first = time.monotonic(), 0.0
    request_id = f"req-{next(_numbers)}"
    call = router.inference.Generate(
        inference.GenerateRequest(model="chat", text="hello"),
        timeout=WAIT_S,
        metadata=((md.REQUEST_ID, request_id),),
    )
    parts = 0
    try:
        async for _ in call:
            first = first or time.monotonic() - began
            parts += 1
    except grpc.aio.AioRpcError:
        # Shown when the test fails.
        print(await explanation(router, request_id))
        raise
    assert parts == 3, "an answer has three tokens"
    return first


class Traffic:
    """Requests at a steady rate, each a task of its own."""

    def __init__(self, router: RunningRouter, rate: float) -> None:
        self._router = router
        self._rate = rate
        self.failures: list[ForebayError] = []
        self.first_s: list[float] = []

    async def run(self, seconds: float, during: Callable[[], Awaitable[Any]] | None = None) -> None:
        began = time.monotonic()
        tasks = [asyncio.create_task(during())] if during is not None else []
        for n in itertools.count():
            due = began + n / self._rate
            if due > began + seconds:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask()))
        await asyncio.gather(*tasks)

    async def _ask(self) -> None:
        try:
            self.first_s.append(await ask(self._router))
        except grpc.aio.AioRpcError as error:
            self.failures.append(from_rpc_error(error))


@pytest.fixture
async def trio(
    start_stand_in: StartStandIn, start_router: StartRouter, catalogue: None
) -> tuple[RunningRouter, list[StandIn]]:
    """A router with three replicas in view."""
    stand_ins = [await start_stand_in(f"r{n}") for n in range(3)]
    router = await start_router(no_replica_wait_s=3.0)

    async def settled() -> bool:
        return await replicas_of(router) == {"r0": "", "r1": "", "r2": ""}

    await eventually(settled)
    return router, stand_ins


async def test_nobody_notices_one_of_three_that_is_killed(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    traffic = Traffic(router, 20)

    async def kill() -> None:
        await stand_ins[1].arrival(3)
        await stand_ins[1].kill()

    await traffic.run(4, kill)
    assert traffic.failures == []
    assert len(traffic.first_s) >= 80


async def test_one_that_fails_every_other_time_is_left_alone_within_seconds(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    for _ in range(100):
        stand_ins[1].scripts.extend([Script(), a_refusal(Reason.INTERNAL)])
    traffic = Traffic(router, 60)
    await traffic.run(3)
    seen = len(stand_ins[1].seen)
    before = len(traffic.first_s)
    await traffic.run(4)
    later = len(stand_ins[1].seen) - seen
    assert later <= 0.01 * (len(traffic.first_s) - before)
    assert traffic.failures == []
    assert (await replicas_of(router))["r1"] == "ejected"


async def test_callers_mistakes_take_no_replica_out(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    for stand_in in stand_ins:
        stand_in.usual = a_refusal(Reason.CONTEXT_LENGTH_EXCEEDED)
    traffic = Traffic(router, 100)
    await traffic.run(0.5)
    assert len(traffic.failures) >= 50
    assert {failure.reason for failure in traffic.failures} == {Reason.CONTEXT_LENGTH_EXCEEDED}
    assert await replicas_of(router) == {"r0": "", "r1": "", "r2": ""}


async def test_a_full_replica_is_used_again_at_once(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    for stand_in in stand_ins:
        stand_in.usual = a_refusal(Reason.QUEUE_FULL)
    traffic = Traffic(router, 50)
    await traffic.run(0.4)
    assert {failure.reason for failure in traffic.failures} == {Reason.QUEUE_FULL}
    for stand_in in stand_ins:
        stand_in.usual = Script()
    assert await replicas_of(router) == {"r0": "", "r1": "", "r2": ""}
    await ask(router)


async def test_when_all_fail_at_least_half_stay(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    for stand_in in stand_ins:
        stand_in.usual = a_refusal(Reason.INTERNAL)
    traffic = Traffic(router, 60)
    await traffic.run(1)
    assert {failure.reason for failure in traffic.failures} == {Reason.INTERNAL}
    excluded = [reason for reason in (await replicas_of(router)).values() if reason]
    assert excluded in ([], ["ejected"])
    for stand_in in stand_ins:
        stand_in.usual = Script()
    traffic.failures.clear()
    await traffic.run(1)
    assert traffic.failures == []


async def test_a_slow_replica_loses_its_share_and_the_fleet_stays_fast(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    for stand_in in stand_ins:
        stand_in.usual = Script(slow_s=0.05)
    traffic = Traffic(router, 30)
    await traffic.run(3)
    healthy = statistics.quantiles(traffic.first_s, n=100)[98]
    stand_ins[1].usual = Script(slow_s=0.5)
    await traffic.run(4)
    seen, before = len(stand_ins[1].seen), len(traffic.first_s)
    await traffic.run(5)
    asked = len(traffic.first_s) - before
    assert (len(stand_ins[1].seen) - seen) / asked <= 0.1
    slow = sum(first_s > 1.5 * healthy + 0.1 for first_s in traffic.first_s[before:])
    assert slow / asked <= 0.1
    assert traffic.failures == []


async def test_a_request_that_ends_runners_is_quarantined(
    trio: tuple[RunningRouter, list[StandIn]],
) -> None:
    router, stand_ins = trio
    lost = a_refusal(Reason.REPLICA_LOST)
    for stand_in in stand_ins:
        stand_in.usual = lost
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert from_rpc_error(caught.value).reason is Reason.QUARANTINED
    sent = sum(len(stand_in.seen) for stand_in in stand_ins)
    assert sent == 2
    for stand_in in stand_ins:
        stand_in.usual = Script()
    with pytest.raises(grpc.aio.AioRpcError) as again:
        await ask(router)
    assert from_rpc_error(again.value).reason is Reason.QUARANTINED
    assert sum(len(stand_in.seen) for stand_in in stand_ins) == sent


async def test_a_slow_first_attempt_is_hedged_and_the_loser_cancelled(
    start_stand_in: StartStandIn, start_router: StartRouter, catalogue: None
) -> None:
    slow, fast = await start_stand_in("slow"), await start_stand_in("fast")
    await fast.change(queued=5)
    slow.usual = Script(slow_s=30)
    router = await start_router(hedge_after_ms=50, hedge_share=1.0)

    async def settled() -> bool:
        return await replicas_of(router) == {"slow": "", "fast": ""}

    await eventually(settled)
    first_s = await ask(router)
    assert first_s < WAIT_S
    loser = await slow.arrival()
    async with asyncio.timeout(WAIT_S):
        await loser.ended.wait()
    assert loser.cancelled_at is not None
    assert len(fast.seen) == 1
