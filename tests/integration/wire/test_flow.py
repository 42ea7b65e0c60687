"""Flow control with real peers: small windows, large messages, and readers that lag or stop."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from forebay_common.errors import Reason, from_rpc_error
from forebay_wire.core.limits import Limits
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.wire_tools import (
    Hops,
    RawPeer,
    RecordingPolicy,
    Script,
    address_of,
    at_scale,
    child,
    framed,
    neighbour,
    percentile,
    raw_server,
    read_text,
    spread,
    until,
    within,
)

pytestmark = pytest.mark.integration
_KIB = 1 << 10
_MIB = 1 << 20
_NARROW: tuple[tuple[str, Any], ...] = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
)


@pytest.mark.parametrize("kind", ["ours", "aio", "sync"])
async def test_everything_passes_through_narrow_windows(hops: Hops, kind: str) -> None:
    limits = Limits(
        stream_window_bytes=1 * _KIB,
        request_window_bytes=1 * _KIB,
        connection_window_bytes=64 * _KIB,
    )
    engine = await hops.engine(kind, limits=limits, options=_NARROW)
    policy = RecordingPolicy([engine.address])
    relay = await hops.relay(policy, limits=limits)
    stub = hops.stub(relay, options=_NARROW)
    scripts = [Script(200, 500), Script(3, 100_000), Script(2000, 1), Script(1, _MIB)]
    requests = [script.request(padding=200_000) for script in scripts]
    answers = await asyncio.gather(*[read_text(stub.Generate(r)) for r in requests])
    assert answers == [script.text for script in scripts]


async def test_a_client_with_a_window_of_one_byte_gets_everything(hops: Hops) -> None:
    engine = await hops.engine()
    relay = await hops.relay(RecordingPolicy([engine.address]))
    peer = await RawPeer.connect(address_of(relay), {SettingsFrame.INITIAL_WINDOW_SIZE: 1})
    script = Script(3, 50)
    peer.send(peer.request(1, script))
    payload = b""
    await peer.next(HeadersFrame)
    while True:
        got = await peer.next(DataFrame, HeadersFrame, stream_id=1)
        if isinstance(got, HeadersFrame):
            break
        assert len(got.data) <= 1
        payload += got.data
        peer.send(WindowUpdateFrame(1, 1))
    assert payload == b"".join(framed(answer.SerializeToString()) for answer in script.answers())
    await peer.close()


async def test_an_engine_is_held_back_to_what_its_reader_takes(hops: Hops) -> None:
    engine = await hops.engine()
    relay = await hops.relay(RecordingPolicy([engine.address]))
    peer = await RawPeer.connect(address_of(relay))
    size = 1000
    peer.send(peer.request(1, Script(100_000, size)))
    await until(lambda: engine.seen.sent > 0)
    stalled = -1
    while stalled != engine.seen.sent:
        stalled = engine.seen.sent
        await asyncio.sleep(0.1)
    # The client's own window, what waits here, and what the engine's server lets wait.
    assert stalled * size < 65535 + Limits().stream_window_bytes + 100 * _KIB
    assert relay.held.used_bytes <= Limits().stream_window_bytes
    peer.send(WindowUpdateFrame(1, 10_000), WindowUpdateFrame(0, 10_000))
    await until(lambda: engine.seen.sent >= stalled)
    await peer.close()
    await until(lambda: relay.in_flight == 0)
    assert relay.held.used_bytes == 0


async def test_a_reader_that_takes_nothing_is_cut_and_hears_why(hops: Hops) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    relay = await hops.relay(policy, limits=Limits(slow_reader_s=1.0))
    peer = await RawPeer.connect(address_of(relay))
    peer.send(peer.request(1, Script(100_000, 1000)))
    started = time.monotonic()
    stub = hops.stub(relay)
    async with neighbour(stub):
        fields, payload = await peer.answer(1)
    took_s = time.monotonic() - started
    assert fields["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert fields["grpc-message"] == "The answer was not read in time."
    assert len(payload) == 65535
    assert 1.0 <= took_s < 3.0
    assert relay.slow_readers_cut == 1
    # The neighbour may have left in the middle of a call.
    assert 1 <= policy.outcomes["cancelled"] <= 2
    await until(lambda: engine.seen.open == 0)
    # The connection lives.
    peer.send(WindowUpdateFrame(0, 1 << 20), peer.request(3, Script(1)))
    fields, _ = await peer.answer(3)
    assert fields["grpc-status"] == "0"
    await peer.close()


async def test_a_reader_that_is_slow_but_steady_is_cut_by_no_hop(hops: Hops) -> None:
    limits = Limits(slow_reader_s=1.0)
    engine = await hops.engine(limits=limits)
    policy = RecordingPolicy([engine.address])
    relay = await hops.relay(policy, limits=limits)
    peer = await RawPeer.connect(address_of(relay), {SettingsFrame.INITIAL_WINDOW_SIZE: 1000})
    peer.send(peer.request(1, Script(100_000, 1000)))
    await until(lambda: relay.held.used_bytes >= Limits().stream_window_bytes - 1000)
    sent = engine.seen.sent
    # What waits lasts for several times as long as a reader may take nothing.
    for _ in range(25):
        await asyncio.sleep(0.1)
        peer.send(WindowUpdateFrame(1, 2000), WindowUpdateFrame(0, 2000))
        assert relay.held.used_bytes <= Limits().stream_window_bytes
    assert engine.seen.sent > sent
    assert (relay.slow_readers_cut, policy.outcomes) == (0, {})
    await peer.close()


async def test_a_handler_s_reader_that_takes_nothing_is_cut(hops: Hops) -> None:
    engine = await hops.engine(limits=Limits(slow_reader_s=0.5))
    peer = await RawPeer.connect(engine.address)
    peer.send(peer.request(1, Script(100_000, 1000)))
    fields, _ = await peer.answer(1)
    assert fields["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    await until(lambda: engine.seen.open == 0)
    assert engine.server is not None
    assert engine.server.held.used_bytes == 0
    await peer.close()


async def test_a_client_that_does_not_even_read_its_socket_is_cut(hops: Hops) -> None:
    engine = await hops.engine()
    relay = await hops.relay(RecordingPolicy([engine.address]), limits=Limits(slow_reader_s=0.5))
    host, _, port = address_of(relay).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    peer = RawPeer(reader, writer)
    # Its windows are wide open, so that only the socket holds the answers back.
    peer.send(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1}),
        WindowUpdateFrame(0, 2**31 - 1 - 65535),
    )
    peer.stop_reading()
    peer.send(peer.request(1, Script(100_000, 10_000)))
    async with neighbour(hops.stub(relay)):
        await until(lambda: relay.connections == 2)
        await until(lambda: relay.connections == 1)
    assert relay.held.used_bytes == 0
    await peer.close()


async def test_slow_readers_cost_neither_memory_nor_their_neighbours_time(hops: Hops) -> None:
    # The full size: 100 readers of a message a second, of an engine that makes 100.
    readers = 100
    for_s = at_scale(3, 60)
    async with child() as server:
        stub = hops.stub(server.address)
        async with neighbour(stub, pause_s=0.01) as alone:
            await asyncio.sleep(1)
        script = Script(100_000, 2000, gap_s=0.01)
        window = {SettingsFrame.INITIAL_WINDOW_SIZE: 4000}
        peer = await RawPeer.connect(server.address, window)
        streams = range(1, 2 * readers, 2)
        peer.send(WindowUpdateFrame(0, 1 << 24), *[peer.request(n, script) for n in streams])

        async def read_on(seconds: int) -> list[int]:
            rss = []
            for _ in range(seconds):
                await asyncio.sleep(1)
                rss.append(server.rss_bytes)
                peer.send(*[WindowUpdateFrame(n, 2010) for n in streams])
            return rss

        waiting, before = 0, -1
        while waiting != before:
            [filled] = await read_on(1)
            before, waiting = waiting, (await server.counts())["held"] >> 18
        async with neighbour(stub, pause_s=0.01) as beside:
            rss = await read_on(for_s)
            counts = await server.counts()
        print(
            f"{readers} slow readers for {for_s} s: memory {filled / _MIB:.1f} to "
            f"{rss[-1] / _MIB:.1f} MiB, {counts['held'] / _MIB:.1f} MiB of it waits; a neighbour: "
            f"{spread(alone)} alone, {spread(beside)} beside them"
        )
        assert counts["streams"] >= 2 * readers
        # A stream's window waits in the relay, and a little in the engine's server.
        assert counts["held"] < readers * (64 + 40) * _KIB
        assert rss[-1] - filled < 4 * _MIB
        assert percentile(beside, 0.5) < 10 * percentile(alone, 0.5)
        assert counts["slow_readers_cut"] == 0
        await peer.close()
        await server.at_rest()


async def test_the_reader_that_waits_longest_is_cut_when_all_have_too_much(hops: Hops) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    relay = await hops.relay(policy, limits=Limits(held_bytes=200 * _KIB, slow_reader_s=60))
    peer = await RawPeer.connect(address_of(relay), {SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    streams = range(1, 40, 2)
    peer.send(*[peer.request(n, Script(1000, 1000)) for n in streams])
    await until(lambda: relay.slow_readers_cut > 0)
    async with neighbour(hops.stub(relay)) as took:
        await until(lambda: len(took) > 20)
    assert relay.held.used_bytes <= 200 * _KIB
    await peer.close()
    await until(lambda: relay.in_flight == 0)
    assert relay.held.used_bytes == 0


async def test_requests_that_never_end_are_bounded_together(hops: Hops) -> None:
    engine = await hops.engine()
    relay = await hops.relay(
        RecordingPolicy([engine.address]), limits=Limits(request_bytes=2 * _MIB)
    )
    peer = await RawPeer.connect(address_of(relay))
    part = b"\0" + (15 * _MIB).to_bytes(4, "big") + b"x" * 16_000
    for stream_id in range(1, 2 * 200, 2):
        peer.send(peer.headers(stream_id), DataFrame(stream_id, part))
    await peer.flush()
    refused = await peer.answer(1 + 2 * 150)
    assert refused[0]["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert relay.requested.used_bytes <= 2 * _MIB
    await peer.close()
    await until(lambda: relay.requested.used_bytes == 0)
    assert await read_text(hops.stub(relay).Generate(Script().request())) == "abcde"


async def test_a_next_hop_that_takes_no_request_does_not_hold_its_callers_up(hops: Hops) -> None:
    async with raw_server({SettingsFrame.INITIAL_WINDOW_SIZE: 1000}) as (target, peers):
        policy = RecordingPolicy([target])
        relay = await hops.relay(policy)
        stub = hops.stub(relay)
        big = stub.Generate(Script().request(padding=100_000), timeout=0.5)
        failing = asyncio.create_task(read_text(big))
        peer = await within(peers.get())
        stalled = await peer.next(HeadersFrame)
        small = asyncio.create_task(read_text(stub.Generate(Script().request())))
        asked = await peer.next(HeadersFrame)
        answer = next(Script(1).answers()).SerializeToString()
        peer.send(peer.response(asked.stream_id, answer))
        assert await within(small) == "a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await failing
        assert from_rpc_error(caught.value).reason is Reason.DEADLINE_EXCEEDED
        await peer.next(RstStreamFrame, stream_id=stalled.stream_id)
        await until(lambda: relay.in_flight == 0)
