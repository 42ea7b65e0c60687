"""What vLLM has in its prefix cache, told by its runner as routers name it."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata
from forebay_common.metadata import Usage
from forebay_common.prefixes import LENGTHS, prefix_hashes
from forebay_common.prompts import generate_prompt, openai_prompt

from tests.cache_watch import CacheView, watched
from tests.engine_host import EngineHost, running_host

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MODEL = "smollm2@1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOCK_TOKENS = 32
WORDS = """
Water that falls on the hills gathers in streams, and streams join into a river. Where the river is
dammed, a lake stands behind the wall, and gates let as much of it through as the mill below needs.
In a dry summer the miller keeps the gates low; after the storms of autumn he opens all of them.
"""
Names = Sequence[int]


def a_text(about: str, *, sentences: int = 18) -> str:
    """About a thousand tokens that begin as no other text does."""
    return "".join(f"Part {index} of {about}.{WORDS}" for index in range(sentences))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_host(
    tmp_path_factory: pytest.TempPathFactory, chat_artifact: str
) -> AsyncIterator[EngineHost]:
    """A host whose model has a small KV cache."""
    spec = engine.ModelSpec(
        model_version=MODEL,
        backend=engine.BACKEND_VLLM,
        artifact_path=chat_artifact,
        context_tokens=2048,
        max_sequences=16,
        kv_cache_bytes=120 << 20,
    )
    async with running_host(tmp_path_factory.mktemp("cache")) as host:
        host.events = await host.load(spec)
        assert host.events[-1].state == engine.MODEL_STATE_ACTIVE, host.events[-1].reason
        yield host


@pytest_asyncio.fixture(loop_scope="module")
async def view(chat_host: EngineHost) -> AsyncIterator[CacheView]:
    """What the runner tells."""
    status = await chat_host.until_active(model_version=MODEL)
    async with watched(f"unix:{status.socket_path}") as told:
        yield told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner(chat_host: EngineHost) -> rpc.InferenceServiceStub:
    """The model's runner."""
    return await chat_host.runner(model_version=MODEL)


async def ask(runner: rpc.InferenceServiceStub, **prompt: Any) -> tuple[Names, Usage]:
    """Have a prompt answered; return its names and what it cost."""
    request = pb.GenerateRequest(
        model=MODEL, sampling=pb.SamplingOptions(max_tokens=2, temperature=0), **prompt
    )
    call = runner.Generate(request)
    async for _ in call:
        pass
    return prefix_hashes(generate_prompt(request)), await _usage(call)


async def ask_openai(
    runner: rpc.InferenceServiceStub, path: str, **fields: Any
) -> tuple[Names, Usage]:
    body = json.dumps({"model": MODEL, "max_tokens": 2, "temperature": 0, **fields}).encode()
    call = runner.CallOpenAI(pb.CallOpenAIRequest(path=path, body=body))
    async for _ in call:
        pass
    return prefix_hashes(openai_prompt(path, body)), await _usage(call)


async def _usage(call: Any) -> Usage:
    usage = Usage.decode(metadata.texts(await call.trailing_metadata())[metadata.USAGE])
    assert usage is not None
    return usage


async def until_told(view: CacheView, names: Names) -> None:
    """Wait until all names but the last are told: it may end in a block that is not full."""
    await view.until(lambda: set(names[:-1]) <= view.of(MODEL))


async def test_a_shared_prefix_is_told_and_found_by_the_engine(
    runner: rpc.InferenceServiceStub, view: CacheView
) -> None:
    system = a_text("a manual")
    asked = [
        [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for question in ("Where does water gather?", "为什么要在夏天把闸门关小一些?" * 12)
    ]
    names, first = await ask_openai(runner, CHAT, messages=asked[0])
    assert first.prompt_tokens > 1000
    await until_told(view, names)
    others, second = await ask_openai(runner, CHAT, messages=asked[1])
    shared = sum(one == other for one, other in zip(names, others, strict=False))
    # What is told of the other prompt before it ran is what the engine then found, but for a block
    # and what the template adds.
    share_bytes = LENGTHS[shared - 1] / len(openai_prompt(CHAT, _body(asked[0])))
    assert abs(share_bytes * first.prompt_tokens - second.cached_tokens) <= 2 * BLOCK_TOKENS
    assert set(others[:shared]) <= view.of(MODEL)


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize("kind", ["text", "token_ids", "messages", "completion", "ids"])
async def test_prompts_of_every_kind_are_told(
    runner: rpc.InferenceServiceStub, view: CacheView, kind: str
) -> None:
    text = a_text(f"a prompt of the kind {kind}", sentences=6)
    ids = [(index * 37 + len(kind)) % 20_000 + 100 for index in range(400)]
    if kind == "text":
        names, _ = await ask(runner, text=text)
    elif kind == "token_ids":
        names, _ = await ask(runner, token_ids=pb.TokenIds(ids=ids))
    elif kind == "messages":
        turn = pb.ChatMessage(role="user", content=text)
        names, _ = await ask(runner, messages=pb.ChatMessages(messages=[turn]))
    elif kind == "completion":
        names, _ = await ask_openai(runner, COMPLETIONS, prompt=text, n=2, temperature=1)
    else:
        names, _ = await ask_openai(runner, COMPLETIONS, prompt=ids, stream=True)
    await until_told(view, names)


async def test_a_salted_prompt_is_nobody_elses(
    runner: rpc.InferenceServiceStub, view: CacheView
) -> None:
    messages = [{"role": "user", "content": a_text("a salted one", sentences=6)}]
    # What callers must not say does not disturb the account of what is cached.
    fields = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    names, _ = await ask_openai(runner, CHAT, messages=messages, cache_salt="mine", **fields)
    marker, _ = await ask(runner, text=a_text("a marker", sentences=6))
    await until_told(view, marker)
    assert not view.of(MODEL) & set(names)


async def test_what_is_evicted_is_told_as_removed_and_learned_again(
    runner: rpc.InferenceServiceStub, view: CacheView
) -> None:
    first = a_text("the first")
    names, _ = await ask(runner, text=first)
    await until_told(view, names)
    again, hit = await ask(runner, text=first)
    assert again == names
    assert hit.cached_tokens > 1000
    for index in range(6):
        others, _ = await ask(runner, text=a_text(f"another, number {index}"))
        await until_told(view, others)
    await view.until(lambda: not view.of(MODEL) & set(names))
    _, missed = await ask(runner, text=first)
    assert missed.cached_tokens == 0
    await until_told(view, names)
