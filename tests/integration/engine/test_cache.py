"""What a simulated runner tells of its prefix cache, over its socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_common.channel import connect
from forebay_common.prefixes import prefix_hashes
from forebay_common.prompts import generate_prompt, openai_prompt
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cache_watch import CacheView, watched
from tests.engine_host import EngineHost, a_spec, running_host

pytestmark = pytest.mark.integration

MODEL = "tiny@1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "the river flows into the lake and the mill turns. " * 80
SAMPLING = inference.SamplingOptions(max_tokens=4)
Runner = inference_grpc.InferenceServiceStub


async def address_of(host: EngineHost) -> str:
    return f"unix:{(await host.until_active()).socket_path}"


@pytest.fixture
async def runner(host: EngineHost) -> Runner:
    """The runner of the host's version."""
    return await host.runner()


@pytest.fixture
async def view(host: EngineHost) -> AsyncIterator[CacheView]:
    """What it tells."""
    async with watched(await address_of(host)) as told:
        yield told


async def ask(runner: Runner, **prompt: Any) -> Sequence[int]:
    """Have a prompt answered; return its names."""
    request = inference.GenerateRequest(model=MODEL, sampling=SAMPLING, **prompt)
    async for _ in runner.Generate(request):
        pass
    return prefix_hashes(generate_prompt(request))


async def ask_openai(runner: Runner, path: str, **fields: Any) -> Sequence[int]:
    body = json.dumps({"model": MODEL, "max_tokens": 4, **fields}).encode()
    async for _ in runner.CallOpenAI(inference.CallOpenAIRequest(path=path, body=body)):
        pass
    return prefix_hashes(openai_prompt(path, body))


async def until_told(view: CacheView, names: Sequence[int], *, but: int = 1) -> None:
    """Wait until all names are told; the last few end in a block that may not be full."""
    assert len(names) > 4
    await view.until(lambda: set(names[: len(names) - but]) <= view.of(MODEL))


async def test_the_first_message_says_that_nothing_is_cached_yet(view: CacheView) -> None:
    assert view.is_told(MODEL)
    assert view.of(MODEL) == set()


async def test_prompts_of_every_kind_are_told_as_routers_name_them(
    runner: Runner, view: CacheView
) -> None:
    turns = [{"role": "system", "content": TEXT}, {"role": "user", "content": "why?"}]
    asked = [
        await ask(runner, text=TEXT),
        await ask(runner, token_ids=inference.TokenIds(ids=[7, 9] * 500)),
        await ask(
            runner,
            messages=inference.ChatMessages(
                messages=[inference.ChatMessage(role="user", content=TEXT)]
            ),
        ),
        await ask_openai(runner, CHAT, messages=turns),
        await ask_openai(runner, CHAT, messages=[*turns, {"role": "user", "content": TEXT}], n=2),
        await ask_openai(runner, COMPLETIONS, prompt="a " + TEXT),
        await ask_openai(runner, COMPLETIONS, prompt=["b " + TEXT, "c " + TEXT], stream=True),
    ]
    for names in asked:
        await until_told(view, names)
    known = {name for names in asked for name in names}
    assert view.of(MODEL) <= known


async def test_a_watcher_that_comes_later_gets_all_there_is(
    host: EngineHost, runner: Runner, view: CacheView
) -> None:
    names = await ask(runner, text=TEXT)
    await until_told(view, names)
    async with watched(await address_of(host)) as late:
        assert late.of(MODEL) == view.of(MODEL)


async def test_what_is_evicted_is_told_as_removed(tmp_path: Path) -> None:
    # 2048 tokens hold one of the prompts, and not quite two.
    spec = a_spec(kv_cache_bytes=2048 * 1024)
    async with running_host(tmp_path, [spec]) as host, watched(await address_of(host)) as view:
        runner = await host.runner()
        prompts = [f"{word} {TEXT}" for word in ("one", "two", "three", "four")]
        first = await ask(runner, text=prompts[0])
        await until_told(view, first)
        for prompt in prompts[1:]:
            await until_told(view, await ask(runner, text=prompt))
        await view.until(lambda: not view.of(MODEL) & set(first))
        again = await ask(runner, text=prompts[0])
        assert again == first
        await until_told(view, first)
        figures = await host.load_of()
        # Nothing of it was found when it came again.
        assert figures.prefix_hits_tokens == 0


async def test_a_sleeping_model_has_nothing_cached(
    host: EngineHost, runner: Runner, view: CacheView
) -> None:
    await until_told(view, await ask(runner, text=TEXT))
    await host.stub.SleepModel(engine.SleepModelRequest(model_version=MODEL))
    await view.until(lambda: not view.of(MODEL))


async def test_a_shared_beginning_is_told_for_as_long_as_it_is_cached(
    runner: Runner, view: CacheView
) -> None:
    one = await ask_openai(runner, COMPLETIONS, prompt=TEXT + "and then the first.")
    other = await ask_openai(runner, COMPLETIONS, prompt=TEXT + "or else " + TEXT)
    await until_told(view, one)
    await until_told(view, other)
    assert one[:-1] == other[: len(one) - 1]


async def test_many_prompts_at_once_are_all_told(runner: Runner, view: CacheView) -> None:
    prompts = [f"{index} {TEXT}" for index in range(60)]
    for names in await asyncio.gather(*(ask(runner, text=prompt) for prompt in prompts)):
        await until_told(view, names)


async def test_the_report_can_be_turned_off(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path, [a_spec()], cached_prefixes_max=0) as host,
        watched(await address_of(host)) as view,
    ):
        await ask(await host.runner(), text=TEXT)
        assert not view.is_told(MODEL)
        assert view.of(MODEL) == set()


async def test_a_model_that_embeds_has_no_report(tmp_path: Path) -> None:
    spec = a_spec(task=engine.TASK_EMBED)
    async with running_host(tmp_path, [spec]) as host, watched(await address_of(host)) as view:
        runner = await host.runner()
        await runner.Embed(inference.EmbedRequest(inputs=[inference.EmbedInput(text=TEXT)]))
        assert not view.is_told(MODEL)


async def test_the_service_is_listed_and_serves(host: EngineHost) -> None:
    async with connect(await address_of(host)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(
            health_pb2.HealthCheckRequest(service="forebay.engine.v1.CacheService")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_watch_does_not_hold_a_drain_up(host: EngineHost, view: CacheView) -> None:
    await host.stub.UnloadModel(engine.UnloadModelRequest(model_version=MODEL, grace_ms=20_000))
    with pytest.raises(AssertionError, match="the watch ended"):
        await view.until(lambda: False)
    with pytest.raises(grpc.aio.AioRpcError):
        await host.stub.DrainModel(engine.DrainModelRequest(model_version=MODEL))
