"""The real model goes on with an answer that was cut: the caller has what it would have had."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata
from forebay_common.errors import Reason, from_rpc_error
from forebay_router.core.resume import Unresumable, continue_generate, continue_openai

from tests.conftest import free_port
from tests.engine_host import EngineHost, running_host

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MOST = 1 << 22
CUTS = (1, 3, 11, 21)
TOLD = ((metadata.REQUEST_ID, "seam-1"),)
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"type": "string", "maxLength": 16},
        "people": {"type": "integer"},
    },
    "required": ["city", "country", "people"],
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
STRICT_TOOL = {"type": "function", "function": {**TOOL["function"], "strict": True}}
METRICS: list[str] = []
"""Where the host of all tests here tells its metrics, once it is started."""
Chat = rpc.InferenceServiceStub


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_host(
    tmp_path_factory: pytest.TempPathFactory, chat_artifact: str
) -> AsyncIterator[EngineHost]:
    """A host that has loaded the chat model, and tells how answers were taken up."""
    spec = engine.ModelSpec(
        model_version="smollm2@1",
        backend=engine.BACKEND_VLLM,
        artifact_path=chat_artifact,
        context_tokens=2048,
        max_sequences=64,
    )
    directory: Path = tmp_path_factory.mktemp("chat")
    # Not before: a port that was free at import is somebody's minutes later.
    METRICS[:] = [f"127.0.0.1:{free_port()}"]
    async with running_host(directory, metrics_listen=METRICS[0]) as host:
        events = await host.load(spec)
        assert events[-1].state == engine.MODEL_STATE_ACTIVE, events[-1].reason
        yield host


async def taken_up(mode: str) -> int:
    """How many answers the runner has taken up so, as its host hears of it every 100 ms."""
    await asyncio.sleep(0.3)

    def read() -> str:
        with urllib.request.urlopen(f"http://{METRICS[0]}/metrics", timeout=5) as page:
            return str(page.read().decode())

    wanted = f'forebay_engine_resumed_total{{mode="{mode}",model_version="smollm2@1"}}'
    page = await asyncio.to_thread(read)
    (line,) = (line for line in page.splitlines() if line.startswith(wanted))
    return int(float(line.split()[-1]))


def a_chat(text: str, **options: Any) -> pb.CallOpenAIRequest:
    body = {"model": "x", "messages": [{"role": "user", "content": text}], "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return pb.CallOpenAIRequest(
        path=CHAT_PATH, body=json.dumps({**body, **usage, "max_tokens": 40, **options}).encode()
    )


def a_completion(prompt: object, **options: Any) -> pb.CallOpenAIRequest:
    body = {"model": "x", "prompt": prompt, "stream": True, "max_tokens": 30, **options}
    return pb.CallOpenAIRequest(path=COMPLETION_PATH, body=json.dumps(body).encode())


async def parts_of(call: Any) -> tuple[list[bytes], list[str]]:
    """The messages of an answer, and the prompt's and the answer's tokens."""
    messages = [message.SerializeToString() async for message in call]
    trailing = dict(await call.trailing_metadata())
    return messages, trailing[metadata.USAGE].split(",")[:2]


def called(messages: Sequence[bytes]) -> dict[str, Any]:
    """What an OpenAI client has in the end."""
    parts = [pb.CallOpenAIResponse.FromString(message) for message in messages]
    found: dict[str, Any] = {"heads": set(), "choices": {}, "usages": [], "done": 0, "tokens": {}}
    for part in parts:
        for grown in part.tokens:
            found["tokens"].setdefault(grown.index, []).extend(grown.token_ids)
    for event in b"".join(part.body for part in parts).decode().split("\n\n"):
        if not event:
            continue
        if event == "data: [DONE]":
            found["done"] += 1
            continue
        document = json.loads(event.removeprefix("data: "))
        found["heads"].add((document["id"], document["created"], document["model"]))
        if document.get("usage"):
            usage = document["usage"]
            found["usages"].append((usage["prompt_tokens"], usage["completion_tokens"]))
        for choice in document["choices"]:
            take_in(found["choices"].setdefault(choice["index"], {}), choice)
    return found


def take_in(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    whole["text"] = whole.get("text", "") + (choice.get("text") or delta.get("content") or "")
    for name in ("role", "finish_reason", "stop_reason"):
        if (value := delta.get(name) or choice.get(name)) is not None:
            assert name not in whole, f"{name} came twice"
            whole[name] = value
    logprobs = choice.get("logprobs") or {}
    entries = [entry["token"] for entry in logprobs.get("content") or ()]
    whole["logprobs"] = whole.get("logprobs", []) + (entries or logprobs.get("tokens", []))
    whole["offsets"] = whole.get("offsets", []) + logprobs.get("text_offset", [])
    for item in delta.get("tool_calls") or ():
        tool = whole.setdefault("tools", {}).setdefault(item["index"], {"arguments": ""})
        function = item.get("function") or {}
        for name, value in (("id", item.get("id")), ("name", function.get("name"))):
            if value is not None:
                assert name not in tool, f"{name} came twice"
                tool[name] = value
        tool["arguments"] += function.get("arguments") or ""


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without the ids of its calls, which are drawn."""
    for choice in answer["choices"].values():
        for tool in choice.get("tools", {}).values():
            assert tool.pop("id")
    return answer


def cut_after(messages: Sequence[bytes], tokens: int) -> list[bytes]:
    """The messages up to the one with this token, as long as they are not all."""
    seen = 0
    for count, message in enumerate(messages[:-1], start=1):
        part = pb.CallOpenAIResponse.FromString(message)
        seen += sum(len(choice.token_ids) for choice in part.tokens)
        if seen >= tokens:
            return list(messages[:count])
    return []


async def check(chat: Chat, request: pb.CallOpenAIRequest, cuts: Sequence[int] = CUTS) -> Any:
    """Cut an answer after some tokens each, and compare what is completed with the whole."""
    messages, usage = await parts_of(chat.CallOpenAI(request, metadata=TOLD))
    whole = called(messages)
    assert len(whole["heads"]) == whole["done"] == 1
    wanted = without_names(called(messages))
    checked = 0
    for cut in cuts:
        if not (delivered := cut_after(messages, cut)):
            continue
        made = continue_openai(request.SerializeToString(), delivered, most_bytes=MOST)
        assert not isinstance(made, Unresumable)
        continuation = pb.CallOpenAIRequest.FromString(made)
        call = chat.CallOpenAI(continuation, metadata=TOLD)
        rest, rest_usage = await parts_of(call)
        both = without_names(called([*delivered, *rest]))
        assert both == wanted, f"cut after {cut} tokens"
        assert rest_usage == usage
        checked += 1
    assert checked >= 2, "the answer is too short to be cut"
    return whole


async def test_a_schema_with_a_penalty_goes_on_in_its_grammar(chat: Chat) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    request = a_chat(
        "Describe a city as JSON.",
        temperature=0,
        max_tokens=60,
        response_format=schema,
        presence_penalty=0.7,
    )
    whole = await check(chat, request)
    assert set(json.loads(whole["choices"][0]["text"])) == set(CITY["required"])


async def test_a_stop_text_across_the_seam_ends_the_answer(chat: Chat) -> None:
    plain = a_chat("Tell me about rivers.", temperature=0)
    messages, _ = await parts_of(chat.CallOpenAI(plain))
    text = called(messages)["choices"][0]["text"]
    words = text.split(" ")
    # Two words, so that every cut near them falls into the stop text or just before it.
    stop = " ".join(words[9:11])
    request = a_chat("Tell me about rivers.", temperature=0, stop=[stop])
    whole = await check(chat, request, cuts=range(1, 15))
    assert whole["choices"][0]["text"] == text[: text.index(stop)]
    assert whole["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("mode", pb.ResumeMode.values())
async def test_a_greedy_answer_is_the_same_both_ways(chat: Chat, mode: Any) -> None:
    request = a_chat("Tell me about rivers.", temperature=0)
    request.resume.mode = mode
    plain = a_chat("Tell me about rivers.", temperature=0)
    messages, usage = await parts_of(chat.CallOpenAI(plain, metadata=TOLD))
    whole = called(messages)
    how = "replay" if mode == pb.RESUME_MODE_REPLAY else "prefill"
    before = await taken_up(how)
    for cut in CUTS:
        delivered = cut_after(messages, cut)
        made = continue_openai(request.SerializeToString(), delivered, most_bytes=MOST)
        assert not isinstance(made, Unresumable)
        call = chat.CallOpenAI(pb.CallOpenAIRequest.FromString(made), metadata=TOLD)
        rest, rest_usage = await parts_of(call)
        assert called([*delivered, *rest]) == whole, f"cut after {cut} tokens"
        assert rest_usage == usage
    assert await taken_up(how) == before + len(CUTS)


async def test_a_seeded_answer_goes_on_with_its_draws(chat: Chat) -> None:
    before = await taken_up("replay")
    await check(chat, a_chat("Tell me a story.", temperature=1.0, seed=11))
    assert await taken_up("replay") == before + len(CUTS)


async def test_choices_go_on_each_for_itself(chat: Chat) -> None:
    request = a_completion(
        ["Once upon a time", "The river"], n=2, temperature=1.0, seed=3, max_tokens=12, logprobs=2
    )
    whole = await check(chat, request, cuts=(1, 5, 20, 40))
    assert set(whole["choices"]) == {0, 1, 2, 3}


async def test_penalties_and_least_lengths_are_kept(chat: Chat) -> None:
    request = a_chat(
        "Say hello.",
        temperature=0,
        min_tokens=25,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=True,
        top_logprobs=2,
    )
    await check(chat, request)


async def test_a_half_character_is_completed(chat: Chat) -> None:
    prompt = "🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊👩‍🚀 🎉🌊"
    await check(chat, a_completion(prompt, temperature=0, ignore_eos=True), cuts=range(1, 12))
    sampling = pb.SamplingOptions(temperature=0, ignore_eos=True, max_tokens=24)
    await check_generate(chat, pb.GenerateRequest(text=prompt, sampling=sampling), range(1, 12))


async def test_a_named_tool_is_called_once(chat: Chat) -> None:
    whole = await check(
        chat,
        a_chat(
            "What is the weather in Paris?",
            tools=[STRICT_TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            temperature=0,
            max_tokens=60,
        ),
    )
    (tool,) = whole["choices"][0]["tools"].values()
    assert tool["name"] == "get_weather"
    assert set(json.loads(tool["arguments"])) == {"city"}


async def test_a_tool_that_the_parser_finds_is_called_once(chat: Chat) -> None:
    # This model is too small to choose a tool by itself; a grammar makes it write a call down.
    wanted = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    whole = await check(
        chat,
        a_chat(
            "What is the weather in Paris?",
            tools=[TOOL],
            structured_outputs={"choice": [wanted]},
            temperature=0,
            max_tokens=60,
        ),
        cuts=range(1, 25, 2),
    )
    tools = whole["choices"][0].get("tools", {})
    assert [tool["name"] for tool in tools.values()] == ["get_weather"]
    assert json.loads(tools[0]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0, "presence_penalty": 1.0, "min_tokens": 25, "logprobs": 1},
    ],
)
async def test_generate_goes_on(chat: Chat, options: dict[str, Any]) -> None:
    conversation = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="Tell me about rivers.")]
    )
    sampling = pb.SamplingOptions(max_tokens=30, **options)
    request = pb.GenerateRequest(messages=conversation, sampling=sampling)
    await check_generate(chat, request, CUTS)


async def check_generate(chat: Chat, request: pb.GenerateRequest, cuts: Sequence[int]) -> None:
    messages, usage = await parts_of(chat.Generate(request, metadata=TOLD))
    whole = generated(messages)
    for cut in cuts:
        delivered = messages[:cut]
        made = continue_generate(request.SerializeToString(), delivered, most_bytes=MOST)
        assert not isinstance(made, Unresumable)
        call = chat.Generate(pb.GenerateRequest.FromString(made), metadata=TOLD)
        rest, rest_usage = await parts_of(call)
        assert generated([*delivered, *rest]) == whole, f"cut after {cut} messages"
        assert rest_usage == usage


def generated(messages: Sequence[bytes]) -> tuple[Any, ...]:
    parts = [pb.GenerateResponse.FromString(message) for message in messages]
    return (
        [part.header.request_id for part in parts if part.HasField("header")],
        "".join(part.text_delta for part in parts),
        [token for part in parts for token in part.token_ids],
        sum(len(part.logprobs) for part in parts),
        [part.finish_reason for part in parts if part.finish_reason],
        [part.usage.completion_tokens for part in parts if part.HasField("usage")],
    )


async def test_what_cannot_be_taken_up_is_refused(chat: Chat) -> None:
    several = a_chat("Hi", n=2)
    several.resume.mode = pb.RESUME_MODE_PREFILL
    several.resume.tokens.add(token_ids=[1000])
    unknown = a_chat("Hi")
    unknown.resume.tokens.add(token_ids=[1 << 30])
    another = a_chat("Hi", temperature=0)
    another.resume.tokens.add(token_ids=[1000, 1001])
    another.resume.events = (
        b'data: {"choices":[{"index":0,"delta":{"content":"no such text"}}]}\n\n'
    )
    for request, reason in (
        (several, Reason.UNSUPPORTED),
        (unknown, Reason.INVALID_ARGUMENT),
        (another, Reason.UNSUPPORTED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await parts_of(chat.CallOpenAI(request))
        assert from_rpc_error(failure.value).reason is reason
