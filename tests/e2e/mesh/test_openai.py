"""The official OpenAI client, unchanged, against real models behind the whole mesh."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect

from tests.conftest import EtcdProcess
from tests.mesh import Mesh, running, simulated, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
_MODELS = Path(__file__).resolve().parents[3] / ".forebay" / "models"
_CHAT = engine.ModelSpec(
    model_version="smollm2@1",
    backend=engine.BACKEND_VLLM,
    artifact_path=str(_MODELS / "smollm2"),
    context_tokens=2048,
    max_sequences=64,
    kv_cache_bytes=1 << 30,
)
_EMBED = engine.ModelSpec(
    model_version="minilm@1",
    backend=engine.BACKEND_VLLM,
    artifact_path=str(_MODELS / "minilm"),
    task=engine.TASK_EMBED,
)
_QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One replica with a chat model and an embedding model; a third model that nobody runs."""
    folder = tmp_path_factory.mktemp("mesh")
    etcd = EtcdProcess(folder / "etcd")
    etcd.start()
    try:
        async with running(
            folder,
            etcd.endpoint,
            "/e2e",
            _CHAT,
            _EMBED,
            simulated("nowhere@1"),
            router={"FOREBAY_ROUTER_LOAD_ON_DEMAND": "false"},
        ) as mesh:
            mesh.add_replica("r1", _CHAT, _EMBED)
            await mesh.placeable("r1", timeout_s=200)

            async def both() -> bool:
                models = (await mesh.view())["r1"].replica.models
                return all(model.state == engine.MODEL_STATE_ACTIVE for model in models)

            await until(both, 200)
            yield mesh
    finally:
        etcd.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{mesh.http}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_a_chat_is_answered(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="smollm2", messages=_QUESTION, temperature=0, max_tokens=20
    )
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert answer.model == "smollm2@1"


async def test_a_stream_gives_the_same_text_and_its_usage(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": _QUESTION, "temperature": 0}
    whole = await client.chat.completions.create(**asked, max_tokens=20)
    stream = await client.chat.completions.create(
        **asked, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert sum(chunk.usage is not None for chunk in chunks) == 1


async def test_a_completion_is_answered(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="smollm2@1", prompt="The capital of France is", temperature=0, max_tokens=5
    )
    assert "Paris" in answer.choices[0].text


async def test_embeddings_tell_texts_apart(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(
        model="minilm",
        input=["A river is dammed.", "The stream is held by a dam.", "My cat eats fish."],
    )
    dam, same, cat = (item.embedding for item in answer.data)
    assert len(dam) == 384

    def similarity(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert similarity(dam, same) > 2 * similarity(dam, cat)
    assert answer.usage.prompt_tokens > 0


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    names = {model.id async for model in client.models.list()}
    assert {"smollm2", "smollm2@1", "minilm", "nowhere"} <= names
    assert (await client.models.retrieve("smollm2")).owned_by == "forebay"


async def test_structured_output_and_tools_are_vllms_own(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=_QUESTION,
        temperature=0,
        max_tokens=40,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
    )
    assert "city" in json.loads(answer.choices[0].message.content or "")


async def test_each_kind_of_error_has_its_status_and_shape(client: openai.AsyncOpenAI) -> None:
    async def refused(**changes: Any) -> openai.APIStatusError:
        asked = {"model": "smollm2", "messages": _QUESTION, "max_tokens": 5, **changes}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**asked)
        body = caught.value.body
        assert isinstance(body, dict)
        assert {"message", "type", "param", "code"} <= set(body)
        assert str(_MODELS) not in body["message"]
        return caught.value

    error = await refused(model="no-such-model")
    assert (error.status_code, error.code) == (404, "model_not_found")
    error = await refused(messages="not a list")
    assert (error.status_code, error.param) == (400, "messages")
    error = await refused(temperature="hot")
    assert (error.status_code, error.param) == (400, "temperature")
    secret = "xyzzy " * 3000
    error = await refused(messages=[{"role": "user", "content": secret}])
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    assert "xyzzy" not in str(error.body)
    error = await refused(messages=[{"role": "user", "content": "x" * (17 << 20)}])
    assert error.status_code == 413
    error = await refused(model="nowhere")
    assert (error.status_code, error.code) == (503, "no_replica")
    assert int(error.response.headers["retry-after"]) >= 1


async def test_malformed_json_is_named(mesh: Mesh) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{mesh.http}/v1/chat/completions", data=b'{"model": ') as answer,
    ):
        assert answer.status == 400
        body = await answer.json()
        assert body["error"]["type"] == "invalid_request_error"
        assert "JSON" in body["error"]["message"]


async def _running(mesh: Mesh) -> int:
    models = (await mesh.view())["r1"].replica.models
    status = await mesh.engine_status("r1")
    return status.load.running + status.load.waiting + sum(model.in_flight for model in models)


async def _stopped_within(mesh: Mesh, started_s: float, limit_s: float) -> None:
    async def idle() -> bool:
        return await _running(mesh) == 0

    await until(idle, 10)
    # What is watched here reports at most every 100 ms, over three hops.
    assert time.monotonic() - started_s < limit_s + 0.3


async def test_a_deadline_is_504_and_the_engine_stops(mesh: Mesh) -> None:
    body = {
        "model": "smollm2",
        "messages": _QUESTION,
        "max_tokens": 1500,
        "ignore_eos": True,
    }
    started_s = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{mesh.http}/v1/chat/completions",
            json=body,
            headers={"x-request-timeout-s": "1"},
        ) as answer,
    ):
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "deadline_exceeded"
    await _stopped_within(mesh, started_s, 1 + 0.25)


async def _generate_ended_ns(mesh: Mesh, request_id: str) -> int:
    """When the runner gave a request up, by its own span."""
    found: list[int] = []

    async def ended() -> bool:
        reader = mesh.reader()
        try:
            trace_id = reader.trace_of(request_id)
            spans = reader.spans(trace_id) if trace_id else ()
        finally:
            reader.close()
        found.extend(span.end_unix_ns for span in spans if span.name == "generate")
        return bool(found)

    await until(ended, 10)
    return found[0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_who_leaves_stops_the_engine_within_a_quarter_second(
    mesh: Mesh, stream: bool
) -> None:
    body = {
        "model": "smollm2",
        "messages": _QUESTION,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    request_id = f"leaves-{stream}"
    async with aiohttp.ClientSession(headers={"x-request-id": request_id}) as session:
        asking = asyncio.ensure_future(
            session.post(f"http://{mesh.http}/v1/chat/completions", json=body)
        )

        async def busy() -> bool:
            return await _running(mesh) > 0

        await until(busy, 10)
        if stream:
            answer = await asking
            await answer.content.readany()
            answer.close()
        else:
            asking.cancel()
        left_ns = time.time_ns()
    await _stopped_within(mesh, time.monotonic(), 0.25)
    gave_up_after_ms = (await _generate_ended_ns(mesh, request_id) - left_ns) / 1e6
    print(f"the runner gave up {gave_up_after_ms:.1f} ms after the client left")
    assert gave_up_after_ms < 250


async def test_grpc_streams_the_same_answer(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    over_http = await client.chat.completions.create(
        model="smollm2", messages=_QUESTION, temperature=0, max_tokens=20
    )
    request = pb.GenerateRequest(
        model="smollm2",
        messages=pb.ChatMessages(
            messages=[pb.ChatMessage(role="user", content=_QUESTION[0]["content"])]
        ),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=20),
    )
    async with connect(mesh.grpc) as channel:
        parts = [part async for part in rpc.InferenceServiceStub(channel).Generate(request)]
    assert "".join(part.text_delta for part in parts) == over_http.choices[0].message.content
    assert parts[-1].finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    "turns",
    [
        (
            "Repeat: 🌊🦆",
            "🌊🦆",
            "Repeat: \U0001f469\u200d\U0001f680\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea",
        ),
        ("Repeat: 你好，世界。", "你好，世界。", "Repeat: 水在河里。"),
        (
            "Repeat exactly: \U0001f44d\U0001f3fd \U0001f469\u200d\U0001f680 "
            "\U0001f1e9\U0001f1ea 🌊🦆",
        ),
    ],
    ids=["emoji", "Chinese", "emoji and prose"],
)
async def test_text_beyond_ascii_is_the_same_every_way(
    mesh: Mesh, client: openai.AsyncOpenAI, turns: tuple[str, ...]
) -> None:
    messages: list[Any] = [
        {"role": role, "content": turn}
        for role, turn in zip(itertools.cycle(("user", "assistant")), turns, strict=False)
    ]
    wanted: dict[str, Any] = {
        "model": "smollm2",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = (await client.chat.completions.create(**wanted)).choices[0].message.content or ""
    stream = await client.chat.completions.create(**wanted, stream=True)
    pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    request = pb.GenerateRequest(
        model="smollm2",
        messages=pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages]),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=48),
    )
    async with connect(mesh.grpc) as channel:
        parts = [part async for part in rpc.InferenceServiceStub(channel).Generate(request)]
    assert "".join(pieces) == whole
    assert "".join(part.text_delta for part in parts) == whole
    assert not whole.isascii()
    assert "\ufffd" not in whole
