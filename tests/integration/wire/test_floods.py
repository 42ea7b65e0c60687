"""Floods and readers of nothing: whoever sends them is cut, and nobody else notices."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
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
    Child,
    RawPeer,
    Script,
    at_scale,
    child,
    undisturbed,
    wide_open,
    within,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(at_scale(120, 7200))]
_MIB = 1 << 20
_CALM = 11
_FRAMES_MAX = 50_000
Flood = Callable[[RawPeer], Iterator[bytes]]


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
    async with child(limits=quiet) as server, undisturbed(server):
        for flood in _FLOODS:
            sent, peer = await _flood(server, flood)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.ended.wait(), 1)
            assert peer.ended.is_set(), f"{flood.__name__} goes on after {sent} frames"
            code = peer.goaway.error_code if peer.goaway is not None else None
            print(f"{flood.__name__}: cut within {sent} frames, GOAWAY {code}")
            await peer.close()


async def test_what_may_have_been_under_way_is_borne(quiet: dict[str, float]) -> None:
    async with child(limits=quiet) as server, undisturbed(server):
        for flood in _BORNE:
            sent, peer = await _flood(server, flood)
            print(f"{flood.__name__}: borne for {sent} frames")
            await peer.close()


async def test_a_flood_from_many_connections_leaves_the_others_alone(
    quiet: dict[str, float],
) -> None:
    async with child(limits=quiet) as server, undisturbed(server):
        floods = [_flood(server, flood) for flood in (_rapid_resets, _pings, _settings) * 5]
        for _, peer in await asyncio.gather(*floods):
            await within(peer.ended.wait())
            await peer.close()


async def test_large_answers_for_windows_of_nothing_are_bounded(quiet: dict[str, float]) -> None:
    limits = {**quiet, "held_bytes": 8 * _MIB}
    async with child(limits=limits) as server, undisturbed(server):
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
    async with child(limits=quiet) as server, undisturbed(server):
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
