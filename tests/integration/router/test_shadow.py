"""Copies of requests, end to end: what a caller gets is not touched by them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay_common import metadata as md
from forebay_common.discovery import Keys, to_json
from forebay_common.errors import Reason
from forebay_common.store import Store

from tests.integration.router.conftest import (
    CHAT,
    RunningRouter,
    Script,
    StandIn,
    StartRouter,
    StartStandIn,
    a_refusal,
    eventually,
)

pytestmark = pytest.mark.integration

Start = Callable[..., Awaitable[tuple[RunningRouter, StandIn, StandIn]]]


@pytest.fixture
async def start(
    store: Store, keys: Keys, start_router: StartRouter, start_stand_in: StartStandIn
) -> Start:
    """Starts a router before `chat@v1`, which answers, and `chat@v2`, which gets copies."""

    async def start(
        percent: float = 100, *, has_candidate: bool = True, **options: Any
    ) -> tuple[RunningRouter, StandIn, StandIn]:
        model = registry.Model(
            name="chat",
            versions=[registry.ModelVersion(version=v) for v in ("v1", "v2")],
            split=[registry.SplitEntry(version="v1", weight=1)],
            shadow=registry.Shadow(version="v2", percent=percent),
        )
        await store.put(keys.model("chat"), to_json(model))
        primary = await start_stand_in("primary")
        candidate = await start_stand_in("candidate", announced=False)
        candidate.replica.models[0].model_version = "chat@v2"
        if has_candidate:
            await candidate.announce()
        router = await start_router(**options)

        async def seen() -> bool:
            answer = await router.view.ListReplicas(router_pb.ListReplicasRequest(), timeout=5)
            return sum(each.placeable for each in answer.replicas) == 1 + has_candidate

        await eventually(seen)
        return router, primary, candidate

    return start


async def chat(router: RunningRouter, **body: Any) -> tuple[int, str, str]:
    """Ask, and return the status, the text and the request's id."""
    asked = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], **body}
    async with (
        aiohttp.ClientSession() as http,
        http.post(router.url + CHAT, json=asked) as answer,
    ):
        return answer.status, await answer.text(), answer.headers["X-Request-Id"]


async def counted(router: RunningRouter) -> dict[str, float]:
    """The copies' counters, without their prefix."""
    async with aiohttp.ClientSession() as http, http.get(f"{router.url}/metrics") as answer:
        page = await answer.text()
    prefix = "forebay_router_shadow_"
    return {
        name.removeprefix(prefix): float(value)
        for name, _, value in (
            line.rpartition(" ") for line in page.splitlines() if line.startswith(prefix)
        )
    }


async def until_counted(router: RunningRouter, what: str, count: float) -> dict[str, float]:
    found: dict[str, float] = {}

    async def holds() -> bool:
        found.clear()
        found.update(await counted(router))
        return found.get(what, 0) >= count

    await eventually(holds)
    return found


SUCCEEDED = 'copies_total{model="chat@v2",result="succeeded"}'


async def test_a_copy_goes_out_marked_in_the_lowest_class_and_its_answer_is_compared(
    start: Start,
) -> None:
    router, primary, candidate = await start()
    status, text, request_id = await chat(router, stream=True)
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    figures = await until_counted(router, SUCCEEDED, 1)
    (copy,), (asked,) = candidate.seen, primary.seen
    assert copy.request == asked.request
    assert copy.metadata[md.MODEL] == "chat@v2"
    assert copy.metadata[md.CLASS] == "BACKGROUND"
    assert copy.metadata[md.SHADOW] == "1"
    assert copy.metadata[md.REQUEST_ID] == f"copy-{request_id}"
    assert md.SHADOW not in asked.metadata
    for what in ("outcome", "completion_tokens", "tokens"):
        assert figures[f'compared_total{{model="chat@v2",same="true",what="{what}"}}'] == 1
    for answer in ("primary", "copy"):
        assert figures[f'request_seconds_count{{answer="{answer}",model="chat@v2"}}'] == 1
        assert figures[f'first_message_seconds_count{{answer="{answer}",model="chat@v2"}}'] == 1


async def test_a_version_that_answers_otherwise_is_found_out_and_harms_nobody(
    start: Start,
) -> None:
    router, primary, candidate = await start()
    candidate.scripts.append(Script(tokens=5))
    assert (await chat(router, stream=True))[0] == 200
    figures = await until_counted(router, SUCCEEDED, 1)
    for what in ("completion_tokens", "tokens"):
        assert figures[f'compared_total{{model="chat@v2",same="false",what="{what}"}}'] == 1
    # Faults of the version that is tried open no breaker.
    candidate.scripts.extend(a_refusal(Reason.INTERNAL) for _ in range(5))
    for _ in range(5):
        assert (await chat(router))[0] == 200
    figures = await until_counted(router, 'copies_total{model="chat@v2",result="INTERNAL"}', 5)
    assert figures['compared_total{model="chat@v2",same="false",what="outcome"}'] == 5
    assert len(primary.seen) == 6
    answer = await router.view.ListReplicas(router_pb.ListReplicasRequest(), timeout=5)
    assert all(each.placeable for each in answer.replicas)


async def test_callers_wait_for_no_copy_and_too_many_are_dropped(start: Start) -> None:
    router, primary, candidate = await start(shadow_at_once=1, shadow_waiting=2)
    candidate.scripts.append(Script(hangs=True))
    assert (await chat(router))[0] == 200
    await candidate.arrival(1)
    for _ in range(5):
        assert (await chat(router))[0] == 200
    assert len(primary.seen) == 6
    dropped = 'copies_total{model="chat@v2",result="dropped"}'
    assert (await until_counted(router, dropped, 3))[dropped] == 3
    candidate.seen[0].go_on.set()
    assert (await until_counted(router, SUCCEEDED, 3))[SUCCEEDED] == 3


async def test_a_version_that_no_replica_has_gets_no_copies_and_is_not_loaded(
    start: Start,
) -> None:
    router, _, candidate = await start(has_candidate=False)
    assert (await chat(router))[0] == 200
    await until_counted(router, 'copies_total{model="chat@v2",result="NO_REPLICA"}', 1)
    assert not candidate.seen


async def test_requests_that_the_version_answers_itself_or_that_were_left_are_not_copied(
    start: Start,
) -> None:
    router, primary, candidate = await start()
    assert (await chat(router, model="chat@v2"))[0] == 200
    primary.scripts.append(Script(hangs=True))
    asking = asyncio.create_task(chat(router, stream=True))
    left = await primary.arrival(1)
    asking.cancel()
    await asyncio.wait([asking])
    async with asyncio.timeout(5):
        await left.ended.wait()
    assert (await chat(router))[0] == 200
    await until_counted(router, SUCCEEDED, 1)
    assert len(candidate.seen) == 2


async def test_a_share_of_the_requests_is_copied(start: Start) -> None:
    router, primary, candidate = await start(percent=20, shadow_waiting=500)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(chat(router))
    assert len(primary.seen) == 100
    # Of random ids; far more than five standard deviations off would be needed for a failure.
    await eventually(lambda: _is_still(candidate))
    assert 0 < len(candidate.seen) <= 45
    await until_counted(router, SUCCEEDED, len(candidate.seen))


async def _is_still(candidate: StandIn) -> bool:
    """Whether no copy is under way."""
    return bool(candidate.seen) and all(seen.ended.is_set() for seen in candidate.seen)


async def test_grpc_calls_are_copied_too(start: Start) -> None:
    router, _, candidate = await start()
    request = inference.GenerateRequest(model="chat", text="Hi")
    assert [part async for part in router.inference.Generate(request, timeout=10)]
    figures = await until_counted(router, SUCCEEDED, 1)
    assert candidate.seen[0].request.text == "Hi"
    assert figures['compared_total{model="chat@v2",same="true",what="tokens"}'] == 1
