"""What is aborted, ended or idle leaves nothing behind, and costs no more than it should."""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable

import pytest
from forebay_common.errors import ForebayError
from forebay_common.metadata import Metadata
from forebay_wire.core.limits import Limits
from forebay_wire.policy import Head, Method
from forebay_wire.relay import Call, Relay

from tests.wire_tools import (
    Child,
    Hops,
    RawPeer,
    RecordingPolicy,
    Script,
    at_scale,
    child,
    open_files,
    rss_bytes,
    until,
    within,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(at_scale(120, 7200))]
_MIB = 1 << 20
_HEAD = Head(Method.GENERATE, {}, None, "r1")


class _Caller:
    """Counts what it is told."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.begins = 0
        self.endings = 0
        self.failed: ForebayError | None = None
        self._ended = ended

    def begin(self, call: Call) -> None:
        self.begins += 1

    def forward(self, data: bytes, start: int, end: int) -> None:
        assert self.begins == 1

    def finish(self, trailing: Metadata) -> None:
        self.endings += 1
        self._ended()

    def fail(self, error: ForebayError, trailing: Metadata) -> None:
        self.endings += 1
        self.failed = error
        self._ended()


def _assert_nothing_is_left(before: dict[str, int], after: dict[str, int]) -> None:
    """Two looks at a process at rest, between which much has happened."""
    print(f"before: {before}\nafter: {after}")
    assert after["tasks"] <= before["tasks"] + 2
    assert after["timers"] <= before["timers"] + 4
    assert after["files"] <= before["files"] + 2
    # Caches of header blocks fill; what grew with the number of requests would be far more.
    assert after["objects"] < before["objects"] + 5000


async def test_aborts_at_any_moment_leave_nothing_behind(hops: Hops) -> None:
    count = at_scale(1_000, 10_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    scripts = (Script(0, hangs=True), Script(1, hangs=True), Script(20, gap_s=0.001), Script(500))
    requests = [script.request() for script in scripts]
    async with child(limits={"nuisances": 10**6}) as server:
        stub = hops.stub(server.address)

        async def abort(times: int) -> None:
            for _ in range(times):
                metadata = rng.choice(((), (), (("wait", "0.004"),), (("wait", "60"),)))
                call = stub.Generate(rng.choice(requests), metadata=metadata)
                reading = asyncio.ensure_future(call.read())
                await asyncio.sleep(rng.uniform(0, 0.012))
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reading

        async def abort_all(times: int) -> None:
            await asyncio.gather(*[abort(times // 25) for _ in range(25)])

        await abort_all(250)
        before = await server.at_rest()
        files = open_files()
        await abort_all(count)
        after = await server.at_rest()
        _assert_nothing_is_left(before, after)
        assert open_files() <= files + 5
        assert after["cancelled"] > before["cancelled"] + count // 4


async def test_connections_that_break_leave_nothing_behind() -> None:
    count = at_scale(100, 2_000)
    async with child() as server:

        async def break_off(times: int) -> None:
            for number in range(times):
                peer = await RawPeer.connect(server.address)
                scripts = (Script(0, hangs=True), Script(1000, 100), Script(1))
                peer.send(*[peer.request(1 + 2 * n, scripts[n % 3]) for n in range(9)])
                peer.send(peer.headers(101), peer.request(103, Script(1))[: number % 60])
                if number % 2:
                    await peer.next()
                await peer.flush()
                await peer.close()

        await break_off(20)
        before = await server.at_rest()
        await break_off(count)
        _assert_nothing_is_left(before, await server.at_rest())


async def test_requests_with_aborts_keep_memory_flat(hops: Hops) -> None:
    """The client is ours, too, so that both ends are watched."""
    count, warm_up = at_scale(5_000, 1_000_000), at_scale(4_000, 50_000)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    message = Script(3).request().SerializeToString()
    async with child(limits={"nuisances": 10**6, "nuisances_per_s": 1e6}) as server:
        policy = RecordingPolicy([server.address], keeps=False)
        relay = Relay(policy, hops.pool())

        async def ask(times: int) -> None:
            ended = asyncio.Event()
            for _ in range(times):
                ended.clear()
                caller = _Caller(ended.set)
                call = relay.call(_HEAD, message, caller)
                if rng.random() < 0.1:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                    call.cancel()
                    assert caller.endings <= 1
                    continue
                await within(ended.wait(), 60)
                assert (caller.begins, caller.endings, caller.failed) == (1, 1, None)

        async def ask_all(times: int) -> None:
            await asyncio.gather(*[ask(times // 50) for _ in range(50)])

        await ask_all(warm_up)
        before, own = await server.at_rest(), rss_bytes(os.getpid())
        rss = server.rss_bytes
        await ask_all(count)
        after = await server.at_rest()
        growth, own_growth = server.rss_bytes / rss - 1, rss_bytes(os.getpid()) / own - 1
        print(
            f"{count} requests, {policy.outcomes}: server {rss / _MIB:.1f} MiB, "
            f"{growth:+.1%}; client {own / _MIB:.1f} MiB, {own_growth:+.1%}"
        )
        _assert_nothing_is_left(before, after)
        assert growth < 0.05
        assert own_growth < 0.05
        assert policy.in_flight == 0
        assert policy.outcomes["cancelled"] > count / 20


async def _measured(server: Child, count: int, rss: int) -> str:
    return f"{(server.rss_bytes - rss) / count:.0f} bytes per stream"


async def test_idle_streams_are_cheap_and_all_end(hops: Hops) -> None:
    count = at_scale(1_000, 10_000)
    limits = {"pending_per_peer": 2 * count, "connections_per_peer": 16}
    async with (
        child("engine", limits=limits) as engine,
        child("relay", target=engine.address, limits=limits) as server,
    ):
        policy = RecordingPolicy([server.address], keeps=False)
        pool = hops.pool(Limits(pending_per_peer=2 * count, connections_per_peer=16))
        relay = Relay(policy, pool)
        message = Script(1, hangs=True).request().SerializeToString()

        async def open_streams(number: int) -> list[Call]:
            callers = [_Caller(lambda: None) for _ in range(number)]
            calls = [relay.call(_HEAD, message, caller) for caller in callers]
            await until(lambda: all(caller.begins for caller in callers), 120)
            return calls

        # What is made once must not be counted.
        for call in await open_streams(200):
            call.cancel()
        await server.at_rest()
        await engine.at_rest()
        at_relay, at_engine = server.rss_bytes, engine.rss_bytes
        calls = await open_streams(count)
        counts = await server.counts()
        assert counts["streams"] == counts["pool_streams"] == counts["admitted"] == count
        print(
            f"{count} idle streams: relay {await _measured(server, count, at_relay)}, "
            f"engine {await _measured(engine, count, at_engine)}"
        )
        assert (server.rss_bytes - at_relay) / count < 40_000
        for call in calls:
            call.cancel()
        await server.at_rest()
        await engine.at_rest()
        assert pool.streams == 0
