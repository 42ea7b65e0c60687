"""What tests of the token path share: engines that answer as their prompt says, a policy that keeps
account, certificates, and a raw HTTP/2 peer that keeps no rule unless told.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, abort, to_rpc_status
from forebay_wire.client import ClientPool
from forebay_wire.core.limits import Limits
from forebay_wire.policy import SERVICE, Fail, Head, Outcome, Policy, Progress, Retry, Route
from forebay_wire.relay import Relay
from forebay_wire.server import Server
from forebay_wire.tls import client_context, server_context
from forebay_wire.waiting import Waiting
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

BOUND_S = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GENERATE = f"/{SERVICE}/Generate"
EMBED = f"/{SERVICE}/Embed"
_SSE = "text/event-stream"
SOAK = os.environ.get("FOREBAY_TEST_SOAK") == "1"
"""Whether counts are those of a long, full run instead of those of a suite of seconds."""
# What is larger than gRPC's own limits must be seen to be refused by ours.
UNLIMITED = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)

_MIB = 1 << 20

T = TypeVar("T")


def at_scale(usual: int, soak: int) -> int:
    """A count: the first, or the second when FOREBAY_TEST_SOAK=1."""
    return soak if SOAK else usual


async def within(waiting: Awaitable[T], bound_s: float = BOUND_S) -> T:
    """Wait, but not for ever."""
    return await asyncio.wait_for(waiting, bound_s)


async def until(reached: Callable[[], bool], bound_s: float = BOUND_S) -> float:
    """Wait until something outside of events holds; answers how long that took, in seconds."""
    started = time.monotonic()
    while not reached():
        if time.monotonic() - started > bound_s:
            raise TimeoutError("it did not come about")
        await asyncio.sleep(0.002)
    return time.monotonic() - started


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(seconds: list[float]) -> str:
    """Median and 99th percentile, for people."""
    middle, high = percentile(seconds, 0.5) * 1e3, percentile(seconds, 0.99) * 1e3
    return f"p50 {middle:.1f} ms, p99 {high:.1f} ms of {len(seconds)}"


# --- Engines -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """What an engine is to answer. Travels as the prompt, and so through any number of hops."""

    count: int = 5
    """Messages."""
    size: int = 1
    """Characters of each message's text."""
    gap_s: float = 0.0
    """Between messages, in seconds."""
    hangs: bool = False
    """Wait behind the last message until cancelled."""
    reason: str = ""
    """End with this reason of ours."""
    code: str = ""
    """End with this code of gRPC's, without our details."""
    message: str = ""
    """The text of the error."""

    def request(self, padding: int = 0) -> pb.GenerateRequest:
        """The request that carries it. `padding` makes it larger by that many bytes."""
        text = json.dumps(dataclasses.asdict(self))
        return pb.GenerateRequest(model="m", text=text + " " * padding)

    @classmethod
    def read(cls, request: pb.GenerateRequest) -> Script:
        """What a request carries; the default where it carries nothing.

        Raises:
            ForebayError: it carries something else.
        """
        if not request.text:
            return cls()
        try:
            return cls(**json.loads(request.text))
        except (TypeError, ValueError):
            raise ForebayError(Reason.INVALID_ARGUMENT, "That is no script.") from None

    def answers(self) -> Iterator[pb.GenerateResponse]:
        """The messages."""
        for number in range(self.count):
            yield pb.GenerateResponse(text_delta=chr(97 + number % 26) * self.size)

    @property
    def text(self) -> str:
        """What all messages say."""
        return "".join(answer.text_delta for answer in self.answers())


@dataclasses.dataclass
class Seen:
    """What an engine has seen."""

    calls: int = 0
    open: int = 0
    """Calls that are being answered."""
    sent: int = 0
    """Messages of all calls that were given away."""
    cancelled_s: list[float] = dataclasses.field(default_factory=list)
    """When calls were cancelled, on the clock of `time.monotonic`."""
    called: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of the latest call."""
    remaining_s: float | None = None
    """Until the latest call's deadline."""
    request_bytes: int = 0
    """Size of the latest request."""


class Engine(rpc.InferenceServiceServicer):
    """Answers as its prompt says; for our server and for `grpc.aio`."""

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen = seen or Seen()

    def _note(self, request: Any, context: Any) -> None:
        seen = self.seen
        seen.calls += 1
        seen.open += 1
        seen.metadata = md.texts(context.invocation_metadata())
        seen.remaining_s = context.time_remaining()
        seen.request_bytes = request.ByteSize()
        seen.called.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        seen = self.seen
        try:
            script = Script.read(request)
            for answer in script.answers():
                if script.gap_s:
                    await asyncio.sleep(script.gap_s)
                yield answer
                seen.sent += 1
            if script.hangs:
                await asyncio.Event().wait()
            context.set_trailing_metadata(((md.USAGE, f"1,{script.count},0"), ("other", "x")))
            await self._end(script, context)
        except asyncio.CancelledError:
            seen.cancelled_s.append(time.monotonic())
            seen.cancelled.set()
            raise
        finally:
            seen.open -= 1

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        self._note(request, context)
        self.seen.open -= 1
        context.set_trailing_metadata(((md.USAGE, "3,0,0"),))
        return pb.EmbedResponse(usage=pb.Usage(prompt_tokens=request.ByteSize()))

    async def CallOpenAI(self, request: pb.CallOpenAIRequest, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        self.seen.open -= 1
        for number in range(2):
            part = b"data: %b\n\n" % request.body
            yield pb.CallOpenAIResponse(content_type="" if number else _SSE, body=part)

    async def _end(self, script: Script, context: Any) -> None:
        if script.reason:
            error = ForebayError(Reason(script.reason), script.message, retry_after_s=2.0)
            await abort(context, error)
        if script.code:
            await context.abort(grpc.StatusCode[script.code], script.message)


class SyncEngine(rpc.InferenceServiceServicer):
    """The same on threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seen = Seen()
        self._loop = loop

    def _note(self, request: Any, context: Any) -> None:
        seen = self.seen
        seen.calls += 1
        seen.metadata = md.texts(context.invocation_metadata())
        seen.remaining_s = context.time_remaining()
        seen.request_bytes = request.ByteSize()
        self._loop.call_soon_threadsafe(seen.called.set)

    def _left(self) -> None:
        self.seen.cancelled_s.append(time.monotonic())
        self._loop.call_soon_threadsafe(self.seen.cancelled.set)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        script = Script.read(request)
        left = concurrent.futures.Future[None]()
        has_ended = False

        def end() -> None:
            # Where the client leaves between two messages, this generator is not run any more.
            if not has_ended:
                self._left()
            left.set_result(None)

        if not context.add_callback(end):
            end()
        for answer in script.answers():
            if script.gap_s:
                concurrent.futures.wait([left], script.gap_s)
            yield answer
        if script.hangs:
            left.result(BOUND_S)
            return
        has_ended = True
        context.set_trailing_metadata(((md.USAGE, f"1,{script.count},0"), ("other", "x")))
        if script.reason:
            error = ForebayError(Reason(script.reason), script.message, retry_after_s=2.0)
            context.abort_with_status(to_rpc_status(error))
        if script.code:
            context.abort(grpc.StatusCode[script.code], script.message)

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        self._note(request, context)
        context.set_trailing_metadata(((md.USAGE, "3,0,0"),))
        return pb.EmbedResponse(usage=pb.Usage(prompt_tokens=request.ByteSize()))

    def CallOpenAI(self, request: pb.CallOpenAIRequest, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        for number in range(2):
            part = b"data: %b\n\n" % request.body
            yield pb.CallOpenAIResponse(content_type="" if number else _SSE, body=part)


# --- Policies ------------------------------------------------------------------------------------


@dataclasses.dataclass
class RecordingPolicy(Policy):
    """Sends attempts to its targets in turn, the last one again and again, and keeps account."""

    targets: list[str]
    refuse: ForebayError | None = None
    admission: Callable[[Head], Awaitable[object]] | None = None
    """What a request waits for before it is let in; None lets it in at once."""
    deadline: Callable[[float | None], float | None] = lambda deadline: deadline
    """What becomes of the caller's deadline."""
    passes: tuple[str, ...] = ()
    """Metadata that the next hop gets beside the request id."""
    keeps: bool = True
    """Whether `ends` is filled; counts are always kept."""
    ends: list[tuple[Outcome, Reason | None, Progress]] = dataclasses.field(default_factory=list)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    admitted: int = 0
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[Reason] = dataclasses.field(default_factory=list)
    """Of attempts, in order."""
    waiting: int = 0
    """Requests that wait to be let in."""
    waited: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        if self.refuse is not None:
            raise self.refuse
        return self._route(head) if self.admission is None else self.wait(head)

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Retry | Fail:
        if self.keeps:
            self.failures.append(error.reason)
        if error.status.replica_fault and len(self.targets) > 1 and progress.messages == 0:
            self.targets.pop(0)
            return Retry(self._route(head, is_retry=True))
        return Fail(error)

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        self.outcomes[outcome.value] = self.outcomes.get(outcome.value, 0) + 1
        if self.keeps:
            self.ends.append((outcome, error.reason if error else None, progress))
        self.ended.set()

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return self.admitted - sum(self.outcomes.values())

    def wait(self, head: Head) -> Awaitable[Route]:
        """Let a request in once what it waits for has come."""
        return Waiting(lambda: self._wait(head))

    async def _wait(self, head: Head) -> Route:
        assert self.admission is not None
        self.waiting += 1
        self.waited.set()
        try:
            await self.admission(head)
        finally:
            self.waiting -= 1
        return self._route(head)

    def _route(self, head: Head, *, is_retry: bool = False) -> Route:
        if not is_retry:
            self.admitted += 1
        passed = tuple((key, head.metadata[key]) for key in self.passes if key in head.metadata)
        metadata = ((md.REQUEST_ID, head.request_id), *passed)
        return Route(self.targets[0], metadata, self.deadline(head.deadline))


# --- Certificates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, and what it has signed for `localhost` and 127.0.0.1."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    stranger: Path
    """Signed by nobody."""
    stranger_key: Path

    def serving(self, *, mutual: bool) -> ssl.SSLContext:
        """For our server."""
        return server_context(
            certificate=str(self.server),
            key=str(self.server_key),
            client_ca=str(self.ca) if mutual else None,
        )

    def calling(self, *, mutual: bool) -> ssl.SSLContext:
        """For our pool."""
        return client_context(
            ca=str(self.ca),
            certificate=str(self.client) if mutual else None,
            key=str(self.client_key) if mutual else None,
        )

    def grpc_serving(self, *, mutual: bool) -> grpc.ServerCredentials:
        """For grpcio's servers."""
        return grpc.ssl_server_credentials(
            [(self.server_key.read_bytes(), self.server.read_bytes())],
            self.ca.read_bytes() if mutual else None,
            mutual,
        )

    def grpc_calling(self, *, mutual: bool) -> grpc.ChannelCredentials:
        """For grpcio's channels."""
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(),
            self.client_key.read_bytes() if mutual else None,
            self.client.read_bytes() if mutual else None,
        )


def make_certificates(directory: Path) -> Certificates:
    """Make them with openssl's command."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    def make(name: str, *signing: str) -> None:
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        subject = ("-subj", f"/CN={name}", "-days", "2")
        extensions = () if name == "ca" else ("-addext", names)
        openssl("req", "-x509", *new, *files, *subject, *extensions, *signing)

    make("ca")
    for name in ("server", "client"):
        make(name, "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    make("stranger")
    paths = {name: directory / f"{name}.pem" for name in ("ca", "server", "client", "stranger")}
    keys = {f"{name}_key": directory / f"{name}.key" for name in ("server", "client", "stranger")}
    return Certificates(**paths, **keys)


# --- Hops ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Hop:
    """One process' worth of the path, here all in one."""

    address: str
    seen: Seen
    server: Server | None = None
    """Ours, where it is ours."""


class Hops:
    """Builds hops for one test, and takes them down in the opposite order."""

    def __init__(self, closing: contextlib.AsyncExitStack) -> None:
        self.closing = closing

    async def engine(
        self,
        kind: str = "ours",
        *,
        address: str = "127.0.0.1:0",
        limits: Limits | None = None,
        certificates: Certificates | None = None,
        mutual: bool = False,
        options: tuple[tuple[str, Any], ...] = (),
        compression: grpc.Compression | None = None,
    ) -> Hop:
        """Serve an engine: with our server ("ours"), `grpc.aio` ("aio"), threads ("sync")."""
        if kind == "ours":
            tls = None if certificates is None else certificates.serving(mutual=mutual)
            ours = Server(limits, tls=tls)
            engine = Engine()
            rpc.add_InferenceServiceServicer_to_server(engine, ours.grpc)
            ours.offer(SERVICE)
            bound = await ours.listen(address)
            self.closing.push_async_callback(ours.stop)
            return Hop(bound, engine.seen, ours)
        credentials = None
        if certificates is not None:
            credentials = certificates.grpc_serving(mutual=mutual)
        options = (*UNLIMITED, ("grpc.so_reuseport", 0), *options)
        if kind == "aio":
            server: Any = grpc.aio.server(options=options, compression=compression)
            servicer: Any = Engine()
            self.closing.push_async_callback(server.stop, None)
        else:
            threads = concurrent.futures.ThreadPoolExecutor(16)
            server = grpc.server(threads, options=options, compression=compression)
            servicer = SyncEngine(asyncio.get_running_loop())
            self.closing.callback(threads.shutdown, wait=False)
            self.closing.callback(lambda: server.stop(None))
        rpc.add_InferenceServiceServicer_to_server(servicer, server)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        started = server.start()
        if started is not None:
            await started
        bound = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        return Hop(bound, servicer.seen)

    def pool(
        self,
        limits: Limits | None = None,
        *,
        certificates: Certificates | None = None,
        mutual: bool = False,
    ) -> ClientPool:
        """Connections to other hops."""
        tls = None if certificates is None else certificates.calling(mutual=mutual)
        pool = ClientPool(limits, tls=tls)
        self.closing.push_async_callback(pool.close)
        return pool

    async def relay(
        self,
        policy: RecordingPolicy,
        *,
        pool: ClientPool | None = None,
        limits: Limits | None = None,
        address: str = "127.0.0.1:0",
        certificates: Certificates | None = None,
        mutual: bool = False,
    ) -> Server:
        """Serve a relay; `address_of` answers where."""
        tls = None if certificates is None else certificates.serving(mutual=mutual)
        server = Server(limits, tls=tls)
        server.serve(Relay(policy, pool or self.pool(limits)))
        bound = await server.listen(address)
        self.closing.push_async_callback(server.stop)
        _ADDRESSES[id(server)] = bound
        self.closing.callback(_ADDRESSES.pop, id(server))
        return server

    def channel(
        self,
        target: str | Server,
        *,
        certificates: Certificates | None = None,
        mutual: bool = False,
        options: tuple[tuple[str, Any], ...] = (),
        compression: grpc.Compression | None = None,
    ) -> grpc.aio.Channel:
        """A client's channel to a hop."""
        address = target if isinstance(target, str) else address_of(target)
        options = tuple({**dict(UNLIMITED), **dict(options)}.items())
        if certificates is None:
            channel = grpc.aio.insecure_channel(address, options=options, compression=compression)
        else:
            channel = grpc.aio.secure_channel(
                address,
                certificates.grpc_calling(mutual=mutual),
                options=(*options, ("grpc.ssl_target_name_override", "localhost")),
                compression=compression,
            )
        self.closing.push_async_callback(channel.close)
        return channel

    def stub(self, target: str | Server, **how: Any) -> Any:
        """A client of a hop; keywords as for `channel`."""
        return rpc.InferenceServiceStub(self.channel(target, **how))

    @contextlib.contextmanager
    def sync_stub(
        self,
        target: str | Server,
        *,
        certificates: Certificates | None = None,
        mutual: bool = False,
        compression: grpc.Compression | None = None,
    ) -> Iterator[rpc.InferenceServiceStub]:
        """A client on threads; to be used in one."""
        address = target if isinstance(target, str) else address_of(target)
        if certificates is None:
            channel = grpc.insecure_channel(address, options=UNLIMITED, compression=compression)
        else:
            channel = grpc.secure_channel(
                address,
                certificates.grpc_calling(mutual=mutual),
                options=(*UNLIMITED, ("grpc.ssl_target_name_override", "localhost")),
                compression=compression,
            )
        with channel:
            yield rpc.InferenceServiceStub(channel)


_ADDRESSES: dict[int, str] = {}


def address_of(server: Server) -> str:
    """Where a relay made by `Hops.relay` listens."""
    return _ADDRESSES[id(server)]


async def read_text(call: Any) -> str:
    """All text of an answer."""
    return "".join([part.text_delta async for part in call])


# --- Processes -----------------------------------------------------------------------------------


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int | str = "self") -> int:
    """Descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Child:
    """`python -m tests.wire_server` as a process: an engine, a relay, or a chain of both."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        return rss_bytes(self.pid)

    async def line(self, bound_s: float = BOUND_S) -> bytes:
        """The next line it writes."""
        assert self.process.stdout is not None
        return await within(asyncio.to_thread(self.process.stdout.readline), bound_s)

    async def counts(self, *, also_objects: bool = False) -> dict[str, int]:
        """What it holds; see `tests.wire_server`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"objects\n" if also_objects else b"\n")
        self.process.stdin.flush()
        return dict(json.loads(await self.line()))

    async def took(self) -> list[float]:
        """How long a client's calls took since this was last asked. All must have succeeded."""
        told: Any = await self.counts()
        assert not told["error"], told["error"]
        return list(told["took"])

    async def at_rest(self, bound_s: float = BOUND_S) -> dict[str, int]:
        """Wait until nothing is in flight, and answer what it still holds."""
        started = time.monotonic()
        while True:
            counts = await self.counts()
            if not any(counts[name] for name in IN_FLIGHT):
                return await self.counts(also_objects=True)
            assert time.monotonic() - started < bound_s, counts
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


IN_FLIGHT = (
    *("streams", "pool_streams", "in_flight", "admitted", "waiting"),
    *("held", "requested", "calls"),
)
"""Of `Child.counts`: all that is 0 when nobody asks anything."""


@contextlib.asynccontextmanager
async def child(
    role: str = "chain", *, target: str = "", limits: Mapping[str, float] | None = None
) -> AsyncIterator[Child]:
    """Run a server in a process of its own.

    Args:
        role: "engine", "relay" (to `target`), "chain": a relay with an engine behind it, or
            "client" (of `target`), which calls one by one.
        target: where requests go.
        limits: changes to `Limits`.
    """
    options = {"role": role, "target": target, "limits": dict(limits or {})}
    # Not by the event loop: uvloop forks in a way that runs C-core's fork handlers, which may hang.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.wire_server", json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    running = Child(process, "")
    try:
        first = await running.line(30.0)
        assert first, "the child did not start"
        running.address = first.decode().strip()
        yield running
    finally:
        running.stop()


@contextlib.asynccontextmanager
async def neighbour(stub: Any, *, pause_s: float = 0.0) -> AsyncIterator[list[float]]:
    """Another client, which calls one by one meanwhile; gives the seconds each call took.

    Raises whatever a call of it raises, at the end.
    """
    took: list[float] = []

    async def go_on() -> None:
        while True:
            started = time.monotonic()
            assert await read_text(stub.Generate(Script(3).request(), timeout=BOUND_S)) == "abc"
            took.append(time.monotonic() - started)
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(go_on())
    try:
        yield took
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def undisturbed(server: Child) -> AsyncIterator[None]:
    """Another client, in a process of its own, calls meanwhile and has all its calls answered;
    nothing stays behind, and the server grows by less than 100 MiB."""
    async with child("client", target=server.address) as client:
        await client.took()
        await asyncio.sleep(at_scale(1, 10) / 2)
        alone = await client.took()
        before = server.rss_bytes
        yield
        beside = await client.took()
        async with asyncio.timeout(BOUND_S):
            while len(beside) < 20:
                await asyncio.sleep(0.01)
                beside += await client.took()
        assert server.is_alive
        grown = (server.rss_bytes - before) / _MIB
    await server.at_rest()
    print(f"alone: {spread(alone)}; beside: {spread(beside)}; memory grew by {grown:.1f} MiB")
    assert grown < 100


# --- A raw peer ----------------------------------------------------------------------------------


class RawPeer:
    """One HTTP/2 connection, frame by frame.

    Settings and pings are acknowledged unless `acknowledges` is False; nothing else is kept.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        acknowledges: bool = True,
    ) -> None:
        self.writer = writer
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.encoder.header_table_size = 0
        self.ended = asyncio.Event()
        """The other end has closed."""
        self.goaway: GoAwayFrame | None = None
        self.received: deque[Frame] = deque()
        """Frames that nobody has asked for yet."""
        self.acknowledges = acknowledges
        self._news = asyncio.Event()
        self._reader = reader
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        address: str,
        settings: Mapping[int, int] | None = None,
        *,
        acknowledges: bool = True,
        first: bytes | None = None,
    ) -> RawPeer:
        """Be a client. `first` replaces the preface and the settings."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        peer = cls(reader, writer, acknowledges=acknowledges)
        if first is None:
            first = PREFACE + SettingsFrame(0, dict(settings or {})).serialize()
        writer.write(first)
        return peer

    def send(self, *frames: Frame | bytes) -> None:
        """Write frames, and bytes as they are."""
        parts = [f if isinstance(f, bytes) else f.serialize() for f in frames]
        if not self.writer.is_closing():
            self.writer.write(b"".join(parts))

    def stop_reading(self) -> None:
        """Leave all that comes in the kernel."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def flush(self) -> None:
        """Wait until the kernel has most of it."""
        with contextlib.suppress(OSError):
            await within(self.writer.drain())

    async def next(self, *kinds: type[Frame], stream_id: int | None = None) -> Any:
        """The next frame of these kinds (any when none); others ahead of it are dropped.

        With a stream, those of other streams are kept.

        Raises:
            EOFError: the connection ended first.
        """
        kept: list[Frame] = []
        async with asyncio.timeout(BOUND_S):
            while True:
                while self.received:
                    got = self.received.popleft()
                    if stream_id is not None and got.stream_id != stream_id:
                        kept.append(got)
                    elif not kinds or isinstance(got, kinds):
                        self.received.extendleft(reversed(kept))
                        return got
                if self.ended.is_set():
                    raise EOFError
                self._news.clear()
                await self._news.wait()

    async def answer(self, stream_id: int) -> tuple[dict[str, str], bytes]:
        """All headers and trailers of an answer, and its payload, until the stream ends."""
        fields: dict[str, str] = {}
        payload = b""
        while True:
            got = await self.next(HeadersFrame, DataFrame, RstStreamFrame, stream_id=stream_id)
            if isinstance(got, RstStreamFrame):
                fields["rst"] = str(got.error_code)
                return fields, payload
            if isinstance(got, HeadersFrame):
                fields |= {str(k): str(v) for k, v in self.decoder.decode(got.data)}
            else:
                payload += got.data
            if "END_STREAM" in got.flags:
                return fields, payload

    def headers(
        self,
        stream_id: int,
        *more: tuple[str, str],
        path: str = GENERATE,
        ends: bool = False,
    ) -> HeadersFrame:
        """The head of a gRPC request."""
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]
        flags = ["END_HEADERS", *(["END_STREAM"] if ends else [])]
        return HeadersFrame(stream_id, self.encoder.encode(fields), flags=flags)

    def request(self, stream_id: int, script: Script, *more: tuple[str, str]) -> bytes:
        """A whole request of one small message."""
        return (
            self.headers(stream_id, *more).serialize()
            + DataFrame(
                stream_id, framed(script.request().SerializeToString()), flags=["END_STREAM"]
            ).serialize()
        )

    def response(self, stream_id: int, *messages: bytes, status: int = 0) -> bytes:
        """A whole answer, as a server gives it."""
        head = self.encoder.encode([(":status", "200"), ("content-type", "application/grpc")])
        tail = self.encoder.encode([("grpc-status", str(status))])
        parts: list[Frame] = [HeadersFrame(stream_id, head, flags=["END_HEADERS"])]
        parts += (DataFrame(stream_id, framed(message)) for message in messages)
        parts.append(HeadersFrame(stream_id, tail, flags=["END_HEADERS", "END_STREAM"]))
        return b"".join(part.serialize() for part in parts)

    async def close(self) -> None:
        """Close, without a word."""
        self._task.cancel()
        self.writer.transport.abort()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._task

    async def _read(self) -> None:
        buffer = b""
        is_client = True
        try:
            while data := await self._reader.read(1 << 16):
                buffer += data
                if is_client and buffer.startswith(PREFACE):
                    buffer = buffer.removeprefix(PREFACE)
                    is_client = False
                while len(buffer) >= 9:
                    got, length = Frame.parse_frame_header(memoryview(buffer[:9]))
                    if len(buffer) < 9 + length:
                        break
                    got.parse_body(memoryview(buffer[9 : 9 + length]))
                    buffer = buffer[9 + length :]
                    self._take(got)
        except (OSError, ValueError):
            pass
        finally:
            self.ended.set()
            self._news.set()

    def _take(self, got: Frame) -> None:
        if isinstance(got, GoAwayFrame):
            self.goaway = got
        if self.acknowledges and "ACK" not in got.flags:
            if isinstance(got, SettingsFrame):
                self.send(SettingsFrame(0, flags=["ACK"]))
            elif isinstance(got, PingFrame):
                self.send(PingFrame(0, got.opaque_data, flags=["ACK"]))
        self.received.append(got)
        self._news.set()


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    """A message with gRPC's prefix."""
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


def wide_open(peer: RawPeer, stream_id: int = 0) -> None:
    """Give the other end all the credit there is."""
    peer.send(WindowUpdateFrame(stream_id, 2**31 - 1 - 65535))


@contextlib.asynccontextmanager
async def raw_server(
    settings: Mapping[int, int] | None = None,
) -> AsyncIterator[tuple[str, asyncio.Queue[RawPeer]]]:
    """Be a server: gives the address, and each connection once it was greeted."""
    peers: asyncio.Queue[RawPeer] = asyncio.Queue()
    everyone: list[RawPeer] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        everyone.append(peer)
        peer.send(SettingsFrame(0, dict(settings or {})))
        peers.put_nowait(peer)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", peers
    finally:
        server.close()
        for peer in everyone:
            await peer.close()
