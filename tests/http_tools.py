"""What tests of the HTTP front share: a server, a client of octets, and a stand-in for a relay."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason
from forebay_wire.core.http1 import HttpLimits
from forebay_wire.core.messages import frame
from forebay_wire.exchange import Endpoint, Exchange, NotAllowedError, answer_json
from forebay_wire.http import HttpServer
from forebay_wire.policy import Head, Method
from forebay_wire.sse import OpenAICaller, relay_openai

BOUND_S = 10.0
SSE = "text/event-stream; charset=utf-8"
ANSWER_BYTES = 1 << 20


def part(body: bytes, content_type: str = "", *, tokens: int = 1) -> bytes:
    """A message of an answer, with its length prefix."""
    ids = [pb.ChoiceTokens(index=0, token_ids=range(tokens))] if tokens else []
    message = pb.CallOpenAIResponse(content_type=content_type, body=body, tokens=ids)
    return frame(message.SerializeToString())


def event(text: str) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % text.encode()


class StandInCall:
    """One request as a relay sees it; a test plays the next hop with it."""

    answer: tuple[tuple[str, str], ...] = ()

    def __init__(self, head: Head, message: bytes, caller: OpenAICaller) -> None:
        self.head = head
        self.request = pb.CallOpenAIRequest.FromString(message)
        self.caller = caller
        self.is_held = False
        self.holds = 0
        self.cancelled = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()

    def cancel(self) -> None:
        self.cancelled.set()

    def hold(self) -> None:
        self.is_held = True
        self.holds += 1
        self.may_send.clear()

    def resume(self) -> None:
        self.is_held = False
        self.may_send.set()

    def send(self, *messages: bytes) -> None:
        """Give messages as one frame's payload, in the middle of a larger read."""
        assert not self.cancelled.is_set(), "a cancelled call is told nothing"
        data = b"".join(messages)
        self.caller.forward(b"before" + data + b"behind", 6, 6 + len(data))

    def finish(self) -> None:
        assert not self.cancelled.is_set(), "a cancelled call is told nothing"
        self.caller.finish(())

    def fail(self, reason: Reason) -> None:
        assert not self.cancelled.is_set(), "a cancelled call is told nothing"
        self.caller.fail(ForebayError(reason, "As the test says."), ())


class StandInRelay:
    """Takes calls, and leaves the rest to the test."""

    def __init__(self) -> None:
        self.calls: list[StandInCall] = []
        self._arrived = asyncio.Event()

    def call(self, head: Head, message: bytes, caller: OpenAICaller) -> StandInCall:
        call = StandInCall(head, message, caller)
        self.calls.append(call)
        self._arrived.set()
        return call

    async def arrival(self, count: int = 1) -> StandInCall:
        """Wait for the `count`-th call."""
        async with asyncio.timeout(BOUND_S):
            while len(self.calls) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.calls[count - 1]


class Site:
    """A server with one endpoint of each kind."""

    def __init__(self, **limits: Any) -> None:
        self.relay = StandInRelay()
        self.server = HttpServer(self._find, HttpLimits(**limits))
        self.address = ""
        self.waiting = asyncio.Event()
        """Somebody waits at `/later`."""
        self.go_on = asyncio.Event()
        self.ended: list[str] = []

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def _find(self, method: str, path: str) -> Endpoint:
        endpoints = {
            "/echo": Endpoint(self._echo),
            "/large": Endpoint(lambda exchange: exchange.answer(b"l" * (4 << 20), "text/plain")),
            "/later": Endpoint(self._later),
            "/broken": Endpoint(self._broken),
            "/infer": Endpoint(self._infer, is_work=True),
        }
        if path not in endpoints:
            raise ForebayError(Reason.ROUTE_NOT_FOUND, "There is no such path here.")
        if method == "DELETE":
            raise NotAllowedError("GET, POST")
        return endpoints[path]

    def _echo(self, exchange: Exchange) -> None:
        exchange.answer(exchange.body, "text/plain")

    async def _later(self, exchange: Exchange) -> None:
        try:
            self.waiting.set()
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("answered")
        answer_json(exchange, {"body": exchange.body.decode()})

    async def _broken(self, exchange: Exchange) -> None:
        raise RuntimeError("/a/path/and/a/secret")

    def _infer(self, exchange: Exchange) -> None:
        head = Head(Method.CALL_OPENAI, {}, None, exchange.request_id)
        request = pb.CallOpenAIRequest(path=exchange.head.path, body=exchange.body)
        message = request.SerializeToString()
        relay_openai(self.relay, exchange, head, message, answer_bytes=ANSWER_BYTES)

    @contextlib.asynccontextmanager
    async def open(self, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
        self.address = await self.server.listen("127.0.0.1:0", tls=tls)
        try:
            yield self
        finally:
            await self.server.drain(0)

    async def connect(self, *, tls: ssl.SSLContext | None = None) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls))

    async def connect_slowly(self) -> Client:
        """A client whose buffers are small, and that reads nothing yet."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        client = Client(*await asyncio.open_connection(sock=raw, limit=1024))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of every socket
        return client


@dataclasses.dataclass
class Answer:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Client:
    """A connection of a client that keeps no rule unless told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, path: str = "/echo", body: bytes = b"", *headers: bytes) -> None:
        lines = b"".join(header + b"\r\n" for header in headers)
        head = b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
        self.send(head % (path.encode(), lines, len(body)) + body)

    async def head(self) -> Answer:
        """The next answer's head."""
        async with asyncio.timeout(BOUND_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(headers) == len(lines), "no header is repeated"
        return Answer(int(status), {key.lower(): value for key, value in headers.items()}, b"")

    async def answer(self, *, of_head: bool = False) -> Answer:
        """The next answer."""
        answer = await self.head()
        if "transfer-encoding" in answer.headers:
            while piece := await self.chunk():
                answer.body += piece
        elif not of_head and answer.status >= 200:
            async with asyncio.timeout(BOUND_S):
                length = int(answer.headers["content-length"])
                answer.body = await self.reader.readexactly(length)
        return answer

    async def chunk(self) -> bytes:
        """The next chunk; empty at the end."""
        async with asyncio.timeout(BOUND_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(BOUND_S):
            return await self.reader.read()

    async def is_cut(self) -> bool:
        """Wait until the server has closed; whether by a reset."""
        try:
            async with asyncio.timeout(BOUND_S):
                while await self.reader.read(1 << 16):
                    pass
        except ConnectionError:
            return True
        return False
