"""Peers that fall silent are noticed, and peers that are silent for a reason are left alone."""

import asyncio
import signal
import time
from typing import Any

import grpc
import pytest
from forebay_common.errors import Reason, from_rpc_error
from forebay_wire.core.limits import Limits
from hyperframe.frame import (
    SettingsFrame,
)

from tests.wire_tools import (
    Hops,
    RawPeer,
    RecordingPolicy,
    Script,
    at_scale,
    child,
    read_text,
    until,
    within,
)

pytestmark = pytest.mark.integration


async def _reason(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    return from_rpc_error(caught.value).reason


async def test_a_frozen_next_hop_is_noticed_by_its_silence(hops: Hops) -> None:
    limits = Limits(keepalive_s=0.5, keepalive_timeout_s=0.5)
    async with child("engine") as engine:
        policy = RecordingPolicy([engine.address])
        stub = hops.stub(await hops.relay(policy, pool=hops.pool(limits)))
        calls = [stub.Generate(Script(number, hangs=True).request()) for number in (0, 1)]
        await calls[1].read()
        await until(lambda: policy.admitted == 2)
        engine.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert await within(_reason(calls[0])) is Reason.REPLICA_LOST
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls[1].read()
        assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
        took_s = time.monotonic() - started
        print(f"noticed after {took_s:.2f} s")
        # Time is looked at every half a second.
        assert took_s < 0.5 + 0.5 + 3 * 0.5
        engine.process.send_signal(signal.SIGCONT)


async def test_a_frozen_client_is_noticed_by_its_silence(hops: Hops) -> None:
    limits = Limits(keepalive_s=0.5, keepalive_timeout_s=0.5)
    engine = await hops.engine(limits=limits)
    assert engine.server is not None
    async with child("relay", target=engine.address) as relay:
        call = hops.stub(relay.address).Generate(Script(1, hangs=True).request())
        await call.read()
        relay.process.send_signal(signal.SIGSTOP)
        await within(engine.seen.cancelled.wait())
        assert engine.server.in_flight == 0
        relay.process.send_signal(signal.SIGCONT)


async def test_our_pings_never_trip_a_server_that_counts_them(hops: Hops) -> None:
    # By default such a server ends the connection at the third ping within five minutes without
    # data in between.
    limits = Limits(keepalive_s=0.1, keepalive_timeout_s=5)

    async def ask(kind: str) -> None:
        engine = await hops.engine(kind)
        policy = RecordingPolicy([engine.address])
        stub = hops.stub(await hops.relay(policy, pool=hops.pool(limits)))
        silent = stub.Generate(Script(1, gap_s=at_scale(3, 60)).request())
        slow = stub.Generate(Script(3, gap_s=0.9).request())
        assert await read_text(slow) == "abc"
        assert await read_text(silent) == "a"
        assert policy.failures == []

    await asyncio.gather(*[ask(kind) for kind in ("aio", "sync", "ours")])


async def test_settings_that_are_never_acknowledged_end_the_connection(hops: Hops) -> None:
    engine = await hops.engine(limits=Limits(settings_timeout_s=0.5))
    peer = await RawPeer.connect(engine.address, acknowledges=False)
    await peer.next(SettingsFrame)
    await within(peer.ended.wait())
    assert peer.goaway is not None
    assert peer.goaway.error_code == 4
    await peer.close()
