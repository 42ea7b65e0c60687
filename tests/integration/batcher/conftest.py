"""A batcher as its process builds it, between a scripted engine host and real gRPC clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay_batcher.__main__ import serve
from forebay_batcher.config import Config
from forebay_common import metadata as md
from forebay_common.channel import connect
from forebay_common.config import CommonConfig
from forebay_common.errors import Reason, from_rpc_error
from forebay_common.server import Server

WAIT_S = 10.0
CHAT = "chat@1"


async def within(awaitable: Awaitable[Any], seconds: float = WAIT_S) -> Any:
    """The result of something that must happen in time."""
    async with asyncio.timeout(seconds):
        return await awaitable


class Condition:
    """Lets tests wait until something that changes step by step is so."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await self._changed.wait()


@dataclasses.dataclass(eq=False)
class Call:
    """One call that reached the runner."""

    metadata: dict[str, str]
    deadline_in_s: float | None
    go_on: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled_at: float | None = None
    ended: bool = False


class Runner(inference_rpc.InferenceServiceServicer):
    """Serves InferenceService on a Unix socket. A call gives one message, then waits to be told to
    go on, unless `hold` is off."""

    def __init__(self, path: str, *, hold: bool = True) -> None:
        self.path = path
        self.hold = hold
        self.cancel_next = False
        self.calls: list[Call] = []
        self.running = 0
        self.running_max = 0
        self.news = Condition()
        self._server: Server | None = None

    async def start(self) -> None:
        self._server = Server()
        inference_rpc.add_InferenceServiceServicer_to_server(self, self._server.grpc)
        self._server.offer("forebay.inference.v1.InferenceService")
        await self._server.listen(f"unix:{self.path}")

    async def die(self) -> None:
        """End abruptly, with every call."""
        server, self._server = self._server, None
        if server is not None:
            await server.grpc.stop(0)
        Path(self.path).unlink(missing_ok=True)

    async def called(self, count: int, seconds: float = WAIT_S) -> None:
        await self.news.until(lambda: len(self.calls) >= count, seconds)

    def let_all_go(self) -> None:
        self.hold = False
        for call in self.calls:
            call.go_on.set()

    @contextlib.asynccontextmanager
    async def _call(self, context: Any) -> AsyncIterator[Call]:
        call = Call(md.texts(context.invocation_metadata()), context.time_remaining())
        self.calls.append(call)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        self.news.notify()
        try:
            yield call
        except asyncio.CancelledError:
            call.cancelled_at = time.monotonic()
            raise
        finally:
            call.ended = True
            self.running -= 1
            self.news.notify()

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference.GenerateRequest, context: Any
    ) -> None:
        async with self._call(context) as call:
            if self.cancel_next:
                self.cancel_next = False
                await context.abort(grpc.StatusCode.CANCELLED)
            await context.write(inference.GenerateResponse(text_delta="first "))
            if self.hold:
                await call.go_on.wait()
            context.set_trailing_metadata(((md.USAGE, "3,2,0"),))
            await context.write(inference.GenerateResponse(text_delta=request.text))

    async def Embed(  # noqa: N802
        self, request: inference.EmbedRequest, context: Any
    ) -> inference.EmbedResponse:
        async with self._call(context):
            return inference.EmbedResponse(
                embeddings=[inference.Embedding(values=[1.0]) for _ in request.inputs]
            )

    async def CallOpenAI(  # type: ignore[override]  # noqa: N802
        self, request: inference.CallOpenAIRequest, context: Any
    ) -> None:
        async with self._call(context):
            await context.write(
                inference.CallOpenAIResponse(content_type="application/json", body=request.body)
            )


class Host(engine_rpc.EngineServiceServicer):
    """An engine host that says what a test tells it to."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/host.sock"
        self.watchers = 0
        self.news = Condition()
        self._folder = folder
        self._models: dict[str, engine.ModelStatus] = {}
        self._server: Server | None = None

    def runner(self, name: str = "runner", *, hold: bool = True) -> Runner:
        return Runner(f"{self._folder}/{name}.sock", hold=hold)

    async def start(self) -> None:
        self._server = Server()
        engine_rpc.add_EngineServiceServicer_to_server(self, self._server.grpc)
        self._server.offer("forebay.engine.v1.EngineService")
        await self._server.listen(self.address)

    async def die(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.grpc.stop(0)
        Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    def show(
        self,
        model_version: str = CHAT,
        state: engine.ModelState.ValueType = engine.MODEL_STATE_ACTIVE,
        *,
        path: str = "",
        slots: int = 4,
        generation: int = 1,
        kv_cache_usage: float = 0.0,
        reason: str = "",
    ) -> None:
        self._models[model_version] = engine.ModelStatus(
            spec=engine.ModelSpec(model_version=model_version),
            state=state,
            socket_path=path,
            generation=generation,
            limits=engine.EngineLimits(max_sequences=slots, context_tokens=2048),
            load=engine.EngineLoad(kv_cache_usage=kv_cache_usage),
            reason=reason,
        )
        self.news.notify()

    async def WatchEngine(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.watchers += 1
        revision = 0
        try:
            while True:
                revision += 1
                shown = list(self._models.values())
                yield engine.WatchEngineResponse(revision=revision, models=shown)
                await self._differs_from(shown)
        finally:
            self.watchers -= 1

    async def _differs_from(self, shown: list[engine.ModelStatus]) -> None:
        await self.news.until(lambda: list(self._models.values()) != shown, seconds=600)


@dataclasses.dataclass(frozen=True)
class Running:
    """A batcher that serves, and its clients."""

    address: str
    inference: inference_rpc.InferenceServiceAsyncStub
    control: batcher_rpc.BatcherServiceAsyncStub
    channel: grpc.aio.Channel
    stop: Callable[[], Awaitable[None]]
    stopping: asyncio.Event
    ended: asyncio.Task[None]

    async def becomes(
        self, holds: Callable[[batcher.Replica], bool], *, seconds: float = WAIT_S
    ) -> batcher.Replica:
        """Watch the replica until it is as wanted."""
        watch = self.control.WatchReplica(batcher.WatchReplicaRequest(load_interval_ms=1))
        try:
            async with asyncio.timeout(seconds):
                async for answer in watch:
                    if holds(answer.replica):
                        return answer.replica
        finally:
            watch.cancel()
        raise AssertionError("the watch ended")

    async def becomes_active(self, model_version: str = CHAT) -> batcher.Replica:
        return await self.becomes(
            lambda replica: state_of(replica, model_version) == engine.MODEL_STATE_ACTIVE
        )

    def generate(
        self, text: str = "hello", *, model: str = CHAT, timeout: float | None = 30, **metadata: str
    ) -> Any:
        """Start a call; metadata keys have underscores for dashes."""
        return self.inference.Generate(
            inference.GenerateRequest(model=model, text=text),
            metadata=tuple((key.replace("_", "-"), value) for key, value in metadata.items()),
            timeout=timeout,
        )

    async def answer(self, text: str = "hello", **options: Any) -> str:
        return "".join([part.text_delta async for part in self.generate(text, **options)])

    async def reason(self, text: str = "hello", **options: Any) -> Reason:
        """Why a call was refused or failed."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.answer(text, **options)
        return from_rpc_error(caught.value).reason


def state_of(replica: batcher.Replica, model_version: str = CHAT) -> int:
    for model in replica.models:
        if model.model_version == model_version:
            return model.state
    return -1


def loaded(replica: batcher.Replica, model_version: str = CHAT) -> batcher.ReplicaModel:
    return next(model for model in replica.models if model.model_version == model_version)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    # Socket paths have at most 107 characters, which pytest's own folders may exceed.
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        host = Host(Path(folder))  # type: ignore[abstract]  # a batcher only watches
        await host.start()
        try:
            yield host
        finally:
            await host.die()


@pytest.fixture
async def runner(host: Host) -> AsyncIterator[Runner]:
    """A runner of CHAT that its host shows as active."""
    runner = host.runner()
    await runner.start()
    host.show(path=runner.path)
    try:
        yield runner
    finally:
        await runner.die()


Start = Callable[..., Awaitable[Running]]
NO_ETCD = "127.0.0.1:1"


@pytest.fixture
async def start(host: Host) -> AsyncIterator[Start]:
    """Starts batchers. Without an endpoint etcd is away, which must not matter to requests."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            endpoint: str = NO_ETCD,
            namespace: str = "/none",
            *,
            instance_id: str = "b1",
            drain_timeout_s: float = 5,
            **options: Any,
        ) -> Running:
            stopping = asyncio.Event()
            listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            common = CommonConfig(
                etcd_endpoints=(endpoint,),
                namespace=namespace,
                instance_id=instance_id,
                lease_ttl_s=2,
                drain_timeout_s=drain_timeout_s,
            )
            options = {"drain_linger_s": 0.0, **options}
            config = Config(engine_address=host.address, **options)
            task = asyncio.create_task(
                serve(config, common, stopping, on_listening=listening.set_result)
            )

            async def stop() -> None:
                stopping.set()
                await within(asyncio.shield(task), 20)

            async def end() -> None:
                if not task.done():
                    await stop()

            stack.push_async_callback(end)
            both: list[asyncio.Future[Any]] = [task, listening]
            await asyncio.wait(both, return_when="FIRST_COMPLETED")
            if task.done():
                await task
            channel = await stack.enter_async_context(connect(listening.result()))
            return Running(
                address=listening.result(),
                inference=inference_rpc.InferenceServiceStub(channel),
                control=batcher_rpc.BatcherServiceStub(channel),
                channel=channel,
                stop=stop,
                stopping=stopping,
                ended=task,
            )

        yield start


@pytest.fixture
async def serving(start: Start, runner: Runner) -> Running:
    """A batcher with CHAT active."""
    running = await start()
    await running.becomes_active()
    return running
