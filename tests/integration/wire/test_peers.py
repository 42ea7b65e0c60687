"""Every behaviour of a call, with real gRPC on both ends, whatever lies between and underneath."""

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import Reason, from_rpc_error
from forebay_wire.core.limits import Limits
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.wire_tools import (
    Certificates,
    Hops,
    RecordingPolicy,
    Script,
    Seen,
    at_scale,
    read_text,
    within,
)

pytestmark = pytest.mark.integration
_MIB = 1 << 20
_TRANSPORTS = ("tcp", "unix", "tls", "mtls")
_BEHIND = ("handler", "ours", "aio", "sync")
"""What the client's call meets: our server's handlers, or our relay and one of these servers."""


@dataclasses.dataclass
class _Line:
    """A client and the engine at the other end of the line."""

    stub: Any
    sync_stub: Callable[..., Any]
    seen: Seen
    policy: RecordingPolicy | None

    @property
    def is_relayed(self) -> bool:
        """Whether a relay lies between."""
        return self.policy is not None


@dataclasses.dataclass
class _Lines:
    """Lays lines over one transport."""

    hops: Hops
    transport: str
    behind: str
    directory: Path
    certificates: Certificates | None

    async def lay(
        self,
        *,
        limits: Limits | None = None,
        compression: grpc.Compression | None = None,
        answers_compressed: grpc.Compression | None = None,
    ) -> _Line:
        secured: dict[str, Any] = {}
        if self.certificates is not None:
            secured = {"certificates": self.certificates, "mutual": self.transport == "mtls"}
        is_handled = self.behind == "handler"
        engine = await self.hops.engine(
            "ours" if is_handled else self.behind,
            address=self._address("engine"),
            limits=limits,
            compression=answers_compressed,
            **secured,
        )
        target: Any = engine.address
        policy = None
        if not is_handled:
            policy = RecordingPolicy([engine.address])
            target = await self.hops.relay(
                policy,
                pool=self.hops.pool(limits, **secured),
                limits=limits,
                address=self._address("relay"),
                **secured,
            )
        return _Line(
            self.hops.stub(target, compression=compression, **secured),
            lambda: self.hops.sync_stub(target, compression=compression, **secured),
            engine.seen,
            policy,
        )

    def _address(self, name: str) -> str:
        return f"unix:{self.directory / name}" if self.transport == "unix" else "127.0.0.1:0"


@pytest.fixture(params=_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=_BEHIND)
def behind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lines(
    hops: Hops, transport: str, behind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> _Lines:
    is_secured = transport in ("tls", "mtls")
    certificates = request.getfixturevalue("certificates") if is_secured else None
    return _Lines(hops, transport, behind, tmp_path, certificates)


@pytest.fixture
def plain(hops: Hops, behind: str, tmp_path: Path) -> _Lines:
    """Lines for what does not depend on the transport."""
    return _Lines(hops, "tcp", behind, tmp_path, None)


async def test_calls_pass_over_every_transport(lines: _Lines) -> None:
    line = await lines.lay()
    call = line.stub.Generate(Script(20, 30).request(), metadata=((md.REQUEST_ID, "r1"),))
    assert await read_text(call) == Script(20, 30).text
    assert md.texts(await call.trailing_metadata())[md.USAGE] == "1,20,0"
    assert line.seen.metadata[md.REQUEST_ID] == "r1"
    answer = await line.stub.Embed(pb.EmbedRequest(model="mm"))
    assert answer.usage.prompt_tokens == 4
    events = line.stub.CallOpenAI(pb.CallOpenAIRequest(path="/v1/completions", body=b"{}"))
    assert b"".join([part.body async for part in events]) == b"data: {}\n\n" * 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(
            line.stub.Generate(Script(1, reason="QUEUE_FULL", message="Full.").request())
        )
    assert from_rpc_error(caught.value).reason is Reason.QUEUE_FULL
    endless = line.stub.Generate(Script(1, hangs=True).request())
    await endless.read()
    endless.cancel()
    await within(line.seen.cancelled.wait())
    # While somebody holds a call that failed, C-core does not let go of its connection.
    del endless, caught
    gc.collect()


async def test_calls_of_a_client_on_threads_pass_over_every_transport(lines: _Lines) -> None:
    line = await lines.lay()

    def ask() -> None:
        with line.sync_stub() as stub:
            answers = stub.Generate(Script(20, 30).request())
            assert "".join(answer.text_delta for answer in answers) == Script(20, 30).text
            assert md.texts(answers.trailing_metadata())[md.USAGE] == "1,20,0"
            assert stub.Embed(pb.EmbedRequest(model="mm")).usage.prompt_tokens == 4
            failing = Script(1, reason="QUEUE_FULL", message="Full.").request()
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(failing))
            assert from_rpc_error(caught.value).reason is Reason.QUEUE_FULL
            endless = stub.Generate(Script(1, hangs=True).request())
            next(endless)
            endless.cancel()

    await asyncio.to_thread(ask)
    await within(line.seen.cancelled.wait())


async def test_a_long_stream_passes_whole(plain: _Lines) -> None:
    line = await plain.lay()
    script = Script(5000, 20)
    assert await read_text(line.stub.Generate(script.request())) == script.text
    if line.policy is not None:
        assert line.policy.ends[0][2].messages == 5000


async def test_many_streams_at_once_pass_whole(plain: _Lines) -> None:
    # The server on threads answers sixteen at a time; the others wait in it.
    line = await plain.lay()
    scripts = [Script(20 + number, 3, gap_s=0.001) for number in range(at_scale(100, 1000))]
    texts = await asyncio.gather(*[read_text(line.stub.Generate(s.request())) for s in scripts])
    assert texts == [script.text for script in scripts]


@pytest.mark.parametrize(
    "size", [0, 1, 16383, 16384, 16385, _MIB, 16 * _MIB], ids=lambda size: f"{size}"
)
async def test_messages_of_any_size_pass_both_ways(plain: _Lines, size: int) -> None:
    line = await plain.lay()
    script = Script(1, size)
    request = script.request(padding=size)
    assert await read_text(line.stub.Generate(request)) == script.text
    assert line.seen.request_bytes == request.ByteSize()


async def test_an_empty_message_passes_both_ways(plain: _Lines) -> None:
    line = await plain.lay()
    answer = await line.stub.Embed(pb.EmbedRequest())
    assert answer.usage.prompt_tokens == 0
    assert line.seen.request_bytes == 0


async def test_a_message_at_the_limit_passes_and_one_over_it_is_refused_alone(
    plain: _Lines,
) -> None:
    if plain.behind in ("aio", "sync"):
        pytest.skip("the limit is that of our own server, whatever lies behind")
    limit = Limits().message_bytes
    line = await plain.lay()
    other = line.stub.Generate(Script(1, hangs=True).request())
    await other.read()
    request = pb.EmbedRequest(model="")
    overhead = pb.EmbedRequest(model="x" * limit).ByteSize() - limit
    request.model = "x" * (limit - overhead)
    assert (await line.stub.Embed(request)).usage.prompt_tokens == limit
    for size in (limit + 1, 2 * limit):
        request.model = "x" * (size - overhead)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.stub.Embed(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).reason is Reason.BODY_TOO_LARGE
    assert (await line.stub.Embed(pb.EmbedRequest(model="mm"))).usage.prompt_tokens == 4
    assert not other.done()


@pytest.mark.parametrize("method", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_pass_both_ways(plain: _Lines, method: grpc.Compression) -> None:
    line = await plain.lay(compression=method, answers_compressed=method)
    script = Script(5, 20_000)
    call = line.stub.Generate(script.request(padding=100_000))
    assert await read_text(call) == script.text
    assert line.seen.request_bytes > 100_000
    if plain.behind in ("aio", "sync"):
        assert line.policy is not None
        progress = line.policy.ends[0][2]
        assert progress.message_bytes < 20_000, "the relay passes on what is compressed as it is"

    def ask() -> str:
        with line.sync_stub() as stub:
            return "".join(answer.text_delta for answer in stub.Generate(script.request()))

    assert await asyncio.to_thread(ask) == script.text


async def test_a_compressed_message_that_swells_over_the_limit_is_refused_alone(
    plain: _Lines,
) -> None:
    if plain.behind in ("aio", "sync"):
        pytest.skip("the limit is that of our own server, whatever lies behind")
    line = await plain.lay(compression=grpc.Compression.Gzip)
    other = line.stub.Generate(Script(1, hangs=True).request())
    await other.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await line.stub.Embed(pb.EmbedRequest(model="x" * (40 * _MIB)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not other.done()


async def test_an_error_keeps_its_details_and_its_text(plain: _Lines) -> None:
    line = await plain.lay()
    text = "Zu voll – 満員です 🚦, 100 % \r\n\ttry later"
    script = Script(2, reason="QUEUE_FULL", message=text)
    call = line.stub.Generate(script.request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    assert caught.value.details() == text
    error = from_rpc_error(caught.value)
    assert (error.reason, error.message, error.retry_after_s) == (Reason.QUEUE_FULL, text, 2.0)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)


async def test_an_error_ahead_of_every_message_comes_as_trailers_alone(plain: _Lines) -> None:
    line = await plain.lay()
    call = line.stub.Generate(Script(0, reason="NO_REPLICA", message="None.").request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    assert from_rpc_error(caught.value).reason is Reason.NO_REPLICA
    # C-core shows the only headers of such an answer as its trailing metadata.
    assert not md.texts(await call.initial_metadata())


@pytest.mark.parametrize(
    ("code", "seen_as"),
    [
        ("INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
        ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
        ("DATA_LOSS", grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_foreign_status_keeps_its_sense_and_loses_its_text(
    plain: _Lines, code: str, seen_as: grpc.StatusCode
) -> None:
    line = await plain.lay()
    call = line.stub.Generate(Script(1, code=code, message="10.0.0.1 failed").request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    if line.is_relayed:
        assert caught.value.code() is seen_as
        assert "10.0.0.1" not in (caught.value.details() or "")
    else:
        assert caught.value.code() is grpc.StatusCode[code]
        assert caught.value.details() == "10.0.0.1 failed"


async def test_metadata_up_to_the_limit_passes_and_more_is_refused_alone(plain: _Lines) -> None:
    line = await plain.lay()
    if line.policy is not None:
        line.policy.passes = ("big", "f0", "f299")
    other = line.stub.Generate(Script(1, hangs=True).request())
    await other.read()
    # More than one frame holds: HEADERS and CONTINUATION.
    fields = tuple((f"f{number}", "v" * 50) for number in range(300))
    for metadata in ((("big", "x" * 7000),), (("big", "x" * 24_000),), fields):
        if plain.behind in ("aio", "sync") and len(metadata[0][1]) > 8000:
            # C-core refuses more than 8 KiB unless it is told otherwise.
            continue
        await read_text(line.stub.Generate(Script().request(), metadata=metadata))
        kept = dict(metadata)
        for name in ("big", "f0", "f299"):
            if name in kept:
                assert line.seen.metadata[name] == kept[name]
    too_much = (("big", "x" * 33_000),)
    many_too_much = tuple((f"f{number}", "v" * 60) for number in range(400))
    for metadata in (too_much, many_too_much):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_text(line.stub.Generate(Script().request(), metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await read_text(line.stub.Generate(Script().request())) == "abcde"
    assert not other.done()


async def test_a_deadline_shrinks_on_its_way_and_ends_the_call_at_every_hop(plain: _Lines) -> None:
    line = await plain.lay()
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(line.stub.Generate(Script(1, hangs=True).request(), timeout=0.4))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 1.0
    assert line.seen.remaining_s is not None
    # gRPC rounds what is left up.
    assert 0.2 < line.seen.remaining_s <= 0.45
    await within(line.seen.cancelled.wait())
    if line.policy is not None:
        await within(line.policy.ended.wait())
        assert len(line.policy.ends) == 1


async def test_the_next_hop_keeps_the_deadline_that_the_policy_gives_it(plain: _Lines) -> None:
    line = await plain.lay()
    if line.policy is None:
        pytest.skip("there is no relay")
    line.policy.deadline = lambda _: time.monotonic() + 0.2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(line.stub.Generate(Script(1, hangs=True).request(), timeout=5))
    assert from_rpc_error(caught.value).reason is Reason.DEADLINE_EXCEEDED
    assert line.seen.remaining_s is not None and line.seen.remaining_s <= 0.25
    await within(line.seen.cancelled.wait())


async def test_the_end_of_a_call_reaches_the_engine_at_once(plain: _Lines) -> None:
    line = await plain.lay()
    took = []
    for number in range(20):
        line.seen.cancelled.clear()
        line.seen.called.clear()
        call = line.stub.Generate(Script(number % 2, hangs=True).request())
        await within(line.seen.called.wait())
        if number % 2:
            await call.read()
        left = time.monotonic()
        call.cancel()
        await within(line.seen.cancelled.wait())
        took.append(line.seen.cancelled_s[-1] - left)
    took.sort()
    print(f"{plain.behind}: {took[10] * 1e3:.1f} ms (p50), {took[18] * 1e3:.1f} ms (p95)")
    assert took[18] < 0.1


async def test_an_engine_that_cancels_is_a_lost_replica(plain: _Lines) -> None:
    line = await plain.lay()
    call = line.stub.Generate(Script(1, code="CANCELLED").request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    if line.is_relayed:
        assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
    else:
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_an_unknown_method_and_service_are_unimplemented(hops: Hops) -> None:
    engine = await hops.engine()
    for server in (engine.address, await hops.relay(RecordingPolicy([engine.address]))):
        channel: Any = hops.channel(server)
        for path in ("/a.B/C", "/forebay.inference.v1.InferenceService/Nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(path)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await read_text(hops.stub(server).Generate(Script().request())) == "abcde"
