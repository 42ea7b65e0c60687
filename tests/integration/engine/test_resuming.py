"""A simulated runner goes on with another one's answer, wherever that was cut."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_router.core.resume import continue_generate, continue_openai

from tests.engine_host import a_spec, running_host

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

MOST = 1 << 22
TOLD = ((metadata.REQUEST_ID, "seam-1"),)
Runner = rpc.InferenceServiceStub
Answer = tuple[list[bytes], dict[str, str]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runner]:
    """A runner."""
    async with running_host(tmp_path_factory.mktemp("one"), [a_spec()]) as host:
        yield await host.runner()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runner]:
    """Another one of the same model, with another past."""
    directory: Path = tmp_path_factory.mktemp("other")
    async with running_host(directory, [a_spec()]) as host:
        stub = await host.runner()
        async for _ in stub.Generate(pb.GenerateRequest(text="Something else.")):
            pass
        yield stub


async def answer_of(call: Any) -> Answer:
    messages = [message.SerializeToString() async for message in call]
    trailing = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
    return messages, trailing


def generated(messages: Sequence[bytes]) -> dict[str, Any]:
    """What a caller of Generate has in the end."""
    parts = [pb.GenerateResponse.FromString(message) for message in messages]
    return {
        "headers": [part.header.SerializeToString() for part in parts if part.HasField("header")],
        "text": "".join(part.text_delta for part in parts),
        "tokens": [token for part in parts for token in part.token_ids],
        "logprobs": [entry.logprob for part in parts for entry in part.logprobs],
        "finishes": [part.finish_reason for part in parts if part.finish_reason],
        "completion": [part.usage.completion_tokens for part in parts if part.HasField("usage")],
        "prompt": [part.usage.prompt_tokens for part in parts if part.HasField("usage")],
    }


def called(messages: Sequence[bytes]) -> dict[str, Any]:
    """What an OpenAI client has in the end, and the tokens beside it."""
    parts = [pb.CallOpenAIResponse.FromString(message) for message in messages]
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    once: dict[tuple[int, str], list[Any]] = {}
    heads, usages, tokens, done = set(), [], dict[int, list[int]](), 0
    for event in b"".join(part.body for part in parts).decode().split("\n\n"):
        if not event:
            continue
        if event == "data: [DONE]":
            done += 1
            continue
        document = json.loads(event.removeprefix("data: "))
        heads.add(tuple(document[k] for k in ("id", "created", "model", "system_fingerprint")))
        if document.get("usage"):
            usage = document["usage"]
            usages.append((usage["prompt_tokens"], usage["completion_tokens"]))
        for choice in document["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            text = choice.get("text") or delta.get("content") or ""
            texts[index] = texts.get(index, "") + text
            entries = choice.get("logprobs") or {}
            logprobs.setdefault(index, []).extend(entries.get("content", entries.get("tokens", [])))
            for key, value in (("role", delta.get("role")), ("finish", choice["finish_reason"])):
                if value:
                    once.setdefault((index, key), []).append(value)
    for part in parts:
        for grown in part.tokens:
            tokens.setdefault(grown.index, []).extend(grown.token_ids)
    completion = [part.usage.completion_tokens for part in parts if part.HasField("usage")]
    return {
        "heads": heads,
        "texts": texts,
        "logprobs": logprobs,
        "once": once,
        "usages": usages,
        "tokens": tokens,
        "done": done,
        "completion": completion,
    }


GENERATED: list[dict[str, Any]] = [
    {},
    {"seed": 7, "temperature": 1.0},
    {"max_tokens": 11},
    {"min_tokens": 40, "max_tokens": 60},
    {"logprobs": 2, "max_tokens": 20},
    {"ignore_eos": True, "max_tokens": 90},
]


@pytest.mark.parametrize("options", GENERATED)
@pytest.mark.parametrize("text", ["Tell me of rivers.", "你好 🌊"])
async def test_an_answer_cut_anywhere_is_completed_by_another_runner(
    runner: Runner, other: Runner, text: str, options: dict[str, Any]
) -> None:
    request = pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(**options))
    messages, trailing = await answer_of(runner.Generate(request, metadata=TOLD))
    whole = generated(messages)
    assert len(whole["headers"]) == 1
    for cut in range(1, len(messages)):
        made = continue_generate(request.SerializeToString(), messages[:cut], most_bytes=MOST)
        assert isinstance(made, bytes)
        continuation = pb.GenerateRequest.FromString(made)
        rest, rest_trailing = await answer_of(other.Generate(continuation, metadata=TOLD))
        assert generated([*messages[:cut], *rest]) == whole, f"cut after {cut} messages"
        assert usage_of(rest_trailing) == usage_of(trailing)


async def test_a_stop_text_across_the_seam_ends_the_answer(runner: Runner, other: Runner) -> None:
    plain = pb.GenerateRequest(text="Tell me of rivers.")
    messages, _ = await answer_of(runner.Generate(plain))
    text = generated(messages)["text"]
    for start in range(0, len(text) - 8, 5):
        stop = text[start + 1 : start + 8]
        request = pb.GenerateRequest(text=plain.text, sampling=pb.SamplingOptions(stop=[stop]))
        messages, _ = await answer_of(runner.Generate(request))
        whole = generated(messages)
        assert stop not in whole["text"]
        for cut in range(max(1, len(messages) - 8), len(messages)):
            made = continue_generate(request.SerializeToString(), messages[:cut], most_bytes=MOST)
            assert isinstance(made, bytes)
            continuation = pb.GenerateRequest.FromString(made)
            rest, _ = await answer_of(other.Generate(continuation))
            both = generated([*messages[:cut], *rest])
            assert {**both, "headers": 0} == {**whole, "headers": 0}


CHAT = {"messages": [{"role": "user", "content": "Tell me of 水 and rivers."}]}
CALLED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3, "seed": 5, "max_tokens": 25}),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 12},
    ),
    ("/v1/completions", {"prompt": ["One river", "Two boats"], "n": 2, "max_tokens": 14}),
    (
        "/v1/completions",
        {"prompt": "One", "logprobs": 1, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", {**CHAT, "stop": ["er ", "."], "min_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), CALLED)
async def test_an_openai_stream_cut_anywhere_is_completed_by_another_runner(
    runner: Runner, other: Runner, path: str, body: dict[str, Any]
) -> None:
    document = json.dumps({"model": "x", "stream": True, **body}).encode()
    request = pb.CallOpenAIRequest(path=path, body=document)
    messages, trailing = await answer_of(runner.CallOpenAI(request, metadata=TOLD))
    whole = called(messages)
    assert len(whole["heads"]) == whole["done"] == 1
    for cut in range(1, len(messages)):
        made = continue_openai(request.SerializeToString(), messages[:cut], most_bytes=MOST)
        assert isinstance(made, bytes)
        continuation = pb.CallOpenAIRequest.FromString(made)
        rest, rest_trailing = await answer_of(other.CallOpenAI(continuation, metadata=TOLD))
        assert not any(pb.CallOpenAIResponse.FromString(part).content_type for part in rest)
        both = called([*messages[:cut], *rest])
        assert both == whole, f"cut after {cut} messages"
        assert usage_of(rest_trailing) == usage_of(trailing)


async def test_an_answer_can_move_from_runner_to_runner(runner: Runner, other: Runner) -> None:
    body = json.dumps({"stream": True, **CHAT, "n": 2, "max_tokens": 30}).encode()
    request = pb.CallOpenAIRequest(path="/v1/chat/completions", body=body)
    messages, _ = await answer_of(runner.CallOpenAI(request, metadata=TOLD))
    whole = called(messages)
    delivered = messages[:4]
    for taken_by in (other, runner, other):
        made = continue_openai(request.SerializeToString(), delivered, most_bytes=MOST)
        assert isinstance(made, bytes)
        call = taken_by.CallOpenAI(pb.CallOpenAIRequest.FromString(made), metadata=TOLD)
        rest, _ = await answer_of(call)
        delivered = [*delivered, *rest[:5]]
    assert called([*delivered, *rest[5:]]) == whole


def usage_of(trailing: dict[str, str]) -> list[str]:
    """Prompt and completion tokens: what was cached is the new runner's own affair."""
    return trailing[metadata.USAGE].split(",")[:2]


def a_point(text: str, tokens: Sequence[int], **fields: Any) -> pb.ResumePoint:
    return pb.ResumePoint(text=text, tokens=[pb.ChoiceTokens(token_ids=tokens)], **fields)


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (a_point("no such text", [100, 101]), Reason.UNSUPPORTED),
        (a_point("x", [1 << 30]), Reason.INVALID_ARGUMENT),
        (
            pb.ResumePoint(tokens=[pb.ChoiceTokens(index=1, token_ids=[100])]),
            Reason.UNSUPPORTED,
        ),
    ],
)
async def test_what_this_runner_cannot_have_said_is_refused(
    runner: Runner, point: pb.ResumePoint, reason: Reason
) -> None:
    call = runner.Generate(pb.GenerateRequest(text="Hello", resume=point))
    assert (await refusal_of(call)).reason is reason


@pytest.mark.parametrize(
    ("path", "body", "events"),
    [
        ("/v1/chat/completions", CHAT, b""),
        ("/v1/embeddings", {"input": "x"}, b""),
        ("/v1/chat/completions", {**CHAT, "stream": True}, b"data: {\n\n"),
        (
            "/v1/chat/completions",
            {**CHAT, "stream": True},
            b'data: {"choices":[{"index":0,"delta":{"content":"no such text"}}]}\n\n',
        ),
    ],
)
async def test_what_is_not_streamed_or_not_its_own_is_refused(
    runner: Runner, path: str, body: dict[str, Any], events: bytes
) -> None:
    request = pb.CallOpenAIRequest(path=path, body=json.dumps(body).encode())
    request.resume.events = events
    assert (await refusal_of(runner.CallOpenAI(request))).reason is Reason.UNSUPPORTED


async def refusal_of(call: Any) -> ForebayError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in call:
            pass
    return from_rpc_error(failure.value)
