"""Frames, messages and answers that are not quite right harm their own connection or call alone."""

import asyncio
import contextlib
import gzip
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_wire.core.limits import Limits
from forebay_wire.policy import Head, Route
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.wire_tools import (
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
    undisturbed,
    until,
    wide_open,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(at_scale(120, 7200))]
_CALM = 11
_FRAMES_MAX = 50_000
Flood = Callable[[RawPeer], Iterator[bytes]]


@pytest.fixture(scope="module")
def quiet() -> dict[str, float]:
    """Limits under which what is left of an attack ends soon."""
    return {"slow_reader_s": 1.0}


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


async def _converse(server: Child, rng: random.Random, share: float) -> int:
    """Hold one conversation with this share of its frames mutated; answers how many were."""
    peer = await RawPeer.connect(server.address, first=PREFACE)
    frames = _conversation(peer, rng)
    mutated = 0
    for index, frame in enumerate(frames):
        if rng.random() < share:
            frames[index] = _mutated(rng, frame, frames)
            mutated += 1
    peer.send(*frames)
    await peer.flush()
    # The server gets to all of it before the connection is closed, or ends it itself.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(peer.ended.wait(), 0.001)
    await peer.close()
    return mutated


async def test_mutated_frames_harm_nobody_else(quiet: dict[str, float]) -> None:
    count = at_scale(10_000, 100_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sent = 0
    async with child(limits=quiet) as server:
        # The same load of valid frames is what a neighbour's time is to be compared with.
        async with undisturbed(server):
            for _ in range(at_scale(300, 3_000)):
                await _converse(server, rng, 0)
        async with undisturbed(server):
            while sent < count:
                sent += await _converse(server, rng, rng.choice((0.05, 0.2, 1.0)))
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
        async with undisturbed(server):
            await _send_messages(server, at_scale(1_000, 20_000), lambda payload: payload)
        async with undisturbed(server):
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
    count = at_scale(1_000, 20_000)
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
