"""Connections come, age, break and go, and calls do not notice where they need not."""

import asyncio
import contextlib
import signal
import time
from typing import Any

import grpc
import pytest
from forebay_common.errors import Reason, from_rpc_error
from forebay_wire.core.limits import Limits
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
)

from tests.wire_tools import (
    BOUND_S,
    Hops,
    RawPeer,
    RecordingPolicy,
    Script,
    address_of,
    at_scale,
    child,
    raw_server,
    read_text,
    until,
    within,
)

pytestmark = pytest.mark.integration
_REFUSED_STREAM = 7
_ANSWER = next(Script(1).answers()).SerializeToString()


async def _reason(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    return from_rpc_error(caught.value).reason


async def _request(peer: RawPeer) -> int:
    """Take a whole request; answers its stream."""
    got = await peer.next(HeadersFrame)
    while "END_STREAM" not in got.flags:
        got = await peer.next(DataFrame, stream_id=got.stream_id)
    stream_id: int = got.stream_id
    return stream_id


# --- The next hop says no -------------------------------------------------------------------------


async def test_a_refused_stream_is_sent_again_unseen(hops: Hops) -> None:
    async with raw_server() as (target, peers):
        policy = RecordingPolicy([target])
        call = hops.stub(await hops.relay(policy)).Generate(Script().request(), timeout=BOUND_S)
        reading = asyncio.create_task(read_text(call))
        peer = await within(peers.get())
        for _ in range(2):
            peer.send(RstStreamFrame(await _request(peer), _REFUSED_STREAM))
        peer.send(peer.response(await _request(peer), _ANSWER))
        assert await within(reading) == "a"
        assert policy.failures == []
        assert policy.outcomes == {"succeeded": 1}


async def test_a_peer_that_refuses_for_ever_is_a_lost_replica(hops: Hops) -> None:
    async with raw_server() as (target, peers):
        policy = RecordingPolicy([target])
        call = hops.stub(await hops.relay(policy)).Generate(Script().request(), timeout=BOUND_S)
        failing = asyncio.create_task(_reason(call))
        peer = await within(peers.get())
        for _ in range(6):
            peer.send(RstStreamFrame(await _request(peer), _REFUSED_STREAM))
        assert await within(failing) is Reason.REPLICA_LOST
        assert policy.failures == [Reason.REPLICA_LOST]


async def test_what_a_goaway_leaves_out_is_sent_again_and_the_rest_ends_where_it_is(
    hops: Hops,
) -> None:
    async with raw_server() as (target, peers):
        policy = RecordingPolicy([target])
        stub = hops.stub(await hops.relay(policy))
        calls = [asyncio.create_task(read_text(stub.Generate(Script().request())))]
        old = await within(peers.get())
        kept = await _request(old)
        calls.append(asyncio.create_task(read_text(stub.Generate(Script().request()))))
        await _request(old)
        old.send(GoAwayFrame(0, last_stream_id=kept))
        new = await within(peers.get())
        new.send(new.response(await _request(new), _ANSWER))
        assert await within(calls[1]) == "a"
        assert not old.ended.is_set()
        old.send(old.response(kept, _ANSWER))
        assert await within(calls[0]) == "a"
        await within(old.ended.wait())
        assert policy.failures == []
        assert policy.outcomes == {"succeeded": 2}


@pytest.mark.parametrize("kind", ["ours", "aio"])
async def test_more_calls_than_a_peer_allows_wait_for_their_turn(hops: Hops, kind: str) -> None:
    allowed = 3
    engine = await hops.engine(
        kind,
        limits=Limits(streams=allowed),
        options=(("grpc.max_concurrent_streams", allowed),),
    )
    policy = RecordingPolicy([engine.address])
    server = await hops.relay(policy)
    stub = hops.stub(server)
    most = 0

    async def ask() -> str:
        nonlocal most
        call = stub.Generate(Script(3, gap_s=0.005).request(), timeout=BOUND_S)
        text = ""
        async for part in call:
            text += part.text_delta
            most = max(most, engine.seen.open)
        return text

    assert await asyncio.gather(*[ask() for _ in range(60)]) == ["abc"] * 60
    assert 1 < most <= allowed * Limits().connections_per_peer
    assert policy.failures == []


async def test_a_caller_who_leaves_the_wait_for_a_stream_frees_its_place(hops: Hops) -> None:
    engine = await hops.engine(limits=Limits(streams=1))
    policy = RecordingPolicy([engine.address])
    pool = hops.pool(Limits(connections_per_peer=1))
    stub = hops.stub(await hops.relay(policy, pool=pool))
    first = stub.Generate(Script(1, hangs=True).request())
    await first.read()
    second = stub.Generate(Script().request())
    third = asyncio.create_task(read_text(stub.Generate(Script().request())))
    await until(lambda: policy.admitted == 3)
    second.cancel()
    await until(lambda: policy.outcomes.get("cancelled") == 1)
    first.cancel()
    assert await within(third) == "abcde"
    assert engine.seen.calls == 2


async def test_our_server_refuses_streams_over_its_limit_and_keeps_the_rest(hops: Hops) -> None:
    engine = await hops.engine(limits=Limits(streams=2))
    peer = await RawPeer.connect(engine.address)
    script = Script(1, hangs=True)
    peer.send(peer.request(1, script), peer.request(3, script), peer.request(5, script))
    refused = await peer.next(RstStreamFrame)
    assert (refused.stream_id, refused.error_code) == (5, _REFUSED_STREAM)
    peer.send(RstStreamFrame(1, 8), peer.request(7, Script(1)))
    fields, _ = await peer.answer(7)
    assert fields["grpc-status"] == "0"
    await peer.close()


async def test_clients_of_grpcio_keep_our_stream_limit(hops: Hops) -> None:
    engine = await hops.engine(limits=Limits(streams=4))
    stub = hops.stub(engine.address)
    request = Script(3, gap_s=0.005).request()
    texts = await asyncio.gather(*[read_text(stub.Generate(request)) for _ in range(60)])
    assert texts == ["abc"] * 60


# --- Age and idleness -----------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["relay", "grpcio"])
async def test_no_call_fails_while_connections_are_renewed(hops: Hops, client: str) -> None:
    limits = Limits(connection_age_s=0.3, connection_age_grace_s=30)
    engine = await hops.engine(limits=limits)
    policy = RecordingPolicy([engine.address], keeps=False)
    relay = await hops.relay(policy)
    # At a GOAWAY C-core takes back what it has not written yet, and sends it again if it may.
    retries = (("grpc.enable_retries", 1),)
    stub = hops.stub(relay if client == "relay" else engine.address, options=retries)
    server = engine.server
    assert server is not None
    made: set[Any] = set()
    long_streams = [
        asyncio.create_task(read_text(stub.Generate(Script(200, gap_s=0.01).request())))
        for _ in range(5)
    ]
    ends_s = time.monotonic() + at_scale(2, 60)

    async def ask() -> int:
        count = 0
        while time.monotonic() < ends_s:
            assert await read_text(stub.Generate(Script(3).request(), timeout=BOUND_S)) == "abc"
            made.update(server._wires.all)
            await asyncio.sleep(0.002)
            count += 1
        return count

    counts = await asyncio.gather(*[ask() for _ in range(4)])
    assert await asyncio.gather(*long_streams) == [Script(200).text] * 5
    print(f"{sum(counts)} calls over {len(made)} connections")
    assert len(made) >= 3
    assert set(policy.outcomes) <= {"succeeded"}


async def test_a_stream_that_outlives_the_grace_is_ended_with_a_status(hops: Hops) -> None:
    limits = Limits(connection_age_s=0.1, connection_age_grace_s=0.2)
    engine = await hops.engine(limits=limits)
    call = hops.stub(engine.address).Generate(Script(1, hangs=True).request())
    assert await within(_reason(call)) is Reason.DRAINING
    await within(engine.seen.cancelled.wait())


async def test_an_idle_connection_is_closed_and_made_anew_when_needed(hops: Hops) -> None:
    engine = await hops.engine()
    assert engine.server is not None
    server = engine.server
    policy = RecordingPolicy([engine.address])
    pool = hops.pool(Limits(idle_s=0.1))
    stub = hops.stub(await hops.relay(policy, pool=pool))
    for _ in range(2):
        assert await read_text(stub.Generate(Script().request())) == "abcde"
        assert server.connections == 1
        await until(lambda: server.connections == 0)
        await until(lambda: pool.connections == 0)
    assert policy.failures == []


async def test_a_peer_that_is_not_retained_ends_when_its_calls_have(hops: Hops) -> None:
    engine, other = await hops.engine(), await hops.engine()
    assert engine.server is not None
    pool = hops.pool()
    relayed = hops.stub(await hops.relay(RecordingPolicy([engine.address]), pool=pool))
    call = relayed.Generate(Script(40, gap_s=0.005).request())
    await call.read()
    pool.retain([other.address])
    while (await call.read()) is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK
    await until(lambda: pool.connections == 0)
    endless = relayed.Generate(Script(1, hangs=True).request())
    await endless.read()
    pool.retain([], grace_s=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await endless.read()
    assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST


# --- Drain ----------------------------------------------------------------------------------------


async def test_a_drain_says_so_lets_streams_end_and_sends_callers_elsewhere(hops: Hops) -> None:
    policy = RecordingPolicy([(await hops.engine()).address])
    server = await hops.relay(policy)
    address = address_of(server)
    peer = await RawPeer.connect(address)
    script = Script(25, gap_s=0.1)
    peer.send(peer.request(1, script))
    await peer.next(DataFrame)
    stub = hops.stub(server)
    call = stub.Generate(script.request())
    await call.read()
    draining = asyncio.create_task(server.drain(BOUND_S))
    first = await peer.next(GoAwayFrame)
    assert (first.error_code, first.last_stream_id) == (0, 2**31 - 1)
    second = await peer.next(GoAwayFrame)
    assert (second.error_code, second.last_stream_id) == (0, 1)
    # What comes behind the last stream that counts is not answered; the client sends it elsewhere.
    peer.send(peer.request(3, Script()))
    while (await call.read()) is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK
    fields, _ = await peer.answer(1)
    assert fields["grpc-status"] == "0"
    await within(draining)
    await within(peer.ended.wait())
    assert policy.admitted == 2
    code = await _reason(stub.Generate(Script().request()))
    assert code in (Reason.DRAINING, Reason.REPLICA_LOST)
    await peer.close()


async def test_a_drain_ends_what_outlasts_its_grace_with_a_status(hops: Hops) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    server = await hops.relay(policy)
    stub = hops.stub(server)
    calls = [stub.Generate(Script(number, hangs=True).request()) for number in (0, 1)]
    await until(lambda: engine.seen.open == 2)
    await within(server.drain(0.2))
    assert [await _reason(call) for call in calls] == [Reason.DRAINING] * 2
    assert policy.outcomes == {"cancelled": 2}
    await until(lambda: engine.seen.open == 0)


async def test_a_next_hop_that_drains_is_left_without_a_failure(hops: Hops) -> None:
    engine = await hops.engine()
    assert engine.server is not None
    policy = RecordingPolicy([engine.address])
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script(30, gap_s=0.01).request())
    await call.read()
    draining = asyncio.create_task(engine.server.drain(BOUND_S))
    assert await within(_reason(stub.Generate(Script().request()))) in (
        Reason.DRAINING,
        Reason.REPLICA_LOST,
    )
    while (await call.read()) is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK
    await within(draining)


# --- Loss -----------------------------------------------------------------------------------------


async def test_a_next_hop_that_dies_fails_its_streams_at_once_and_may_return(hops: Hops) -> None:
    async with child("engine") as engine:
        policy = RecordingPolicy([engine.address])
        stub = hops.stub(await hops.relay(policy))
        calls = [stub.Generate(Script(1, hangs=True).request()) for _ in range(50)]
        await asyncio.gather(*[call.read() for call in calls])
        engine.process.send_signal(signal.SIGKILL)
        started = time.monotonic()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
        assert time.monotonic() - started < 1.0
        assert policy.outcomes == {"failed": 50}
    returned = await hops.engine(address=engine.address)
    # Right after a failed attempt the relay answers without another; that wait is short.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await read_text(stub.Generate(Script().request()))

    async def is_back() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await read_text(stub.Generate(Script().request())) == "abcde"
        return False

    async with asyncio.timeout(BOUND_S):
        while not await is_back():
            await asyncio.sleep(0.02)
    assert returned.seen.calls > 0
