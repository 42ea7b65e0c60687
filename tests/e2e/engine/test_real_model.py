"""The real chat model through a runner: what callers get, and what they are refused."""

import asyncio
import json
import time
from typing import Any

import grpc
import pytest
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_common import metadata
from forebay_common.errors import ForebayError, Reason, from_rpc_error

from tests.engine_host import EngineHost

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT = "smollm2@1"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
Chat = inference_grpc.InferenceServiceStub


async def call_openai(
    chat: Chat, path: str, **body: Any
) -> tuple[list[inference.CallOpenAIResponse], bytes]:
    request = inference.CallOpenAIRequest(path=path, body=json.dumps(body).encode())
    messages = [message async for message in chat.CallOpenAI(request)]
    return messages, b"".join(message.body for message in messages)


async def refusal_of(chat: Chat, path: str, **body: Any) -> ForebayError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call_openai(chat, path, **body)
    return from_rpc_error(failure.value)


def events_of(answer: bytes) -> list[dict[str, Any]]:
    lines = answer.decode().strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_load_reports_every_phase(chat_host: EngineHost) -> None:
    phases = [event.phase for event in chat_host.events[:-1]]
    assert phases == [
        pb.LOAD_PHASE_PROCESS,
        pb.LOAD_PHASE_IMPORT,
        pb.LOAD_PHASE_ENGINE_INIT,
        pb.LOAD_PHASE_WEIGHTS,
        pb.LOAD_PHASE_WARM_UP,
        pb.LOAD_PHASE_CANARY,
    ]
    last = chat_host.events[-1]
    assert sum(phase.duration_ms for phase in last.phases) == pytest.approx(last.elapsed_ms, abs=20)


async def test_generate_and_chat_give_the_same_answer(chat: Chat) -> None:
    request = inference.GenerateRequest(
        messages=inference.ChatMessages(
            messages=[inference.ChatMessage(role="user", content=CAPITAL[0]["content"])]
        ),
        sampling=inference.SamplingOptions(temperature=0, max_tokens=20, logprobs=2),
    )
    messages = [message async for message in chat.Generate(request)]
    text = "".join(message.text_delta for message in messages)
    assert "Paris" in text
    assert messages[0].header.model_version == CHAT
    assert messages[-1].finish_reason == inference.FINISH_REASON_STOP
    tokens = [token for message in messages for token in message.token_ids]
    assert messages[-1].usage.completion_tokens == len(tokens)
    assert sum(len(message.logprobs) for message in messages) == len(tokens)
    _, answer = await call_openai(
        chat, "/v1/chat/completions", model="x", messages=CAPITAL, temperature=0, max_tokens=20
    )
    document = json.loads(answer)
    assert document["choices"][0]["message"]["content"] == text
    assert document["model"] == CHAT
    assert document["usage"]["completion_tokens"] == len(tokens)


async def test_stream_carries_tokens_and_usage(chat: Chat) -> None:
    request = inference.CallOpenAIRequest(
        path="/v1/chat/completions",
        body=json.dumps(
            {
                "model": "any-alias",
                "messages": CAPITAL,
                "temperature": 0,
                "max_tokens": 20,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode(),
    )
    call = chat.CallOpenAI(request, metadata=((metadata.REQUEST_ID, "e2e-1"),))
    messages = [message async for message in call]
    trailing = dict(await call.trailing_metadata())
    events = events_of(b"".join(message.body for message in messages))
    assert all(event["id"] == "chatcmpl-e2e-1" for event in events)
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    assert "Paris" in text
    tokens = sum(len(choice.token_ids) for message in messages for choice in message.tokens)
    assert events[-1]["usage"]["completion_tokens"] == tokens
    usage = messages[-1].usage
    assert trailing[metadata.USAGE] == f"{usage.prompt_tokens},{tokens},{usage.cached_tokens}"
    assert [message.content_type for message in messages if message.content_type] == [
        "text/event-stream; charset=utf-8"
    ]


@pytest.mark.parametrize(
    "prompt",
    [
        "🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊",
        "你好，世界。你好，世界。你好，世界。你好，世界。你好",
    ],
)
async def test_text_beyond_ascii_is_the_engines_streamed_and_not(
    chat: Chat, chat_artifact: str, prompt: str
) -> None:
    from transformers import AutoTokenizer

    limit = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    request = inference.GenerateRequest(text=prompt, sampling=inference.SamplingOptions(**limit))
    deltas = [message async for message in chat.Generate(request)]
    tokens = [token for message in deltas for token in message.token_ids]
    said = "".join(message.text_delta for message in deltas)
    assert not said.isascii()
    assert any(message.token_ids and not message.text_delta for message in deltas), (
        "no token was half a character"
    )
    assert "\ufffd" not in said
    decoded = AutoTokenizer.from_pretrained(chat_artifact).decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # The limit may cut the last character.
    assert said == decoded.rstrip("\ufffd")
    body = {"model": "x", "prompt": prompt, **limit}
    whole, answer = await call_openai(chat, "/v1/completions", **body)
    assert json.loads(answer)["choices"][0]["text"] == said
    assert [token for choice in whole[-1].tokens for token in choice.token_ids] == tokens
    messages, _ = await call_openai(chat, "/v1/completions", **body, stream=True)
    # Each message holds whole events, so each can be read by itself.
    texts = [
        choice["text"]
        for message in messages
        for event in message.body.decode().split("\n\n")
        if event and event != "data: [DONE]"
        for choice in json.loads(event.removeprefix("data: "))["choices"]
    ]
    assert "".join(texts) == said
    assert [t for m in messages for choice in m.tokens for t in choice.token_ids] == tokens


async def test_under_load_tokens_share_frames(chat_host: EngineHost, chat: Chat) -> None:
    async def stream(number: int) -> list[inference.CallOpenAIResponse]:
        messages, answer = await call_openai(
            chat,
            "/v1/chat/completions",
            model="x",
            messages=[{"role": "user", "content": f"Count from {number}."}],
            max_tokens=40,
            ignore_eos=True,
            stream=True,
        )
        assert answer.endswith(b"data: [DONE]\n\n")
        return messages

    async def generate(number: int) -> list[inference.GenerateResponse]:
        sampling = inference.SamplingOptions(max_tokens=40, ignore_eos=True, logprobs=1)
        request = inference.GenerateRequest(text=f"Count from {number}.", sampling=sampling)
        return [message async for message in chat.Generate(request)]

    streamed, generated = await asyncio.gather(
        asyncio.gather(*(stream(number) for number in range(4))),
        asyncio.gather(*(generate(number) for number in range(4))),
    )
    for messages in streamed:
        assert messages[-1].usage.completion_tokens == 40
        assert sum(len(c.token_ids) for m in messages for c in m.tokens) == 40
        assert len(messages) < 30
    for messages in generated:
        assert [len(m.logprobs) for m in messages] == [len(m.token_ids) for m in messages]
        assert sum(len(m.token_ids) for m in messages) == 40
        assert len(messages) < 30


async def test_several_choices_are_told_apart(chat: Chat) -> None:
    messages, answer = await call_openai(
        chat,
        "/v1/completions",
        model="x",
        prompt=["Once upon a time", "The river"],
        n=2,
        max_tokens=6,
        ignore_eos=True,
        temperature=1,
        seed=1,
        stream=True,
    )
    indices = {choice["index"] for event in events_of(answer) for choice in event["choices"]}
    assert indices == {0, 1, 2, 3}
    counts: dict[int, int] = {}
    for message in messages:
        for choice in message.tokens:
            counts[choice.index] = counts.get(choice.index, 0) + len(choice.token_ids)
    assert counts == {0: 6, 1: 6, 2: 6, 3: 6}
    assert messages[-1].usage.completion_tokens == 24


async def test_json_schema_is_kept(chat: Chat) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["city", "n"],
    }
    _, answer = await call_openai(
        chat,
        "/v1/chat/completions",
        model="x",
        messages=[{"role": "user", "content": "Give a city and a number as JSON."}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    content = json.loads(json.loads(answer)["choices"][0]["message"]["content"])
    assert set(content) == {"city", "n"}
    assert isinstance(content["n"], int)


async def test_named_tool_is_called(chat: Chat) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
            },
        },
    }
    _, answer = await call_openai(
        chat,
        "/v1/chat/completions",
        model="x",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=60,
    )
    (call,) = json.loads(answer)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}


async def test_shared_prefix_is_found_in_the_cache(chat: Chat) -> None:
    prompt = list(range(1000, 1300))
    usages = []
    for _ in range(2):
        messages, _ = await call_openai(
            chat, "/v1/completions", model="x", prompt=prompt, max_tokens=1, temperature=0
        )
        usages.append(messages[-1].usage)
    assert usages[0].cached_tokens == 0
    assert usages[1].cached_tokens >= 256


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_over_the_context_is_refused(chat: Chat, stream: bool) -> None:
    refusal = await refusal_of(
        chat,
        "/v1/chat/completions",
        model="x",
        messages=[{"role": "user", "content": "word " * 4000}],
        stream=stream,
    )
    assert refusal.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert "2048" in refusal.message


async def test_generate_over_the_context_is_refused(chat: Chat) -> None:
    request = inference.GenerateRequest(text="word " * 4000)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(aiter(chat.Generate(request)))
    assert from_rpc_error(failure.value).reason is Reason.CONTEXT_LENGTH_EXCEEDED


SECRET = "the secret word is swordfish"


@pytest.mark.parametrize(
    ("path", "body", "reason", "param"),
    [
        ("/v1/chat/completions", {}, Reason.INVALID_ARGUMENT, "messages"),
        ("/v1/chat/completions", {"messages": SECRET}, Reason.INVALID_ARGUMENT, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": {"a": SECRET}}]},
            Reason.INVALID_ARGUMENT,
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": CAPITAL, "temperature": SECRET},
            Reason.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            "/v1/chat/completions",
            {"messages": CAPITAL, "temperature": -3, "stream": True},
            Reason.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            "/v1/chat/completions",
            {"messages": CAPITAL, "n": 1000},
            Reason.INVALID_ARGUMENT,
            "n",
        ),
        ("/v1/completions", {"prompt": [1, 99999999]}, Reason.INVALID_ARGUMENT, None),
        ("/v1/embeddings", {"input": SECRET}, Reason.UNSUPPORTED, None),
        ("/v1/nothing", {}, Reason.ROUTE_NOT_FOUND, None),
        ("/collective_rpc", {}, Reason.ROUTE_NOT_FOUND, None),
    ],
)
async def test_refusals_name_the_field_and_repeat_nothing(
    chat: Chat, path: str, body: dict[str, Any], reason: Reason, param: str | None
) -> None:
    refusal = await refusal_of(chat, path, model="x", **body)
    assert (refusal.reason, refusal.param) == (reason, param), refusal.message
    assert "swordfish" not in refusal.message
    assert "pydantic" not in refusal.message


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
async def test_malformed_bodies_are_refused(chat: Chat, body: bytes) -> None:
    request = inference.CallOpenAIRequest(path="/v1/chat/completions", body=body)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(aiter(chat.CallOpenAI(request)))
    assert from_rpc_error(failure.value).reason is Reason.INVALID_ARGUMENT


async def test_another_model_version_is_not_answered(chat: Chat) -> None:
    request = inference.GenerateRequest(model="x", text="hello")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(aiter(chat.Generate(request, metadata=((metadata.MODEL, "other@1"),))))
    assert from_rpc_error(failure.value).reason is Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize("how", ["stream", "document", "generate", "deadline"])
async def test_abandoned_call_leaves_the_engine_at_once(
    chat_host: EngineHost, chat: Chat, how: str
) -> None:
    await chat_host.until(lambda status: status.load.running == 0, model_version=CHAT)
    timeout_s = 1.5 if how == "deadline" else None
    body = {"messages": CAPITAL, "max_tokens": 1500, "ignore_eos": True, "stream": how == "stream"}
    if how == "generate":
        call: Any = chat.Generate(
            inference.GenerateRequest(
                text="Once", sampling=inference.SamplingOptions(max_tokens=1500, ignore_eos=True)
            )
        )
    else:
        call = chat.CallOpenAI(
            inference.CallOpenAIRequest(
                path="/v1/chat/completions", body=json.dumps(body).encode()
            ),
            timeout=timeout_s,
        )
    await chat_host.until(lambda status: status.load.running == 1, model_version=CHAT)
    if how == "deadline":
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        call.cancel()
    began = time.monotonic()
    await chat_host.until(lambda status: status.load.running == 0, model_version=CHAT)
    # The engine's own step and the report of load, every 100 ms, are in it.
    assert time.monotonic() - began < 0.6


async def test_many_streams_get_their_own_answers(chat: Chat) -> None:
    async def ask(number: int) -> tuple[int, int]:
        messages, _ = await call_openai(
            chat,
            "/v1/chat/completions",
            model="x",
            messages=[{"role": "user", "content": f"Count from {number}."}],
            max_tokens=8 + number,
            ignore_eos=True,
            stream=True,
        )
        return number, messages[-1].usage.completion_tokens

    answers = await asyncio.gather(*(ask(number) for number in range(16)))
    assert answers == [(number, 8 + number) for number in range(16)]
