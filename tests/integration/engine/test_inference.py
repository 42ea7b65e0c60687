"""A simulated runner's answers, over its socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_common import metadata
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_engine.core.simulated import tokenizer

from tests.engine_host import EngineHost, a_spec, running_host

pytestmark = pytest.mark.integration

HELLO = [{"role": "user", "content": "hello"}]
Runner = inference_grpc.InferenceServiceStub


@pytest.fixture
async def runner(host: EngineHost) -> Runner:
    """The runner of the host's version."""
    return await host.runner()


@pytest.fixture
async def slow_host(tmp_path: Path) -> AsyncIterator[EngineHost]:
    """A version that takes time over its tokens but not over its load."""
    spec = a_spec(profile="paced", max_sequences=2)
    async with running_host(tmp_path, [spec], load_interval_ms=10) as host:
        await host.until_active()
        yield host


def call_openai(runner: Runner, path: str, body: dict[str, Any], **options: Any) -> Any:
    request = inference.CallOpenAIRequest(path=path, body=json.dumps(body).encode())
    return runner.CallOpenAI(request, **options)


async def answer_of(runner: Runner, path: str, **body: Any) -> dict[str, Any]:
    (message,) = [message async for message in call_openai(runner, path, {"model": "x", **body})]
    assert message.content_type == "application/json"
    document: dict[str, Any] = json.loads(message.body)
    return document


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Read the events of a stream, or of one message of it: each holds whole events."""
    return [
        json.loads(event.removeprefix("data: "))
        for event in body.decode().split("\n\n")
        if event and event != "data: [DONE]"
    ]


async def refusal_of(call: Any) -> ForebayError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in call:
            pass
    return from_rpc_error(failure.value)


async def test_every_method_and_replica_gives_the_same_text(runner: Runner, tmp_path: Path) -> None:
    document = await answer_of(runner, "/v1/chat/completions", messages=HELLO)
    text = document["choices"][0]["message"]["content"]
    assert document["system_fingerprint"].startswith("simulated")
    request = inference.GenerateRequest(
        messages=inference.ChatMessages(
            messages=[inference.ChatMessage(role="user", content="hello")]
        )
    )
    messages = [message async for message in runner.Generate(request)]
    assert "".join(message.text_delta for message in messages) == text
    assert messages[0].header.system_fingerprint == document["system_fingerprint"]
    assert messages[-1].usage.prompt_tokens == document["usage"]["prompt_tokens"]
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    async with running_host(other_dir, [a_spec(model_version="b@1")]) as other:
        replica = await other.runner(model_version="b@1")
        again = await answer_of(replica, "/v1/chat/completions", messages=HELLO)
    assert again["choices"][0]["message"]["content"] == text


async def test_delivered_text_as_prompt_is_continued(runner: Runner) -> None:
    whole = (await answer_of(runner, "/v1/completions", prompt="the river", max_tokens=30))[
        "choices"
    ][0]["text"]
    cut = whole.index(" ", len(whole) // 2)
    rest = await answer_of(
        runner, "/v1/completions", prompt="the river" + whole[:cut], max_tokens=30
    )
    assert rest["choices"][0]["text"].startswith(whole[cut:])


async def test_stream_is_the_document_in_parts(runner: Runner) -> None:
    body = {"messages": HELLO, "n": 2, "max_tokens": 12, "seed": 3, "ignore_eos": True}
    document = await answer_of(runner, "/v1/chat/completions", **body)
    call = call_openai(
        runner,
        "/v1/chat/completions",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
        metadata=((metadata.REQUEST_ID, "abc-1"),),
    )
    messages = [message async for message in call]
    events = [event for message in messages for event in events_of(message.body)]
    texts = ["", ""]
    for event in events:
        assert event["id"] == "chatcmpl-abc-1"
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in document["choices"]]
    assert texts[0] != texts[1]
    assert events[-1]["usage"]["completion_tokens"] == 24
    tokens = sum(len(choice.token_ids) for message in messages for choice in message.tokens)
    assert tokens == messages[-1].usage.completion_tokens == 24
    trailing = dict(await call.trailing_metadata())
    prompt = document["usage"]["prompt_tokens"]
    assert metadata.Usage.decode(trailing[metadata.USAGE]) == metadata.Usage(
        prompt, 24, messages[-1].usage.cached_tokens
    )


async def test_stop_text_ends_the_answer(runner: Runner) -> None:
    whole = (await answer_of(runner, "/v1/completions", prompt="a", max_tokens=20))["choices"][0]
    stop = whole["text"].split()[3]
    cut = (await answer_of(runner, "/v1/completions", prompt="a", max_tokens=20, stop=stop))[
        "choices"
    ][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


async def test_embeddings_by_both_methods(tmp_path: Path) -> None:
    from forebay.engine.v1 import engine_service_pb2 as pb

    async with running_host(tmp_path, [a_spec(task=pb.TASK_EMBED)]) as host:
        runner = await host.runner()
        answer = await runner.Embed(
            inference.EmbedRequest(inputs=[inference.EmbedInput(text="hello river")])
        )
        document = await answer_of(runner, "/v1/embeddings", input="hello river")
        assert list(answer.embeddings[0].values) == pytest.approx(document["data"][0]["embedding"])
        assert document["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
        refusal = await refusal_of(runner.Generate(inference.GenerateRequest(text="a")))
        assert refusal.reason is Reason.UNSUPPORTED


async def test_refusals_carry_reason_and_field(runner: Runner) -> None:
    path = "/v1/chat/completions"
    cases: list[tuple[Any, Reason, str | None]] = [
        (call_openai(runner, path, {}), Reason.INVALID_ARGUMENT, "messages"),
        (
            call_openai(runner, path, {"messages": HELLO, "n": 99}),
            Reason.INVALID_ARGUMENT,
            "n",
        ),
        (
            call_openai(runner, "/v1/completions", {"prompt": "a " * 40_000}),
            Reason.CONTEXT_LENGTH_EXCEEDED,
            None,
        ),
        (call_openai(runner, "/v1/other", {}), Reason.ROUTE_NOT_FOUND, None),
        (call_openai(runner, "/v1/embeddings", {"input": "a"}), Reason.UNSUPPORTED, None),
        (runner.Generate(inference.GenerateRequest()), Reason.INVALID_ARGUMENT, "prompt"),
        (
            runner.Generate(
                inference.GenerateRequest(
                    text="a", sampling=inference.SamplingOptions(max_tokens=0)
                )
            ),
            Reason.INVALID_ARGUMENT,
            "sampling.max_tokens",
        ),
        (
            runner.Generate(
                inference.GenerateRequest(text="a"), metadata=((metadata.MODEL, "other@1"),)
            ),
            Reason.MODEL_NOT_FOUND,
            "model",
        ),
    ]
    for call, reason, param in cases:
        refusal = await refusal_of(call)
        assert (refusal.reason, refusal.param) == (reason, param)


@pytest.mark.parametrize("how", ["generate", "stream", "document", "deadline"])
async def test_abandoned_call_frees_its_slot_within_a_quarter_second(
    slow_host: EngineHost, how: str
) -> None:
    runner = await slow_host.runner()
    if how == "generate":
        call: Any = runner.Generate(
            inference.GenerateRequest(
                text="a", sampling=inference.SamplingOptions(max_tokens=20_000, ignore_eos=True)
            )
        )
    else:
        body = {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": how == "stream"}
        timeout_s = 0.5 if how == "deadline" else None
        call = call_openai(runner, "/v1/completions", body, timeout=timeout_s)
    await slow_host.until(lambda status: status.load.running == 1)
    if how == "deadline":
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        call.cancel()
    began = time.monotonic()
    status = await slow_host.until(lambda status: status.load.running == 0)
    assert time.monotonic() - began < 0.25
    assert status.load.kv_cache_usage == 0


@pytest.mark.parametrize("how", ["generate", "stream", "document"])
async def test_call_abandoned_in_the_engines_queue_leaves_it_within_a_quarter_second(
    slow_host: EngineHost, how: str
) -> None:
    runner = await slow_host.runner()
    body = {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    running = [call_openai(runner, "/v1/completions", body) for _ in range(2)]
    await slow_host.until(lambda status: status.load.running == 2)
    if how == "generate":
        queued: Any = runner.Generate(inference.GenerateRequest(text="a"))
    else:
        body["stream"] = how == "stream"
        queued = call_openai(runner, "/v1/completions", body)
    await slow_host.until(lambda status: status.load.waiting == 1)
    queued.cancel()
    began = time.monotonic()
    status = await slow_host.until(lambda status: status.load.waiting == 0)
    assert time.monotonic() - began < 0.25
    assert status.load.running == 2
    for call in running:
        call.cancel()


async def test_storm_of_abandoned_calls_disturbs_nobody_and_leaves_nothing(
    slow_host: EngineHost,
) -> None:
    status = await slow_host.until_active()
    descriptors = Path(f"/proc/{status.runner_pid}/fd")
    runner = await slow_host.runner()
    request = inference.GenerateRequest(
        text="a", sampling=inference.SamplingOptions(max_tokens=20_000, ignore_eos=True)
    )
    steady = runner.Generate(request)
    assert await steady.read()
    before = len(list(descriptors.iterdir()))

    for _ in range(10):
        calls = [runner.Generate(request) for _ in range(300)]
        await slow_host.until(lambda s: s.load.running + s.load.waiting == 301)
        for call in calls:
            call.cancel()
        await slow_host.until(lambda s: s.load.running == 1 and s.load.waiting == 0)
    assert (await steady.read()).token_ids
    steady.cancel()
    await slow_host.until(lambda s: s.load.running == 0)
    assert len(list(descriptors.iterdir())) <= before


async def test_message_over_the_limit_is_refused_and_its_connection_lives(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()], message_bytes_max=4096) as host:
        runner = await host.runner()
        refusal = await refusal_of(runner.Generate(inference.GenerateRequest(text="a " * 4096)))
        assert refusal.reason is Reason.BODY_TOO_LARGE
        assert [message async for message in runner.Generate(inference.GenerateRequest(text="a"))]


async def test_requests_over_the_slots_wait_in_the_engine(slow_host: EngineHost) -> None:
    runner = await slow_host.runner()
    calls = [
        call_openai(
            runner, "/v1/completions", {"prompt": f"{n}", "max_tokens": 2000, "ignore_eos": True}
        )
        for n in range(5)
    ]
    status = await slow_host.until(lambda status: status.load.running == 2)
    status = await slow_host.until(lambda status: status.load.waiting == 3)
    assert status.limits.max_sequences == 2
    for call in calls:
        call.cancel()
    await slow_host.until(lambda status: status.load.running + status.load.waiting == 0)


async def test_calls_are_bounded(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec(profile="paced")], requests_max=1) as host:
        runner = await host.runner()
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        first = call_openai(runner, "/v1/completions", body)
        await anext(aiter(first))
        refusal = await refusal_of(call_openai(runner, "/v1/completions", body))
        assert refusal.reason is Reason.QUEUE_FULL
        assert refusal.retry_after_s == 1
        first.cancel()


BEYOND_ASCII = "Sag es mit 水 und 🌊, wie ж es sagt."


async def test_text_beyond_ascii_reaches_the_caller_as_the_engine_said_it(runner: Runner) -> None:
    options = {"prompt": BEYOND_ASCII, "max_tokens": 300, "ignore_eos": True}
    request = inference.GenerateRequest(
        text=BEYOND_ASCII, sampling=inference.SamplingOptions(max_tokens=300, ignore_eos=True)
    )
    deltas = [message async for message in runner.Generate(request)]
    tokens = [token for message in deltas for token in message.token_ids]
    said = tokenizer.decode(tokens)
    assert set(tokenizer.SPLIT_CHARACTERS) <= set(said)
    assert "".join(message.text_delta for message in deltas) == said
    assert "\ufffd" not in "".join(message.text_delta for message in deltas[:-1])
    document = await answer_of(runner, "/v1/completions", **options)
    assert document["choices"][0]["text"] == said
    streamed = [
        message
        async for message in call_openai(runner, "/v1/completions", {**options, "stream": True})
    ]
    texts = [
        choice["text"]
        for message in streamed
        for event in events_of(message.body)
        for choice in event["choices"]
    ]
    assert "".join(texts) == said
    assert tokens == [
        token for message in streamed for choice in message.tokens for token in choice.token_ids
    ]


async def test_under_load_tokens_share_frames_but_the_ends_do_not_wait(tmp_path: Path) -> None:
    options = {"frame_from_streams": 2, "frame_interval_ms": 1000}
    async with running_host(tmp_path, [a_spec(profile="paced")], **options) as host:
        runner = await host.runner()
        sampling = inference.SamplingOptions(max_tokens=30, ignore_eos=True, logprobs=1)
        request = inference.GenerateRequest(text="a", sampling=sampling)

        async def generate() -> list[inference.GenerateResponse]:
            return [message async for message in runner.Generate(request)]

        async def stream() -> list[inference.CallOpenAIResponse]:
            body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True, "n": 2}
            return [m async for m in call_openai(runner, "/v1/completions", body)]

        alone = await generate()
        assert len(alone) > 15
        began = time.monotonic()
        generated, streamed = await asyncio.gather(generate(), stream())
        # 30 steps of 10 ms; the tick that they would wait for comes after a second.
        assert time.monotonic() - began < 0.9
    # Which of the two is the second stream is chance: the first may get a frame or two more.
    assert len(generated) <= 4
    assert len(streamed) <= 4
    assert len(generated) + len(streamed) <= 6
    for name in ("text_delta", "token_ids", "logprobs"):
        assert [part for m in generated for part in getattr(m, name)] == [
            part for m in alone for part in getattr(m, name)
        ]
    counts = {0: 0, 1: 0}
    for message in streamed:
        assert message.body.endswith(b"\n\n")
        assert events_of(message.body)
        for choice in message.tokens:
            counts[choice.index] += len(choice.token_ids)
    assert counts == {0: 30, 1: 30}


async def test_reader_that_lags_gets_the_same_in_fewer_messages(host: EngineHost) -> None:
    status = await host.until_active()
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    async with grpc.aio.insecure_channel(f"unix:{status.socket_path}", options=narrow) as channel:
        sampling = inference.SamplingOptions(max_tokens=2000, ignore_eos=True, logprobs=20)
        call = inference_grpc.InferenceServiceStub(channel).Generate(
            inference.GenerateRequest(text="a", sampling=sampling)
        )
        messages = [await call.read()]
        # The engine goes on without its reader, and its slot is free before the answer is read.
        await host.until(lambda s: s.load.generated_tokens >= 2000 and s.load.running == 0)
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    tokens = [token for message in messages for token in message.token_ids]
    assert len(tokens) == 2000 == messages[-1].usage.completion_tokens
    assert len(messages) < 1000
    assert all(len(message.logprobs) == len(message.token_ids) for message in messages)
    assert "".join(message.text_delta for message in messages) == tokenizer.decode(tokens)


async def test_hundreds_of_calls_at_once_each_get_their_own(runner: Runner) -> None:
    async def ask(number: int) -> tuple[int, str]:
        document = await answer_of(
            runner, "/v1/completions", prompt=f"question {number}", max_tokens=5 + number % 7
        )
        return document["usage"]["completion_tokens"], document["choices"][0]["text"]

    together = await asyncio.gather(*(ask(number) for number in range(200)))
    for number in (0, 57, 199):
        assert await ask(number) == together[number]
