"""What a batcher tells of its runners' prefix caches, and of the prompts that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay_batcher.__main__ import serve
from forebay_batcher.config import Config
from forebay_common.cache_feed import CacheFeed, CacheService
from forebay_common.channel import connect
from forebay_common.config import CommonConfig
from forebay_common.prefixes import prefix_hashes
from forebay_common.prompts import generate_prompt
from forebay_common.server import Server

from tests.cache_watch import CacheView, watched
from tests.engine_host import EngineHost, a_spec, running_host

from .conftest import CHAT, Host, Runner, Running, Start, loaded, within

pytestmark = pytest.mark.integration

TINY, OTHER = "tiny@1", "other@1"
TEXT = "the river flows into the lake and the mill turns. " * 80


# --- A real engine host and its runners, each in a process of its own -----------------------------


@pytest.fixture
async def engine_host() -> AsyncIterator[EngineHost]:
    """A host with two simulated versions."""
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        specs = [a_spec(), a_spec(model_version=OTHER)]
        async with running_host(Path(folder), specs, restart_first_s=0.05) as host:
            await host.until_active()
            await host.until_active(model_version=OTHER)
            yield host


@pytest.fixture
async def batcher(engine_host: EngineHost, etcd: str, namespace: str) -> AsyncIterator[str]:
    """The address of a batcher in front of it."""
    stopping = asyncio.Event()
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    common = CommonConfig(
        etcd_endpoints=(etcd,),
        namespace=namespace,
        instance_id="b1",
        lease_ttl_s=2,
        drain_timeout_s=5,
    )
    config = Config(engine_address=engine_host.address, drain_linger_s=0.0, cache_interval_ms=10)
    task = asyncio.create_task(serve(config, common, stopping, on_listening=listening.set_result))
    try:
        yield await within(listening)
    finally:
        stopping.set()
        await within(task, 20)


@pytest.fixture
async def view(batcher: str) -> AsyncIterator[CacheView]:
    """What it tells."""
    async with watched(batcher) as told:
        yield told


async def ask(address: str, text: str, *, model: str = TINY) -> Sequence[int]:
    """Have a prompt answered; return its names but the last, which may end in a part of a block."""
    request = inference.GenerateRequest(
        model=model, text=text, sampling=inference.SamplingOptions(max_tokens=4)
    )
    async with connect(address) as channel:
        async for _ in inference_rpc.InferenceServiceStub(channel).Generate(request):
            pass
    return prefix_hashes(generate_prompt(request))[:-1]


async def test_what_all_runners_have_is_told_together(batcher: str, view: CacheView) -> None:
    await view.until(lambda: view.is_told(TINY) and view.is_told(OTHER))
    one = await ask(batcher, "one " + TEXT)
    other = await ask(batcher, "other " + TEXT, model=OTHER)
    await view.until(lambda: set(one) <= view.of(TINY) and set(other) <= view.of(OTHER))
    assert not view.of(TINY) & view.of(OTHER)
    async with watched(batcher) as late:
        assert late.names == view.names


async def test_a_dead_runner_takes_what_it_had_along(
    batcher: str, engine_host: EngineHost, view: CacheView
) -> None:
    await view.until(lambda: view.is_told(TINY) and view.is_told(OTHER))
    names = await ask(batcher, TEXT)
    others = await ask(batcher, TEXT, model=OTHER)
    await view.until(lambda: set(names) <= view.of(TINY) and set(others) <= view.of(OTHER))
    status = await engine_host.until_active()
    os.kill(status.runner_pid, signal.SIGKILL)
    await view.until(lambda: not view.of(TINY))
    assert set(others) <= view.of(OTHER)
    # Its successor tells what it has itself.
    await engine_host.until(
        lambda model: (
            model.state == engine.MODEL_STATE_ACTIVE and model.generation > status.generation
        )
    )
    await view.until(lambda: view.is_told(TINY))
    assert view.of(TINY) == set()
    again = await ask(batcher, TEXT)
    await view.until(lambda: set(again) <= view.of(TINY))


async def test_an_unloaded_model_has_no_report(
    batcher: str, engine_host: EngineHost, view: CacheView
) -> None:
    names = await ask(batcher, TEXT)
    await view.until(lambda: set(names) <= view.of(TINY))
    await engine_host.stub.UnloadModel(engine.UnloadModelRequest(model_version=TINY))
    await view.until(lambda: not view.is_told(TINY))
    assert view.of(TINY) == set()
    await engine_host.load(a_spec())
    await view.until(lambda: view.is_told(TINY))


# --- Runners that a test scripts ------------------------------------------------------------------


class Told(Runner):
    """A runner that also tells of a cache, as a test says."""

    def __init__(self, path: str) -> None:
        super().__init__(path, hold=False)
        self.feed = CacheFeed(names_max=1 << 20)
        self.watched = asyncio.Event()

    async def start(self) -> None:
        self._server = Server()
        inference_rpc.add_InferenceServiceServicer_to_server(self, self._server.grpc)
        engine_rpc.add_CacheServiceServicer_to_server(CacheService(self.feed), self._server.grpc)
        self._server.offer("forebay.inference.v1.InferenceService")
        await self._server.listen(f"unix:{self.path}")


@contextlib.asynccontextmanager
async def told(host: Host, start: Start) -> AsyncIterator[tuple[Told, Running]]:
    """Such a runner, and a batcher before it."""
    runner = Told(host.runner().path)
    await runner.start()
    host.show(path=runner.path)
    try:
        running = await start(cache_interval_ms=10)
        await running.becomes_active()
        yield runner, running
    finally:
        await runner.die()


async def test_a_report_that_begins_late_and_ends_is_passed_on(host: Host, start: Start) -> None:
    async with told(host, start) as (runner, running), watched(running.address) as view:
        assert not view.is_told(CHAT)
        runner.feed.begin(CHAT)
        runner.feed.tell(CHAT, stored=[1, 2], removed=[])
        await view.until(lambda: view.of(CHAT) == {1, 2})
        runner.feed.begin("another@1")
        runner.feed.tell("another@1", stored=[9], removed=[])
        runner.feed.tell(CHAT, stored=[3], removed=[1])
        await view.until(lambda: view.of(CHAT) == {2, 3})
        assert not view.is_told("another@1"), "a runner speaks for its own model"
        runner.feed.end(CHAT)
        await view.until(lambda: not view.is_told(CHAT))


async def test_only_so_much_is_passed_on(host: Host, start: Start) -> None:
    runner = Told(host.runner().path)
    runner.feed.begin(CHAT)
    runner.feed.tell(CHAT, stored=range(100), removed=[])
    await runner.start()
    host.show(path=runner.path)
    try:
        running = await start(cached_prefixes_max=10)
        async with watched(running.address) as view:
            await view.until(lambda: view.of(CHAT) == set(range(10)))
    finally:
        await runner.die()


async def test_a_watcher_that_does_not_read_is_told_all_anew(host: Host, start: Start) -> None:
    async with told(host, start) as (runner, running):
        runner.feed.begin(CHAT)
        async with connect(running.address) as channel:
            call: Any = engine_rpc.CacheServiceStub(channel).WatchCache(
                engine.WatchCacheRequest(interval_ms=10)
            )
            slow = CacheView()
            slow.take(await call.read())
            async with watched(running.address) as quick:
                # Each of them is there for a moment, and far more than a connection holds.
                for round_ in range(60):
                    names = range(round_ * 20_000, (round_ + 1) * 20_000)
                    runner.feed.tell(CHAT, stored=names, removed=[])
                    runner.feed.tell(CHAT, stored=[], removed=names[:-1])
                    last = names[-1]
                    await quick.until(lambda last=last: last in quick.of(CHAT))  # type: ignore[misc]
                truth = {*range(19_999, 60 * 20_000, 20_000)}
                await quick.until(lambda: quick.of(CHAT) == truth)
            async with asyncio.timeout(20):
                while slow.of(CHAT) != truth:
                    slow.take(await call.read())
            call.cancel()


async def test_an_older_runner_that_tells_nothing_is_no_fault(
    start: Start, runner: Runner, host: Host
) -> None:
    runner.hold = False
    running = await start()
    await running.becomes_active()
    async with watched(running.address) as view:
        assert await running.answer("hello") == "first hello"
        assert not view.is_told(CHAT)
        # Its successor may.
        newer = Told(f"{runner.path}.2")
        newer.feed.begin(CHAT)
        newer.feed.tell(CHAT, stored=[5], removed=[])
        await newer.start()
        try:
            host.show(path=newer.path, generation=2)
            await view.until(lambda: view.of(CHAT) == {5})
        finally:
            await newer.die()
        await view.until(lambda: not view.is_told(CHAT))


async def test_prompt_tokens_that_wait_are_told(start: Start, runner: Runner, host: Host) -> None:
    host.show(path=runner.path, slots=1)
    running = await start()
    await running.becomes_active()
    first = running.generate(forebay_prompt_tokens="700")
    await within(first.read())
    # The first one's answer has begun; the others wait behind it.
    others = [running.generate(forebay_prompt_tokens=told) for told in ("20", "300", "none")]
    waiting = await running.becomes(lambda replica: loaded(replica).queued == 3)
    assert loaded(waiting).waiting_prompt_tokens == 320
    others[1].cancel()
    await running.becomes(lambda replica: loaded(replica).waiting_prompt_tokens == 20)
    runner.let_all_go()
    for call in (first, others[0], others[2]):
        while await within(call.read()) is not grpc.aio.EOF:
            pass
    await running.becomes(lambda replica: loaded(replica).waiting_prompt_tokens == 0)


async def test_a_prompt_that_is_read_waits_until_its_answer_begins(
    start: Start, host: Host
) -> None:
    class Silent(Runner):
        async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            async with self._call(context) as call:
                await call.go_on.wait()
                await context.write(inference.GenerateResponse(text_delta="late"))

    runner = Silent(host.runner().path)
    await runner.start()
    host.show(path=runner.path)
    try:
        running = await start()
        await running.becomes_active()
        call = running.generate(forebay_prompt_tokens="900")
        await runner.called(1)
        await running.becomes(lambda replica: loaded(replica).waiting_prompt_tokens == 900)
        runner.let_all_go()
        await within(call.read())
        await running.becomes(lambda replica: loaded(replica).waiting_prompt_tokens == 0)
    finally:
        await runner.die()


async def test_why_a_model_failed_is_told_without_paths(start: Start, host: Host) -> None:
    running = await start()
    host.show(state=engine.MODEL_STATE_FAILED, reason="No file /var/lib/models/chat/config.json.")
    failed = await running.becomes(lambda replica: bool(replica.models))
    assert loaded(failed).state == engine.MODEL_STATE_FAILED
    assert loaded(failed).reason == "No file <path>"
    host.show(state=engine.MODEL_STATE_LOADING)
    await running.becomes(lambda replica: not loaded(replica).reason)


async def test_cache_reports_need_no_runner(start: Start) -> None:
    running = await start()
    async with watched(running.address) as view:
        assert view.names == {}
        assert view.messages == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await running.answer()
