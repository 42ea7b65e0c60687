"""Peers that mean harm, or are broken: they lose their own connection, and nobody else notices."""

import asyncio
import contextlib
import gzip
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_wire.core.limits import Limits
from forebay_wire.policy import Head, Route
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.wire_tools import (
    BOUND_S,
    EMBED,
    GENERATE,
    PREFACE,
    Child,
    Hops,
    RawPeer,
    RecordingPolicy,
    Script,
    at_scale,
    child,
    framed,
    neighbour,
    raw_server,
    spread,
    until,
    wide_open,
    within,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(at_scale(120, 7200))]
_MIB = 1 << 20
_CALM = 11
_FRAMES_MAX = 50_000
Flood = Callable[[RawPeer], Iterator[bytes]]


@contextlib.asynccontextmanager
async def _beside(server: Child) -> AsyncIterator[None]:
    """Another client, in a process of its own, calls meanwhile and has all its calls answered;
    nothing stays behind, and memory keeps its bounds."""
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


# --- Floods ---------------------------------------------------------------------------------------


def _rapid_resets(peer: RawPeer) -> Iterator[bytes]:
    for stream_id in itertools.count(1, 2):
        yield peer.request(stream_id, Script(1, hangs=True))
        yield RstStreamFrame(stream_id, 8).serialize()


def _resets_that_we_are_made_to_send(peer: RawPeer) -> Iterator[bytes]:
    for stream_id in itertools.count(1, 2):
        yield peer.request(stream_id, Script(1, hangs=True))
        yield WindowUpdateFrame(stream_id, 1).serialize()[:-4] + bytes(4)


def _overflowing_windows(peer: RawPeer) -> Iterator[bytes]:
    for stream_id in itertools.count(1, 2):
        yield peer.request(stream_id, Script(1, hangs=True))
        yield WindowUpdateFrame(stream_id, 2**31 - 1).serialize()


def _malformed_requests(peer: RawPeer) -> Iterator[bytes]:
    for stream_id in itertools.count(1, 2):
        block = peer.encoder.encode([("bad Name", "x")])
        yield HeadersFrame(stream_id, block, flags=["END_HEADERS"]).serialize()


def _continuations(peer: RawPeer) -> Iterator[bytes]:
    block = peer.encoder.encode([("x" * 100, "y" * 100)])
    yield HeadersFrame(1, block).serialize()
    while True:
        yield ContinuationFrame(1, block).serialize()


def _empty_continuations(peer: RawPeer) -> Iterator[bytes]:
    yield HeadersFrame(1, b"").serialize()
    while True:
        yield ContinuationFrame(1, b"").serialize()


def _large_header_blocks(peer: RawPeer) -> Iterator[bytes]:
    part = peer.encoder.encode([("x", "y" * 16_000)])
    for stream_id in itertools.count(1, 2):
        yield HeadersFrame(stream_id, part).serialize()
        for _ in range(40):
            yield ContinuationFrame(stream_id, part).serialize()


def _pings(peer: RawPeer) -> Iterator[bytes]:
    yield from itertools.repeat(PingFrame(0, b"12345678").serialize())


def _ping_acknowledgements(peer: RawPeer) -> Iterator[bytes]:
    yield from itertools.repeat(PingFrame(0, b"12345678", flags=["ACK"]).serialize())


def _settings(peer: RawPeer) -> Iterator[bytes]:
    for number in itertools.count():
        yield SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: number % 100_000}).serialize()


def _settings_acknowledgements(peer: RawPeer) -> Iterator[bytes]:
    yield from itertools.repeat(SettingsFrame(0, flags=["ACK"]).serialize())


def _empty_data(peer: RawPeer) -> Iterator[bytes]:
    yield peer.headers(1).serialize()
    yield from itertools.repeat(DataFrame(1, b"").serialize())


def _padding(peer: RawPeer) -> Iterator[bytes]:
    yield peer.headers(1).serialize()
    yield from itertools.repeat(DataFrame(1, b"", pad_length=0, flags=["PADDED"]).serialize())


def _priorities(peer: RawPeer) -> Iterator[bytes]:
    for number in itertools.count():
        yield PriorityFrame(1 + 2 * (number % 1000), depends_on=0, stream_weight=1).serialize()


def _window_updates(peer: RawPeer) -> Iterator[bytes]:
    yield peer.request(1, Script(0, hangs=True))
    for number in itertools.count():
        yield WindowUpdateFrame(number % 2, 1).serialize()


def _unknown_frames(peer: RawPeer) -> Iterator[bytes]:
    yield from itertools.repeat(b"\0\0\0\xee\0\0\0\0\0")


def _resets_of_nothing(peer: RawPeer) -> Iterator[bytes]:
    yield peer.request(1, Script(0))
    yield from itertools.repeat(RstStreamFrame(1, 8).serialize())


def _data_for_nothing(peer: RawPeer) -> Iterator[bytes]:
    yield peer.request(1, Script(0))
    yield from itertools.repeat(DataFrame(1, b"x").serialize())


_FLOODS: list[Flood] = [
    _rapid_resets,
    _resets_that_we_are_made_to_send,
    _overflowing_windows,
    _malformed_requests,
    _continuations,
    _empty_continuations,
    _large_header_blocks,
    _pings,
    _ping_acknowledgements,
    _settings,
    _settings_acknowledgements,
    _empty_data,
    _padding,
    _priorities,
    _window_updates,
    _unknown_frames,
    _resets_of_nothing,
]
# Looks like what may be under way when a stream is reset, and costs no more than data that counts.
_BORNE: list[Flood] = [_data_for_nothing]


async def _flood(server: Child, flood: Flood) -> tuple[int, RawPeer]:
    """Send until the connection ends; answers how much that took."""
    peer = await RawPeer.connect(server.address)
    await peer.next(SettingsFrame)
    frames = flood(peer)
    sent = 0
    while not peer.ended.is_set() and sent < _FRAMES_MAX:
        peer.send(*itertools.islice(frames, 200))
        sent += 200
        await peer.flush()
        peer.received.clear()
        await asyncio.sleep(0)
    return sent, peer


@pytest.fixture(scope="module")
def quiet() -> dict[str, float]:
    """Limits under which what is left of an attack ends soon."""
    return {"slow_reader_s": 1.0}


async def test_floods_end_their_own_connection(quiet: dict[str, float]) -> None:
    async with child(limits=quiet) as server, _beside(server):
        for flood in _FLOODS:
            sent, peer = await _flood(server, flood)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.ended.wait(), 1)
            assert peer.ended.is_set(), f"{flood.__name__} goes on after {sent} frames"
            code = peer.goaway.error_code if peer.goaway is not None else None
            print(f"{flood.__name__}: cut within {sent} frames, GOAWAY {code}")
            await peer.close()


async def test_what_may_have_been_under_way_is_borne(quiet: dict[str, float]) -> None:
    async with child(limits=quiet) as server, _beside(server):
        for flood in _BORNE:
            sent, peer = await _flood(server, flood)
            print(f"{flood.__name__}: borne for {sent} frames")
            await peer.close()


async def test_a_flood_from_many_connections_leaves_the_others_alone(
    quiet: dict[str, float],
) -> None:
    async with child(limits=quiet) as server, _beside(server):
        floods = [_flood(server, flood) for flood in (_rapid_resets, _pings, _settings) * 5]
        for _, peer in await asyncio.gather(*floods):
            await within(peer.ended.wait())
            await peer.close()


async def test_large_answers_for_windows_of_nothing_are_bounded(quiet: dict[str, float]) -> None:
    limits = {**quiet, "held_bytes": 8 * _MIB}
    async with child(limits=limits) as server, _beside(server):
        peers = []
        for _ in range(5):
            peer = await RawPeer.connect(server.address, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
            script = Script(10_000, 10_000)
            for stream_id in range(1, 400, 2):
                peer.send(peer.request(stream_id, script))
            peers.append(peer)
        cut = 0
        async with asyncio.timeout(BOUND_S):
            while cut < 5 * 200:
                await asyncio.sleep(0.1)
                counts = await server.counts()
                assert counts["held"] < 17 * _MIB, "relay and engine have a budget each"
                cut = counts["slow_readers_cut"]
        for peer in peers:
            await peer.close()


async def test_a_client_that_reads_nothing_at_all_is_cut(quiet: dict[str, float]) -> None:
    async with child(limits=quiet) as server, _beside(server):
        peer = await RawPeer.connect(server.address, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1})
        wide_open(peer)
        await peer.next(SettingsFrame)
        peer.stop_reading()
        for stream_id in range(1, 100, 2):
            peer.send(peer.request(stream_id, Script(10_000, 10_000)))
        before = (await server.counts())["connections"]
        async with asyncio.timeout(BOUND_S):
            while (await server.counts())["connections"] >= before:
                await asyncio.sleep(0.05)
        await peer.close()


# --- Mutations ------------------------------------------------------------------------------------


def _mutated(rng: random.Random, frame: bytes, others: list[bytes]) -> bytes:
    """A frame that is not quite the one it was."""
    changed = bytearray(frame)
    if len(changed) < 9:
        return rng.randbytes(9)
    way = rng.randrange(9)
    if way == 0:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif way == 1:
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif way == 2:
        changed[3] = rng.randrange(12)
    elif way == 3:
        changed[4] = rng.randrange(256)
    elif way == 4:
        changed[5:9] = rng.choice((0, 1, 2, 3, 99, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big")
    elif way == 5:
        changed[:3] = rng.choice((0, 1, 5, 8, 16384, 16385, 2**24 - 1)).to_bytes(3, "big")
    elif way == 6:
        del changed[rng.randrange(len(changed)) :]
    elif way == 7:
        at = rng.randrange(len(changed))
        changed[at:at] = rng.randbytes(rng.randrange(1, 20))
    else:
        # The payload of one under the head of another, with the right length.
        other = rng.choice(others)
        changed = bytearray(len(other[9:]).to_bytes(3, "big") + frame[3:9] + other[9:])
    return bytes(changed)


def _conversation(peer: RawPeer, rng: random.Random) -> list[bytes]:
    """Valid frames of a client, in order."""
    request = framed(pb.EmbedRequest(model="m" * rng.randrange(50)).SerializeToString())
    frames = [
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 10_000}).serialize(),
        WindowUpdateFrame(0, 1000).serialize(),
    ]
    for stream_id in range(1, 1 + 2 * rng.randrange(1, 6), 2):
        half = len(request) // 2
        head = peer.headers(stream_id, ("x-a", "b" * 20), path=EMBED)
        frames += [
            head.serialize(),
            DataFrame(stream_id, request[:half], pad_length=3, flags=["PADDED"]).serialize(),
            WindowUpdateFrame(stream_id, 10).serialize(),
            DataFrame(stream_id, request[half:], flags=["END_STREAM"]).serialize(),
            PriorityFrame(stream_id, depends_on=0, stream_weight=5).serialize(),
            PingFrame(0, b"12345678").serialize(),
        ]
    frames += [RstStreamFrame(1, 8).serialize(), peer.headers(99, path=EMBED).serialize()]
    return frames


async def test_mutated_frames_harm_nobody_else(quiet: dict[str, float]) -> None:
    count = at_scale(10_000, 100_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sent = 0
    async with child(limits=quiet) as server, _beside(server):
        while sent < count:
            peer = await RawPeer.connect(server.address, first=PREFACE)
            frames = _conversation(peer, rng)
            share = rng.choice((0.05, 0.2, 1.0))
            for index, frame in enumerate(frames):
                if rng.random() < share:
                    frames[index] = _mutated(rng, frame, frames)
                    sent += 1
            peer.send(*frames)
            await peer.flush()
            # The server gets to all of it before the connection is closed, or ends it itself.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.ended.wait(), 0.003)
            await peer.close()
        print(f"{sent} mutated frames")


def _damaged(rng: random.Random, payload: bytes) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        payload = _mutated(rng, payload, [payload])
    return payload


async def _send_messages(
    server: Child, count: int, change: Callable[[bytes], bytes]
) -> dict[str, int]:
    """Send requests, some of them compressed, fifty at a time; answers how often each ended how."""
    valid = pb.EmbedRequest(model="model").SerializeToString() * 3
    rng = random.Random(count)
    endings: dict[str, int] = {}
    peer = await RawPeer.connect(server.address)
    wide_open(peer)
    for first in range(1, 2 * count, 100):
        for stream_id in range(first, first + 100, 2):
            encoding = rng.choice(("gzip", "gzip", "identity"))
            is_compressed = encoding == "gzip"
            message = gzip.compress(valid, 1) if is_compressed else valid
            payload = change(framed(message, compressed=is_compressed))
            head = peer.headers(stream_id, ("grpc-encoding", encoding), path=EMBED)
            peer.send(head, DataFrame(stream_id, payload, flags=["END_STREAM"]))
        for stream_id in range(first, first + 100, 2):
            fields, _ = await peer.answer(stream_id)
            ending = fields.get("grpc-status", f"reset {fields.get('rst')}")
            endings[ending] = endings.get(ending, 0) + 1
        await asyncio.sleep(0.005)
    assert not peer.ended.is_set()
    await peer.close()
    return endings


async def test_mutated_messages_get_a_status_each(quiet: dict[str, float]) -> None:
    count = at_scale(3_000, 100_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    async with child(limits=quiet) as server:
        # The same load of valid messages is what a neighbour's time is to be compared with.
        async with _beside(server):
            await _send_messages(server, at_scale(1_000, 20_000), lambda payload: payload)
        async with _beside(server):
            endings = await _send_messages(server, count, lambda payload: _damaged(rng, payload))
    print(f"{count} mutated messages ended with {endings}")
    assert sum(endings.values()) >= count
    # OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNSUPPORTED, INTERNAL
    assert set(endings) <= {"0", "3", "8", "9", "12", "13"}


class _TwoTargets(RecordingPolicy):
    """Sends requests where their id says."""

    bad = ""

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        route = self._route(head)
        if head.request_id == "bad":
            return Route(self.bad, route.metadata, route.deadline)
        return route


async def test_mutated_answers_fail_their_own_calls_alone(hops: Hops) -> None:
    count = at_scale(1_000, 100_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sent = 0
    engine = await hops.engine()
    policy = _TwoTargets([engine.address], keeps=False)
    limits = Limits(connect_timeout_s=0.5)
    relay = await hops.relay(policy, pool=hops.pool(limits))
    answer = next(Script(1, 30).answers()).SerializeToString()

    async with raw_server() as (target, peers):
        policy.bad = target

        async def serve(peer: RawPeer) -> None:
            nonlocal sent
            with contextlib.suppress(EOFError, TimeoutError):
                while True:
                    stream_id = (await peer.next(HeadersFrame)).stream_id
                    whole = peer.response(stream_id, answer, answer)
                    frames, at = [], 0
                    while at < len(whole):
                        length = 9 + int.from_bytes(whole[at : at + 3], "big")
                        frames.append(whole[at : at + length])
                        at += length
                    which = rng.randrange(len(frames))
                    frames[which] = _mutated(rng, frames[which], frames)
                    sent += 1
                    peer.send(*frames)

        async def accept() -> None:
            async with asyncio.TaskGroup() as serving:
                while True:
                    serving.create_task(serve(await peers.get()))

        accepting = asyncio.create_task(accept())
        stub = hops.stub(relay)
        # What reaches the caller need not be a message any more.
        raw: Any = hops.channel(relay).unary_stream(GENERATE)
        request = Script().request().SerializeToString()
        endings: dict[grpc.StatusCode, int] = {}

        async def ask() -> None:
            while sent < count:
                call = raw(request, timeout=0.2, metadata=(("x-request-id", "bad"),))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                code = await call.code()
                endings[code] = endings.get(code, 0) + 1

        async with neighbour(stub, pause_s=0.005) as took:
            await asyncio.gather(*[ask() for _ in range(20)])
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
    await until(lambda: relay.in_flight == 0)
    assert policy.in_flight == 0
    names = {code.name: times for code, times in endings.items()}
    print(f"{sent} mutated answers: {names}; beside: {spread(took)}")
