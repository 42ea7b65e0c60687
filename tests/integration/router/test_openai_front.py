"""The OpenAI protocol over HTTP, by the official client and by hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from forebay_common import metadata as md
from forebay_common.errors import Reason
from openai.types.chat import ChatCompletionUserMessageParam

from .conftest import (
    CHAT,
    COMPLETIONS,
    WAIT_S,
    RunningRouter,
    Script,
    StandIn,
    StartRouter,
    StartStandIn,
    a_refusal,
)

pytestmark = pytest.mark.integration

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "chat", "messages": HELLO}


@pytest.fixture
async def stand_in(start_stand_in: StartStandIn) -> StandIn:
    return await start_stand_in()


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        router.url, timeout=aiohttp.ClientTimeout(total=WAIT_S)
    ) as session:
        yield session


async def test_chat_is_answered(stand_in: StandIn, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="chat", messages=HELLO)
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_chat_is_streamed_with_usage(stand_in: StandIn, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="chat", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "t0 t1 t2 "
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


async def test_completions_are_answered(stand_in: StandIn, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="default", prompt="hello")
    assert answer.choices[0].text == "t0 t1 t2 "
    stream = await client.completions.create(model="chat@v1", prompt="hello", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["t0 ", "t1 ", "t2 "]


async def test_embeddings_are_answered(stand_in: StandIn, client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="chat", input="hello", encoding_format="float")
    assert answer.data[0].embedding == [1.0, 2.0]


async def test_every_name_is_a_model(router: RunningRouter, client: openai.AsyncOpenAI) -> None:
    await answered_models(client)
    listed = {model.id: model async for model in await client.models.list()}
    assert set(listed) == {"chat", "chat@v1", "chat@v2", "chat@v3", "default"}
    assert {model.owned_by for model in listed.values()} == {"forebay"}
    assert (listed["chat"].created, listed["chat@v1"].created) == (5, 7)
    assert (await client.models.retrieve("chat@v2")).id == "chat@v2"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


async def answered_models(client: openai.AsyncOpenAI) -> None:
    """Wait for the catalogue: any request for a model does."""
    with pytest.raises((openai.InternalServerError, openai.NotFoundError)):
        await client.chat.completions.create(model="nope", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(
    client: openai.AsyncOpenAI, stand_in: StandIn, stream: bool
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nope", messages=HELLO, stream=stream)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert stand_in.seen == []


async def test_a_wrong_type_names_its_field(client: openai.AsyncOpenAI, stand_in: StandIn) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="chat",
            messages=[{"role": 5, "content": "x"}],  # type: ignore[list-item, misc]
        )
    assert caught.value.param == "messages[0].role"
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        (Reason.CONTEXT_LENGTH_EXCEEDED, openai.BadRequestError, "context_length_exceeded"),
        (Reason.UNSUPPORTED, openai.BadRequestError, "unsupported"),
        (Reason.DEADLINE_EXCEEDED, openai.InternalServerError, "deadline_exceeded"),
        (Reason.QUEUE_FULL, openai.InternalServerError, "queue_full"),
        (Reason.MODEL_NOT_LOADED, openai.InternalServerError, "no_replica"),
        (Reason.INTERNAL, openai.InternalServerError, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replicas_refusal_reaches_the_client(
    stand_in: StandIn,
    client: openai.AsyncOpenAI,
    *,
    reason: Reason,
    kind: type[openai.APIStatusError],
    code: str,
    stream: bool,
) -> None:
    stand_in.usual = a_refusal(reason)
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(model="chat", messages=HELLO, stream=stream)
    assert caught.value.code == code
    assert len(stand_in.seen) == 1


async def test_no_replica_says_when_to_come_back(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=BODY) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert (await answer.json())["error"]["code"] == "no_replica"


async def test_the_deadline_ends_the_request_at_the_replica(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    stand_in.usual = Script(tokens=0, hangs=True)
    headers = {"x-request-timeout-s": "0.2"}
    async with http.post(CHAT, json=BODY, headers=headers) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "deadline_exceeded"
    seen = await stand_in.arrival()
    assert seen.remaining_s is not None
    assert seen.remaining_s < 0.25
    async with asyncio.timeout(WAIT_S):
        await seen.ended.wait()


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-request-timeout-s": "soon"}, "x-request-timeout-s"),
        ({"x-request-timeout-s": "0"}, "x-request-timeout-s"),
        ({"x-request-timeout-s": "-1"}, "x-request-timeout-s"),
        ({"x-request-timeout-s": "\u0663"}, "x-request-timeout-s"),
        ({"forebay-class": "URGENT"}, "forebay-class"),
        ({"forebay-session": "s" * 257}, "forebay-session"),
        ({"x-session-id": "\u00fc"}, "forebay-session"),
    ],
)
async def test_a_wrong_header_is_named(
    stand_in: StandIn, http: aiohttp.ClientSession, headers: dict[str, str], param: str
) -> None:
    async with http.post(CHAT, json=BODY, headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, None),
        ("POST", CHAT, b"", 400, None),
        ("POST", CHAT, b'{"model": "\xff"}', 400, None),
        ("POST", CHAT, json.dumps(BODY).encode("utf-16"), 400, None),
        ("POST", CHAT, b'{"model":"chat","messages":[],"stream":"yes"}', 400, None),
        ("POST", CHAT, b" " * (64 * 1024 + 1), 413, "body_too_large"),
        ("POST", "/v1/nothing", b"{}", 404, "unknown_url"),
        ("GET", "/", b"", 404, "unknown_url"),
        ("GET", CHAT, b"", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/chat", b"", 405, "method_not_allowed"),
    ],
)
async def test_every_refusal_has_openais_shape(
    start_router: StartRouter,
    catalogue: None,
    *,
    method: str,
    path: str,
    body: bytes,
    status: int,
    code: str | None,
) -> None:
    router = await start_router(max_body_bytes=64 * 1024)
    async with (
        aiohttp.ClientSession(router.url) as http,
        http.request(method, path, data=body, headers={"x-request-id": "mine"}) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == status
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["content-type"] == "application/json"
        assert ("Allow" in answer.headers) == (status == 405)


async def test_a_body_sent_in_chunks_is_bounded_too(
    start_router: StartRouter, catalogue: None
) -> None:
    router = await start_router(max_body_bytes=4096)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1024

    async with (
        aiohttp.ClientSession(router.url) as http,
        http.post(CHAT, data=endless()) as answer,
    ):
        assert answer.status == 413


async def exchange(router: RunningRouter, sent: bytes) -> tuple[bytes, bytes]:
    """Send bytes and read head and body until the server closes."""
    host, _, port = router.instance.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            received = await reader.read()
    finally:
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_openais_shape_and_a_closed_connection(
    router: RunningRouter, sent: bytes
) -> None:
    head, body = await exchange(router, sent)
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n", "the 32768 bytes allowed."),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000 + b"\r\n",
            "the 32768 bytes allowed.",
        ),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-N: 1\r\n" * 200, "more than 100 headers."),
    ],
)
async def test_a_head_over_its_limits_is_told_which(
    router: RunningRouter, sent: bytes, message: str
) -> None:
    head, body = await exchange(router, sent + b"Connection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert error["message"].endswith(message)


async def test_a_body_that_is_not_compressed_as_it_says_is_the_clients_mistake(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    head, body = await exchange(
        router,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
        b"Connection: close\r\nContent-Length: 20\r\n\r\nno gzip at all, this",
    )
    assert head.startswith(b"HTTP/1.1 400")
    assert "as its headers say" in json.loads(body)["error"]["message"]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_broken_chunk_is_refused(router: RunningRouter) -> None:
    head, body = await exchange(
        router,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    )
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_body_is_asked_for_when_the_client_waits(
    stand_in: StandIn, router: RunningRouter
) -> None:
    body = json.dumps(BODY).encode()
    host, _, port = router.instance.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    finally:
        writer.close()


async def test_a_body_that_never_comes_is_given_up(
    start_router: StartRouter, catalogue: None
) -> None:
    router = await start_router(body_read_timeout_s=0.1)
    head, body = await exchange(
        router,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: 10\r\n\r\n{",
    )
    assert head.startswith(b"HTTP/1.1 400")
    assert "in time" in json.loads(body)["error"]["message"]


async def test_the_body_and_the_callers_metadata_reach_the_replica_unchanged(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    body = json.dumps({**BODY, "model": "default", "extra": [1, {"a": "\u00e9"}]}, indent=3)
    headers = {
        "x-request-id": "my-request",
        "forebay-class": "BATCH",
        "x-session-id": "my session",
        "forebay-tenant": "me",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with http.post(CHAT, data=body, headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "my-request"
    seen = await stand_in.arrival()
    assert seen.request.body == body.encode()
    assert seen.request.path == CHAT
    assert seen.metadata[md.REQUEST_ID] == "my-request"
    assert seen.metadata[md.MODEL] == "chat@v1"
    assert seen.metadata[md.CLASS] == "BATCH"
    assert seen.metadata[md.SESSION] == "my session"
    assert seen.metadata[md.TENANT] == "me"
    assert seen.metadata[md.ATTEMPT] == "1"
    assert seen.metadata[md.TRACEPARENT].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert int(seen.metadata[md.PROMPT_TOKENS]) == 2
    assert seen.remaining_s is not None


async def test_a_request_without_an_id_is_given_one(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    async with http.post(CHAT, json=BODY, headers={"x-request-id": "no spaces"}) as answer:
        given = answer.headers["x-request-id"]
    assert given.startswith("req-")
    assert (await stand_in.arrival()).metadata[md.REQUEST_ID] == given


async def test_a_failure_after_the_first_bytes_is_one_last_event(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    stand_in.usual = a_refusal(Reason.REPLICA_LOST, tokens=2)
    async with http.post(CHAT, json={**BODY, "stream": True}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        # Reading to the end proves that the last chunk closed the body.
        events = (await answer.read()).decode().strip().split("\n\n")
    payloads = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [("error" in payload) for payload in payloads] == [False, False, True]
    # What goes on with it dies at once, twice.
    assert payloads[-1]["error"]["code"] == "quarantined"


async def test_the_official_client_raises_on_that_event(
    stand_in: StandIn, client: openai.AsyncOpenAI
) -> None:
    stand_in.usual = a_refusal(Reason.INTERNAL, tokens=2)
    stream = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    texts: list[str | None] = []
    with pytest.raises(openai.APIError):
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)  # noqa: PERF401  # kept when it raises
    assert texts == ["t0 ", "t1 "]


async def test_a_replica_that_dies_mid_stream_ends_it_with_one_event(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    stand_in.usual = Script(tokens=2, dies=True)
    async with http.post(CHAT, json={**BODY, "stream": True}) as answer:
        text = (await answer.read()).decode()
    assert text.count('"error"') == 1
    assert text.endswith("\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_replica(
    stand_in: StandIn, router: RunningRouter, stream: bool
) -> None:
    stand_in.usual = Script(tokens=1 if stream else 0, hangs=True)
    async with aiohttp.ClientSession(router.url) as http:
        request = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": stream}))
        seen = await stand_in.arrival()
        if stream:
            answer = await request
            await answer.content.readany()
            left_at = time.monotonic()
            answer.close()
        else:
            left_at = time.monotonic()
            request.cancel()
        async with asyncio.timeout(WAIT_S):
            await seen.ended.wait()
    assert seen.cancelled_at is not None
    assert seen.cancelled_at - left_at < 0.25


async def test_a_client_that_does_not_read_is_cut(
    start_router: StartRouter, catalogue: None, stand_in: StandIn
) -> None:
    router = await start_router(slow_reader_s=0.2)
    stand_in.usual = Script(tokens=1_000_000, text="x" * 100_000)
    host, _, port = router.instance.addresses["http"].rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    seen = await stand_in.arrival()
    async with asyncio.timeout(WAIT_S):
        await seen.ended.wait()
    writer.transport.abort()


async def test_connections_are_kept(stand_in: StandIn, router: RunningRouter) -> None:
    connections = 0

    async def count(*_: Any) -> None:
        nonlocal connections
        connections += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    async with aiohttp.ClientSession(router.url, trace_configs=[trace]) as http:
        for path, body in ((CHAT, BODY), (CHAT, {}), ("/nothing", {}), (COMPLETIONS, BODY)):
            async with http.post(path, json=body) as answer:
                await answer.read()
    assert connections == 1


async def test_alive_is_not_ready(
    router: RunningRouter, http: aiohttp.ClientSession, start_stand_in: StartStandIn
) -> None:
    async with http.get("/health/live") as answer:
        assert answer.status == 200
    async with http.get("/health/ready") as answer:
        assert answer.status == 503
        assert "no_replica" in (await answer.json())["reasons"]
    await start_stand_in()
    await router.until_serving()
    async with http.get("/health/ready") as answer:
        assert answer.status == 200


async def test_metrics_count_what_happened(stand_in: StandIn, http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=BODY) as answer:
        assert answer.status == 200
    async with http.post(CHAT, json={**BODY, "model": "made up"}) as answer:
        assert answer.status == 404
    async with http.get("/metrics") as answer:
        text = await answer.text()
    succeeded = 'method="CallOpenAI",model="chat@v1",outcome="succeeded",reason=""'
    assert f"forebay_router_requests_total{{{succeeded}}} 1.0" in text
    failed = 'method="CallOpenAI",model="unknown",outcome="failed",reason="MODEL_NOT_FOUND"'
    assert f"forebay_router_requests_total{{{failed}}} 1.0" in text
    assert 'forebay_router_tokens_total{kind="completion",model="chat@v1"} 3.0' in text
    assert "forebay_router_in_flight 0.0" in text
    assert 'forebay_router_replicas{placeable="yes"} 1.0' in text
    assert "made up" not in text


async def test_web_pages_of_configured_origins_may_call_and_no_others(
    start_router: StartRouter, start_stand_in: StartStandIn, catalogue: None
) -> None:
    await start_stand_in()
    page = "https://chat.example.com"
    router = await start_router(cors_origins=f"{page}, https://other.example")
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    asks = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with aiohttp.ClientSession() as http:
        async with http.options(router.url + CHAT, headers=asks) as answer:
            assert answer.status == 200
            assert await answer.read() == b""
            assert answer.headers["Access-Control-Allow-Origin"] == page
            assert answer.headers["Access-Control-Allow-Methods"] == "POST"
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for streams in (False, True):
            asked = {**body, "stream": streams}
            async with http.post(router.url + CHAT, json=asked, headers={"Origin": page}) as answer:
                assert answer.status == 200
                assert answer.headers["Access-Control-Allow-Origin"] == page
                assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
                await answer.read()
        # Errors too: a page must be able to say what is wrong.
        async with http.post(router.url + CHAT, json={}, headers={"Origin": page}) as answer:
            assert answer.status == 400
            assert answer.headers["Access-Control-Allow-Origin"] == page
        evil = {**asks, "Origin": "https://evil.example"}
        async with http.options(router.url + CHAT, headers=evil) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers
        async with http.options(router.url + "/nowhere", headers=asks) as answer:
            assert answer.status == 404


async def test_no_web_page_may_call_by_default(router: RunningRouter) -> None:
    asks = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession() as http:
        async with http.options(router.url + CHAT, headers=asks) as answer:
            assert answer.status == 405
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
        async with http.get(router.url + "/health/live", headers=asks) as answer:
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
