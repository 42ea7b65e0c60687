"""The HTTP front on real sockets: what it takes, what it refuses, and that nothing ever hangs."""

import asyncio
import contextlib
import email.utils
import gzip
import json
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from forebay_common.errors import Reason
from forebay_wire.tls import HTTP1, server_context

from tests.http_tools import ANSWER_BYTES, BOUND_S, SSE, Client, Site, event, part
from tests.wire_tools import Certificates

pytestmark = pytest.mark.integration
_SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
_KEEP = 64 << 10

StartSite = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[StartSite]:
    async with contextlib.AsyncExitStack() as closing:

        async def start(*, tls: ssl.SSLContext | None = None, **limits: Any) -> Site:
            return await closing.enter_async_context(Site(**limits).open(tls=tls))

        yield start


@pytest.fixture
async def site(start: StartSite) -> Site:
    site: Site = await start()
    return site


@pytest.fixture
async def client(site: Site) -> AsyncIterator[Client]:
    async with await site.connect() as client:
        yield client


# --- Answers -------------------------------------------------------------------------------------


async def test_an_answer_has_what_a_client_needs(client: Client) -> None:
    client.ask("/echo", b"hello", b"X-Request-Id: mine")
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers["content-type"] == "text/plain"
    assert answer.headers["server"] == "forebay"
    assert answer.headers["x-request-id"] == "mine"
    assert "connection" not in answer.headers
    date = email.utils.parsedate_to_datetime(answer.headers["date"])
    assert abs(date.timestamp() - time.time()) < 5


async def test_a_connection_serves_one_request_after_another(site: Site, client: Client) -> None:
    for number in range(5):
        client.ask("/echo", b"%d" % number)
        assert (await client.answer()).body == b"%d" % number
    assert len(site.server.connections) == 1


async def test_requests_sent_at_once_are_answered_in_order(site: Site, client: Client) -> None:
    client.ask("/echo", b"first")
    client.ask("/later", b"second")
    client.ask("/infer", b"third")
    client.ask("/nowhere", b"fourth")
    client.ask("/echo", b"fifth")
    assert (await client.answer()).body == b"first"
    await site.waiting.wait()
    assert site.relay.calls == []
    site.go_on.set()
    assert json.loads((await client.answer()).body) == {"body": "second"}
    call = await site.relay.arrival()
    call.send(part(event("one"), SSE))
    call.finish()
    assert (await client.answer()).body == event("one")
    assert (await client.answer()).status == 404
    assert (await client.answer()).body == b"fifth"


async def test_a_flood_of_requests_behind_one_in_work_is_not_kept(
    site: Site, client: Client
) -> None:
    """The kernel holds it back; in here is a bounded part of it."""
    client.ask("/later")
    await site.waiting.wait()
    count = 20_000
    request = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    sending = asyncio.ensure_future(send_all(client, request * count))
    [connection] = site.server.connections
    async with asyncio.timeout(BOUND_S):
        while not connection._is_reading_paused:
            await asyncio.sleep(0)
    assert len(connection._ahead) < _KEEP + (512 << 10)
    site.go_on.set()
    await client.answer()
    for _ in range(count):
        assert (await client.answer()).body == b"abc"
    await sending


async def send_all(client: Client, data: bytes) -> None:
    client.send(data)
    await client.writer.drain()


async def test_head_is_answered_like_get_without_the_body(client: Client) -> None:
    client.send(b"HEAD /large HTTP/1.1\r\nHost: x\r\n\r\nGET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await client.answer(of_head=True)
    assert (answer.status, answer.headers["content-length"]) == (200, str(4 << 20))
    assert (await client.answer()).status == 200


async def test_http_1_0_is_spoken(site: Site) -> None:
    async with await site.connect() as client:
        client.send(b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"a", "keep-alive")
        client.send(b"POST /echo HTTP/1.0\r\nContent-Length: 1\r\n\r\nb")
        answer = await client.answer()
        assert answer.body == b"b"
        assert answer.closes
        assert await client.rest() == b""


async def test_a_stream_over_http_1_0_ends_with_its_connection(site: Site) -> None:
    async with await site.connect() as client:
        client.send(b"POST /infer HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na")
        call = await site.relay.arrival()
        call.send(part(event("one"), SSE))
        call.send(part(event("two")))
        call.finish()
        answer = await client.head()
        assert answer.closes
        assert "transfer-encoding" not in answer.headers
        assert await client.rest() == event("one") + event("two")


async def test_a_large_answer_arrives_whole(client: Client) -> None:
    client.send(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert len((await client.answer()).body) == 4 << 20


async def test_a_body_may_come_in_chunks_with_extensions_and_trailers(client: Client) -> None:
    client.send(
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: y\r\n\r\n"
    )
    assert (await client.answer()).body == b"abcde"
    client.ask("/echo", b"next")
    assert (await client.answer()).body == b"next"


async def test_a_request_may_come_octet_by_octet(client: Client) -> None:
    request = (
        b"POST /echo?x=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n"
    )
    for octet in request:
        client.send(bytes((octet,)))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert (await client.answer()).body == b"abc"


async def test_a_compressed_body_is_expanded(client: Client) -> None:
    client.ask("/echo", gzip.compress(b"hello" * 100), b"Content-Encoding: gzip")
    assert (await client.answer()).body == b"hello" * 100


async def test_an_error_of_our_own_tells_nothing(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.ask("/broken")
    answer = await client.answer()
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert json.loads(answer.body)["error"]["code"] == "internal_error"
    assert "secret" in caplog.text
    client.ask("/echo")
    assert (await client.answer()).status == 200


async def test_what_is_served_otherwise_is_listed(client: Client) -> None:
    client.send(b"DELETE /echo HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")


# --- The body and its limits ---------------------------------------------------------------------


async def test_a_body_is_asked_for_once(client: Client) -> None:
    client.send(
        b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    )
    assert (await client.answer()).status == 100
    client.send(b"hel")
    client.send(b"lo")
    assert (await client.answer()).body == b"hello"


async def test_a_body_that_is_refused_is_not_asked_for(site: Site) -> None:
    for target, length, status in ((b"/nowhere", 5, 404), (b"/echo", 1 << 30, 413)):
        async with await site.connect() as client:
            client.send(
                b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                b"Content-Length: %d\r\n\r\n" % (target, length)
            )
            answer = await client.answer()
            assert answer.status == status
            # Whether the body comes now is the client's choice; only a close ends the question.
            assert answer.closes
            assert await client.rest() == b""


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_a_little_too_large_is_refused_and_its_connection_lives(
    start: StartSite, chunked: bool
) -> None:
    site = await start(body_bytes=100_000)
    body = b"x" * 150_000
    async with await site.connect() as client:
        if chunked:
            client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        else:
            client.ask("/echo", body)
        answer = await client.answer()
        assert answer.status == 413
        assert json.loads(answer.body)["error"]["code"] == "body_too_large"
        assert not answer.closes
        client.ask("/echo", b"x" * 100_000)
        assert len((await client.answer()).body) == 100_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_far_too_large_is_refused_so_that_the_client_sees_it(
    start: StartSite, chunked: bool
) -> None:
    site = await start(body_bytes=100_000)
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 750000"
    async with await site.connect() as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % framing)
        if chunked:
            client.send(b"b71b0\r\n")
        # Most clients send all of a body before they read anything.
        for _ in range(15):
            client.send(b"x" * 50_000)
            await client.writer.drain()
        assert (await client.answer()).status == 413
        assert await client.rest() == b""


async def test_a_body_that_is_all_framing_is_refused(site: Site, client: Client) -> None:
    client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        await send_all(client, b"1\r\nx\r\n" * 60_000)
    answer = await client.answer()
    assert (answer.status, answer.closes) == (400, True)


async def test_a_small_body_that_grows_without_end_is_refused(start: StartSite) -> None:
    site = await start(body_bytes=1 << 20)
    async with await site.connect() as client:
        client.ask("/echo", gzip.compress(bytes(64 << 20)), b"Content-Encoding: gzip")
        assert (await client.answer()).status == 413
        client.ask("/echo", b"x")
        assert (await client.answer()).status == 200


async def test_all_bodies_together_are_bounded(start: StartSite) -> None:
    site = await start(request_bytes=300_000)
    clients = [await site.connect() for _ in range(4)]
    for client in clients[:3]:
        client.ask("/infer", b"x" * 100_000)
    call = await site.relay.arrival(3)
    clients[3].ask("/infer", b"x" * 100_000)
    answer = await clients[3].answer()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    call.fail(Reason.NO_REPLICA)
    clients[3].ask("/infer", b"x" * 100_000)
    (await site.relay.arrival(4)).fail(Reason.NO_REPLICA)
    await clients[3].answer()
    clients[3].send(a_post(b"Content-Length: 1000", body=b"half"))
    for client in clients:
        client.writer.transport.abort()
    async with asyncio.timeout(BOUND_S):
        while site.server.connections:
            await asyncio.sleep(0)
    assert site.server.kept_bytes == 0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\n" + b"A: %b\r\n" % (b"a" * 500) * 70 + b"\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n"
        + b"A: b\r\n" * 101
        + b"\r\n"
        + b"b" * 50_000,
    ],
)
async def test_a_head_over_its_limits_is_refused_and_its_connection_lives(
    client: Client, head: bytes
) -> None:
    client.send(head)
    answer = await client.answer()
    assert (answer.status, answer.closes) == (431, False)
    assert json.loads(answer.body)["error"]["code"] == "headers_too_large"
    client.ask("/echo", b"x")
    assert (await client.answer()).status == 200


async def test_a_head_at_its_limits_is_taken(client: Client) -> None:
    client.send(b"GET /echo HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 99 + b"\r\n")
    assert (await client.answer()).status == 200
    client.send(b"GET /echo HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n" % (b"a" * 32_000))
    assert (await client.answer()).status == 200


@pytest.mark.parametrize("endless", [b"GET /", b"GET /echo HTTP/1.1\r\nHost: x\r\nA: "])
async def test_a_head_without_end_is_refused_and_closed(client: Client, endless: bytes) -> None:
    client.send(endless)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            await send_all(client, b"a" * 10_000)
    answer = await client.answer()
    assert (answer.status, answer.closes) == (431, True)


# --- What is no HTTP, or could be read in two ways -----------------------------------------------

_BEHIND = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
_CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def a_post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = b"".join(field + b"\r\n" for field in fields)
    return b"POST /echo HTTP/%b\r\nHost: x\r\n%b\r\n%b" % (version, lines, body)


_DISPUTED = [
    b"hello\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /echo\r\n\r\n",
    b"GET /echo HTTP/0.9\r\n\r\n",
    b"GET /echo HTTP/1.2\r\nHost: x\r\n\r\n",
    b"GET /echo HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"get /echo HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET\t/echo HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /echo HTTP/1.1\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /echo HTTP/1.1\nHost: x\n\n",
    b"GET /echo HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    b"GET /echo HTTP/1.1\r\n A: b\r\nHost: x\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    a_post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"),
    a_post(b"Content-Length: 5", b"Content-Length: 5", body=b"abcde"),
    a_post(b"Content-Length: 5", b"Content-Length: 6", body=b"abcde"),
    a_post(b"Content-Length: 5, 5", body=b"abcde"),
    a_post(b"Content-Length: +5", body=b"abcde"),
    a_post(b"Content-Length: 0x5", body=b"abcde"),
    a_post(b"Content-Length: -1"),
    a_post(b"Content-Length:"),
    a_post(b"Content-Length: 99999999999999999999999"),
    a_post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    a_post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", version=b"1.0"),
    _CHUNKED + b"1\nx\n0\n\n",
    _CHUNKED + b"1\r\nx\n0\r\n\r\n",
    _CHUNKED + b"1\r\nxy0\r\n\r\n",
    _CHUNKED + b"1 \r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"-1\r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"fffffffffffffffff\r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"zz\r\n",
    _CHUNKED + b"1\r\nx\r\n0\r\nContent-Length: 5\r\n\r\n",
]


@pytest.mark.parametrize("sent", _DISPUTED)
async def test_what_could_be_read_in_two_ways_is_refused_and_ends_its_connection(
    client: Client, sent: bytes
) -> None:
    client.send(sent + _BEHIND)
    answer = await client.answer()
    assert (answer.status, answer.closes) == (400, True)
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    assert await client.rest() == b""


async def test_what_stands_before_the_disputed_is_answered(client: Client) -> None:
    client.ask("/echo", b"first")
    client.send(b"garbage\r\n\r\n")
    assert (await client.answer()).body == b"first"
    assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_garbage_behind_a_request_in_work_waits_for_its_answer(
    site: Site, client: Client
) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    client.send(b"garbage\r\n\r\n")
    call.send(part(event("one"), SSE))
    call.finish()
    assert (await client.answer()).body == event("one")
    assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_nothing_behind_a_last_request_is_read(client: Client) -> None:
    client.ask("/echo", b"last", b"Connection: close")
    client.ask("/echo", b"more")
    answer = await client.answer()
    assert (answer.body, answer.closes) == (b"last", True)
    assert await client.rest() == b""


async def test_empty_lines_before_a_request_are_harmless(client: Client) -> None:
    client.send(b"\r\n\r\n")
    client.ask("/echo", b"x")
    client.send(b"\r\n")
    client.ask("/echo", b"y")
    assert [(await client.answer()).body for _ in range(2)] == [b"x", b"y"]


@pytest.mark.parametrize("framing", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
async def test_an_offer_to_speak_http_2_is_ignored_and_its_body_is_read(
    site: Site, framing: bytes
) -> None:
    """Java's client offers it with every request in the clear."""
    body = b"5\r\nhello\r\n0\r\n\r\n" if b"chunked" in framing else b"hello"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    request = b"POST /echo HTTP/1.1\r\nHost: x\r\n%b%b\r\n\r\n%b" % (offer, framing, body)
    for split in (len(request), request.index(b"\r\n\r\n") + 4, len(request) - 3, 40):
        async with await site.connect() as client:
            for _ in range(2):
                client.send(request[:split])
                await client.writer.drain()
                await asyncio.sleep(0)
                client.send(request[split:])
                assert (await client.answer()).body == b"hello"
            client.send(b"GET /echo HTTP/1.1\r\nHost: x\r\n%b\r\n" % offer + _BEHIND)
            assert [(await client.answer()).status for _ in range(2)] == [200, 200]


async def test_no_tunnel_is_made(client: Client) -> None:
    client.send(b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\nwhatever")
    answer = await client.answer()
    assert (answer.status, answer.closes) == (404, True)
    assert await client.rest() == b""


# --- Inference -----------------------------------------------------------------------------------


async def test_a_stream_begins_with_its_first_event(site: Site, client: Client) -> None:
    client.ask("/infer", b"question", b"X-Request-Id: mine")
    call = await site.relay.arrival()
    assert (call.request.path, call.request.body) == ("/infer", b"question")
    assert call.head.request_id == "mine"
    call.caller.begin(call)
    call.send(part(event("one"), SSE))
    answer = await client.head()
    assert answer.status == 200
    assert answer.headers["content-type"] == SSE
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine"
    assert await client.chunk() == event("one")
    call.send(part(event("two")), part(b""), part(event("three")), part(event("four"), tokens=0))
    assert await client.chunk() == event("two") + event("three") + event("four")
    call.send(part(b""))
    call.send(part(event("x" * 100_000)))
    assert len(await client.chunk()) == 100_008
    call.finish()
    assert await client.chunk() == b""
    client.ask("/echo", b"next")
    assert (await client.answer()).body == b"next"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
async def test_messages_may_be_cut_anywhere(site: Site, client: Client, step: int) -> None:
    texts = ["one", "\u6c34\u95f8", "x" * 200, "\U0001f30a"]
    parts = [part(event(text), "" if n else SSE) for n, text in enumerate(texts)]
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    data = b"".join(parts)
    for start in range(0, len(data), step):
        call.send(data[start : start + step])
    call.finish()
    assert (await client.answer()).body == b"".join(map(event, texts))


async def test_an_answer_that_is_not_streamed_is_one_answer(site: Site, client: Client) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    call.send(part(b'{"a":', "application/json"))
    call.send(part(b"1}"))
    call.finish()
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, b'{"a":1}')
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == "7"


@pytest.mark.parametrize("first", [b"", part(b"{", "application/json")])
async def test_a_failure_before_anything_was_sent_has_its_status(
    site: Site, client: Client, first: bytes
) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    if first:
        call.send(first)
    call.fail(Reason.QUEUE_FULL)
    answer = await client.answer()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.body)["error"]["code"] == "queue_full"
    client.ask("/echo", b"next")
    assert (await client.answer()).body == b"next"


async def test_a_failure_in_a_stream_is_its_last_event(site: Site, client: Client) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    call.send(part(event("one"), SSE))
    call.fail(Reason.REPLICA_LOST)
    first, last = (await client.answer()).body.decode().strip().split("\n\n")
    assert first == "data: one"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    client.ask("/echo", b"next")
    assert (await client.answer()).body == b"next"


@pytest.mark.parametrize(
    ("sent", "is_cancelled"),
    [
        ([], False),
        ([part(b"{", "application/json")[:-1]], False),
        ([b"\x01" + part(b"{", "application/json")[1:]], True),
        ([b"\x07" + part(b"{", "application/json")[1:]], True),
        ([b"\0\0\0\0\x02\xff\xff"], True),
        ([part(b"x" * (ANSWER_BYTES - 50), "application/json"), part(b"x" * 51)], True),
        ([b"\0" + (ANSWER_BYTES + 1).to_bytes(4, "big")], True),
    ],
)
async def test_an_answer_that_cannot_be_passed_on_is_our_error(
    site: Site, client: Client, sent: list[bytes], is_cancelled: bool
) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    for data in sent:
        call.send(data)
    if not is_cancelled:
        call.finish()
    assert call.cancelled.is_set() is is_cancelled
    answer = await client.answer()
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == "internal_error"


async def test_a_stream_that_breaks_off_is_told_so(site: Site, client: Client) -> None:
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    call.send(part(event("one"), SSE))
    call.send(part(event("two"))[:-1])
    call.finish()
    assert b'"internal_error"' in (await client.answer()).body


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_its_call(site: Site, begun: bool) -> None:
    client = await site.connect()
    client.ask("/infer", b"x")
    call = await site.relay.arrival()
    if begun:
        call.send(part(event("one"), SSE))
        await client.head()
    client.writer.transport.abort()
    async with asyncio.timeout(BOUND_S):
        await call.cancelled.wait()
    assert site.server.in_flight == 0


async def test_a_client_that_leaves_cancels_what_runs_for_it(site: Site) -> None:
    client = await site.connect()
    client.ask("/later", b"x")
    await site.waiting.wait()
    client.writer.transport.abort()
    async with asyncio.timeout(BOUND_S):
        while not site.ended:
            await asyncio.sleep(0)
    assert site.ended == ["cancelled"]


async def fill(client: Client, site: Site) -> bytes:
    """Stream to a client that does not read, until its call is held; answers what was sent."""
    call = await site.relay.arrival()
    call.send(part(event("one"), SSE))
    sent, block = event("one"), event("x" * 8_000)
    async with asyncio.timeout(BOUND_S):
        while not call.is_held:
            call.send(part(block))
            sent += block
            await asyncio.sleep(0)
    return sent


async def test_a_reader_that_is_slow_holds_its_call_and_loses_nothing(site: Site) -> None:
    client = await site.connect_slowly()
    client.ask("/infer", b"x")
    sent = await fill(client, site)
    [call] = site.relay.calls
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    receiving = asyncio.ensure_future(client.answer())
    for number in range(200):
        async with asyncio.timeout(BOUND_S):
            await call.may_send.wait()
        block = event(f"{number} " * 4_000)
        call.send(part(block))
        sent += block
        await asyncio.sleep(0)
    call.finish()
    assert (await receiving).body == sent
    assert call.holds > 1
    client.writer.close()


async def test_a_reader_that_stands_still_is_cut(start: StartSite) -> None:
    site = await start(slow_reader_s=0.2)
    client = await site.connect_slowly()
    client.ask("/infer", b"x")
    await fill(client, site)
    async with asyncio.timeout(BOUND_S):
        await site.relay.calls[0].cancelled.wait()
        while site.server.connections:
            await asyncio.sleep(0.01)
    client.writer.transport.abort()


async def test_a_reader_that_stands_still_in_an_answer_that_has_ended_is_cut(
    start: StartSite,
) -> None:
    site = await start(slow_reader_s=0.2)
    for closing in (b"", b"Connection: close\r\n"):
        client = await site.connect_slowly()
        client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n%b\r\n" % closing)
        async with asyncio.timeout(BOUND_S):
            while not site.server.connections:
                await asyncio.sleep(0)
            while site.server.connections:
                await asyncio.sleep(0.01)
        client.writer.transport.abort()


# --- Time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: x\r\n", "request"),
        (b"P", "request"),
        (a_post(b"Content-Length: 10", body=b"abc"), "body"),
        (_CHUNKED + b"3\r\nabc\r\n", "body"),
        (a_post(b"Content-Length: 10", b"Expect: 100-continue"), "body"),
    ],
)
async def test_what_does_not_arrive_is_given_up(start: StartSite, sent: bytes, what: str) -> None:
    site = await start(body_read_s=0.1)
    async with await site.connect() as client:
        client.send(sent)
        answer = await client.answer()
        if answer.status == 100:
            answer = await client.answer()
        assert (answer.status, answer.closes) == (400, True)
        assert f"The {what} did not arrive in time." in answer.body.decode()
        assert await client.rest() == b""


async def test_each_request_has_the_whole_time(start: StartSite) -> None:
    site = await start(body_read_s=0.4)
    async with await site.connect() as client:
        client.send(b"POST /echo HTTP/1.1\r\n")
        for _ in range(4):
            await asyncio.sleep(0.15)
            client.send(b"Host: x\r\nContent-Length: 0\r\n\r\nPOST /echo HTTP/1.1\r\n")
            assert (await client.answer()).status == 200


async def test_an_idle_connection_is_closed(start: StartSite) -> None:
    site = await start(idle_s=0.1)
    async with await site.connect() as silent, await site.connect() as used:
        used.ask("/echo", b"x")
        assert (await used.answer()).status == 200
        assert await used.rest() == b""
        assert await silent.rest() == b""


async def test_a_request_in_work_is_not_idle(start: StartSite) -> None:
    site = await start(idle_s=0.05, body_read_s=0.05)
    async with await site.connect() as client:
        client.ask("/infer", b"x")
        call = await site.relay.arrival()
        await asyncio.sleep(0.3)
        call.send(part(event("one"), SSE))
        await asyncio.sleep(0.3)
        call.finish()
        assert (await client.answer()).body == event("one")


# --- Connections and drain -----------------------------------------------------------------------


async def test_one_connection_too_many_is_told_so(start: StartSite) -> None:
    site = await start(connections=2)
    async with await site.connect() as one, await site.connect() as two:
        for client in (one, two):
            client.ask("/echo", b"x")
            assert (await client.answer()).status == 200
        async with await site.connect() as three:
            answer = await three.answer()
            assert (answer.status, answer.closes) == (503, True)
            assert json.loads(answer.body)["error"]["code"] == "queue_full"
            assert await three.rest() == b""
        two.writer.close()
        async with asyncio.timeout(BOUND_S):
            while len(site.server.connections) > 1:
                await asyncio.sleep(0)
        async with await site.connect() as four:
            four.ask("/echo", b"x")
            assert (await four.answer()).status == 200


async def test_a_drain_lets_work_end_and_refuses_the_rest(start: StartSite) -> None:
    site = await start()
    async with (
        await site.connect() as idle,
        await site.connect() as busy,
        await site.connect() as waiting,
    ):
        for client in (busy, waiting):
            client.ask("/infer", b"x")
        streaming, whole = await site.relay.arrival(1), await site.relay.arrival(2)
        streaming.send(part(event("one"), SSE))
        idle.ask("/echo", b"x")
        await idle.answer()
        draining = asyncio.ensure_future(site.server.drain(BOUND_S))
        assert await idle.rest() == b""
        async with await site.connect() as late:
            late.ask("/infer", b"x")
            answer = await late.answer()
            assert (answer.status, answer.closes) == (503, True)
            assert json.loads(answer.body)["error"]["code"] == "draining"
        async with await site.connect() as probe:
            probe.ask("/echo", b"alive")
            answer = await probe.answer()
            assert (answer.body, answer.closes) == (b"alive", True)
        streaming.send(part(event("two")))
        streaming.finish()
        whole.send(part(b"{}", "application/json"))
        whole.finish()
        assert (await busy.answer()).body == event("one") + event("two")
        assert await busy.rest() == b""
        answer = await waiting.answer()
        assert (answer.body, answer.closes) == (b"{}", True)
        async with asyncio.timeout(BOUND_S):
            await draining
    assert not site.server.connections
    with pytest.raises(OSError):
        await site.connect()


async def test_what_is_left_after_the_grace_is_told_so_once(site: Site) -> None:
    async with await site.connect() as streamed, await site.connect() as whole:
        streamed.ask("/infer", b"x")
        (await site.relay.arrival(1)).send(part(event("one"), SSE))
        await streamed.head()
        whole.ask("/infer", b"x")
        await site.relay.arrival(2)
        async with asyncio.timeout(BOUND_S):
            await site.server.drain(0.05)
        assert await streamed.chunk() == event("one")
        last = await streamed.chunk()
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert await streamed.chunk() == b""
        assert await streamed.rest() == b""
        answer = await whole.answer()
        assert (answer.status, answer.closes) == (503, True)
    assert all(call.cancelled.is_set() for call in site.relay.calls)
    assert site.server.in_flight == 0


async def test_a_drain_does_not_wait_for_a_client_that_never_reads(site: Site) -> None:
    client = await site.connect_slowly()
    client.ask("/infer", b"x")
    await fill(client, site)
    started = time.monotonic()
    await site.server.drain(0.05)
    assert time.monotonic() - started < 3
    assert not site.server.connections
    client.writer.transport.abort()


async def test_two_servers_share_a_port() -> None:
    one, two = Site(), Site()
    address = await one.server.listen("127.0.0.1:0", reuse_port=True)
    assert await two.server.listen(address, reuse_port=True) == address
    one.address = address
    for _ in range(8):
        async with await one.connect() as client:
            client.ask("/echo", b"x", b"Connection: close")
            assert (await client.answer()).body == b"x"
    await one.server.drain(0)
    await two.server.drain(0)


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture
async def secure(start: StartSite, certificates: Certificates) -> Site:
    context = server_context(
        certificate=str(certificates.server), key=str(certificates.server_key), alpn=(HTTP1,)
    )
    site: Site = await start(tls=context, slow_reader_s=0.5)
    return site


def trusting(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def test_https_is_the_same(secure: Site, certificates: Certificates) -> None:
    async with await secure.connect(tls=trusting(certificates)) as client:
        negotiated = client.writer.get_extra_info("ssl_object").selected_alpn_protocol()
        assert negotiated == "http/1.1"
        client.ask("/infer", b"x")
        call = await secure.relay.arrival()
        call.send(part(event("one"), SSE))
        await client.head()
        assert await client.chunk() == event("one")
        call.send(part(event("two")))
        call.finish()
        assert await client.chunk() == event("two")
        assert await client.chunk() == b""
        client.ask("/large", b"x")
        assert len((await client.answer()).body) == 4 << 20
        client.ask("/echo", b"last", b"Connection: close")
        assert (await client.answer()).body == b"last"
        assert await client.rest() == b""


async def test_over_tls_refusals_are_seen_and_leaving_is_heard(
    secure: Site, certificates: Certificates
) -> None:
    async with await secure.connect(tls=trusting(certificates)) as client:
        client.send(b"garbage\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.rest() == b""
    client = await secure.connect(tls=trusting(certificates))
    client.ask("/infer", b"x")
    call = await secure.relay.arrival()
    client.writer.transport.abort()
    async with asyncio.timeout(BOUND_S):
        await call.cancelled.wait()


async def test_over_tls_a_reader_that_stands_still_is_cut(
    secure: Site, certificates: Certificates
) -> None:
    client = await secure.connect(tls=trusting(certificates))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.ask("/infer", b"x")
    await fill(client, secure)
    async with asyncio.timeout(BOUND_S):
        await secure.relay.calls[0].cancelled.wait()
    client.writer.transport.abort()


# --- curl ----------------------------------------------------------------------------------------


async def curl(*arguments: str) -> tuple[str, str]:
    """Run curl; what it wrote, and then what `-w` says of each transfer."""
    process = await asyncio.create_subprocess_exec(
        "curl",
        "--silent",
        "--show-error",
        "--max-time",
        str(BOUND_S),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode(), err.decode()


_TOLD = ("--write-out", " %{http_code} %{num_connects} %{http_version}\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "hello 200 1 1.1"),
        (("--http1.0",), "hello 200 1 1.1"),
        (("--http2",), "hello 200 1 1.1"),
        (("--header", "Transfer-Encoding: chunked"), "hello 200 1 1.1"),
        (("--header", "Expect: 100-continue"), "hello 200 1 1.1"),
        (("--http2", "--header", "Transfer-Encoding: chunked"), "hello 200 1 1.1"),
    ],
)
async def test_curl_gets_its_answer(site: Site, options: tuple[str, ...], told: str) -> None:
    url = f"http://{site.address}/echo"
    out, _ = await curl(*_TOLD, *options, "--data", "hello", url)
    assert out.strip() == told


async def test_curl_keeps_its_connection_over_refusals(site: Site, tmp_path: Path) -> None:
    url = f"http://{site.address}"
    large = tmp_path / "large"
    large.write_bytes(b"x" * (17 << 20))
    out, _ = await curl(
        *(*_TOLD, "--data", "a", f"{url}/echo", "--next", "--silent"),
        *(*_TOLD, "--output", os.devnull, f"{url}/nowhere", "--next", "--silent"),
        *(*_TOLD, "--head", f"{url}/echo", "--output", os.devnull, "--next", "--silent"),
        *(*_TOLD, "--data", "b", f"{url}/echo"),
    )
    assert [line.strip() for line in out.splitlines()] == [
        "a 200 1 1.1",
        "404 0 1.1",
        "200 0 1.1",
        "b 200 0 1.1",
    ]
    for expects in ("Expect:", "Expect: 100-continue", "Transfer-Encoding: chunked"):
        out, _ = await curl(
            *(*_TOLD, "--output", os.devnull, "--header", expects),
            *("--data-binary", f"@{large}", f"{url}/echo"),
        )
        assert out.split()[0] == "413"


async def test_curl_speaks_tls(secure: Site, certificates: Certificates) -> None:
    url = f"https://localhost:{secure.port}/echo"
    out, _ = await curl(*_TOLD, "--ipv4", "--cacert", str(certificates.ca), "--data", "x", url)
    assert out.strip() == "x 200 1 1.1"


# --- Anything at all -----------------------------------------------------------------------------

_WHOLE = [
    a_post(b"Content-Length: 5", b"X-Request-Id: a", body=b"hello"),
    _CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    b"GET /echo?x HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
    a_post(b"Content-Length: 5", b"Expect: 100-continue", body=b"hello"),
    a_post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 5", body=b"hello"),
    b"HEAD /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]
_TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b": ",
    b" ",
    b"\t",
    b"0",
    b"-1",
    b"\xff",
    b"chunked",
    b"HTTP/",
]


def mutated(rng: random.Random) -> bytes:
    """Requests with a few mistakes, or no requests at all."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.choice((1, 10, 100, 5_000, 40_000)))
    data = bytearray(b"".join(rng.choices(_WHOLE, k=rng.randint(1, 4))))
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 20)]
            case 2:
                data[at:at] = rng.choice(_TOKENS)
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 60)]
            case _:
                data[at:at] = rng.choice(_TOKENS) * rng.choice((10, 1_000, 20_000))
    return bytes(data)


async def test_whatever_comes_nothing_breaks_and_nothing_hangs(
    start: StartSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = await start(body_read_s=0.2, idle_s=0.2, slow_reader_s=0.2)
    rng = random.Random(_SEED)
    statuses: set[bytes] = set()

    async def one() -> None:
        sent = mutated(rng)
        cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.randint(0, 3)))
        received = b""
        async with await site.connect() as client:
            with contextlib.suppress(ConnectionError):
                for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                    await send_all(client, sent[begin:end])
                    await asyncio.sleep(0)
                # The server closes by itself, always.
                received = await client.rest()
        for line in received.split(b"\r\n"):
            if line.startswith(b"HTTP/1.1 "):
                statuses.add(line[9:12])

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(100)))
    async with asyncio.timeout(BOUND_S):
        while site.server.connections:
            await asyncio.sleep(0.01)
    assert site.server.kept_bytes == 0
    assert {b"200", b"400"} <= statuses
    assert statuses <= {b"100", b"200", b"400", b"404", b"405", b"413", b"431"}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    async with await site.connect() as client:
        client.ask("/echo", b"alive")
        assert (await client.answer()).body == b"alive"
