"""A real router between real clients and stand-ins: gRPC servers that behave as a test says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common import metadata as md
from forebay_common.apikeys import new_secret
from forebay_common.channel import connect
from forebay_common.config import CommonConfig
from forebay_common.discovery import Instance, Keys, to_json
from forebay_common.errors import ForebayError, Reason
from forebay_common.server import Server
from forebay_common.store import Store
from forebay_router.app import serve
from forebay_router.config import Config
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

WAIT_S = 5.0
MODEL = "chat@v1"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


async def eventually(
    holds: Callable[[], Awaitable[bool] | bool], *, within_s: float = WAIT_S
) -> float:
    """Wait until a condition holds and return how long it took."""
    started = time.monotonic()
    while True:
        held = holds()
        if held if isinstance(held, bool) else await held:
            return time.monotonic() - started
        assert time.monotonic() - started < within_s, "the condition never held"
        await asyncio.sleep(0.005)


@dataclasses.dataclass
class Script:
    """How one request is answered: so many tokens, and then an end."""

    tokens: int = 3
    text: str = ""
    """Added to each token."""
    slow_s: float = 0.0
    """Before the first token."""
    error: ForebayError | None = None
    """Given after the tokens instead of an end."""
    dies: bool = False
    """The whole server goes after the tokens."""
    hangs: bool = False
    """Nothing comes after the tokens until `Seen.go_on`; then one more and the end."""


@dataclasses.dataclass
class Seen:
    """A request as a stand-in got it."""

    metadata: dict[str, str]
    request: Any
    remaining_s: float | None
    text: str = ""
    go_on: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled_at: float | None = None


class StandIn(inference_rpc.InferenceServiceServicer, batcher_rpc.BatcherServiceServicer):
    """A replica: announces itself, reports, and answers by its scripts, then by `usual`."""

    def __init__(self, replica_id: str, store: Store, keys: Keys) -> None:
        self.replica = batcher.Replica(
            replica_id=replica_id,
            pool="default",
            role=batcher.ROLE_ACTIVE,
            models=[
                batcher.ReplicaModel(model_version=MODEL, state=engine.MODEL_STATE_ACTIVE, slots=8)
            ],
        )
        self.scripts: deque[Script] = deque()
        self.usual = Script()
        self.seen: list[Seen] = []
        self.watchers = 0
        self._arrived = asyncio.Event()
        self._key = keys.replica(replica_id)
        self._store = store
        self._server: Server | None = None
        self._changed = asyncio.Condition()
        self._revision = 1
        self._dying: set[asyncio.Task[None]] = set()

    async def start(self, address: str = "127.0.0.1:0", *, announced: bool = True) -> None:
        server = self._server = Server()
        inference_rpc.add_InferenceServiceServicer_to_server(self, server.grpc)
        batcher_rpc.add_BatcherServiceServicer_to_server(self, server.grpc)
        self.replica.address = await server.listen(address)
        if announced:
            await self.announce()

    async def announce(self) -> None:
        await self._store.put(self._key, to_json(self.replica))

    async def withdraw(self) -> None:
        await self._store.delete(self._key)

    async def kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.grpc.stop(0)

    async def change(self, **fields: Any) -> None:
        """Change the replica and tell its watchers, as a batcher does."""
        for name, value in fields.items():
            target = (
                self.replica.models[0] if hasattr(self.replica.models[0], name) else self.replica
            )
            setattr(target, name, value)
        async with self._changed:
            self._revision += 1
            self._changed.notify_all()

    async def arrival(self, count: int = 1) -> Seen:
        """Wait for the `count`-th request."""
        async with asyncio.timeout(WAIT_S):
            while len(self.seen) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.seen[count - 1]

    async def WatchReplica(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.watchers += 1
        try:
            while True:
                revision = self._revision
                yield batcher.WatchReplicaResponse(revision=revision, replica=self.replica)
                async with self._changed:
                    while self._revision == revision:
                        await self._changed.wait()
        finally:
            self.watchers -= 1

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for n, last in self._play(request, context):
            yield inference.GenerateResponse(
                header=inference.AnswerHeader(request_id="x", model_version=MODEL),
                text_delta=f"t{n} ",
                token_ids=[n],
                usage=inference.Usage(prompt_tokens=2, completion_tokens=n + 1) if last else None,
            )

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        async for _ in self._play(request, context):
            pass
        return inference.EmbedResponse(embeddings=[inference.Embedding(values=[1.0, 2.0])])

    async def CallOpenAI(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        body = json.loads(request.body)
        if body.get("stream"):
            async for n, last in self._play(request, context):
                yield inference.CallOpenAIResponse(
                    content_type="text/event-stream; charset=utf-8" if n == 0 else "",
                    body=_events(request.path, body, f"t{n} {self.seen[-1].text}", n, last=last),
                    tokens=[inference.ChoiceTokens(index=0, token_ids=[n])],
                )
            return
        tokens = 0
        async for n, _ in self._play(request, context):
            tokens = n + 1
        # In two parts, so that a late failure of an unstreamed answer can be played.
        document = json.dumps(_document(request.path, tokens)).encode()
        yield inference.CallOpenAIResponse(content_type="application/json", body=document[:10])
        yield inference.CallOpenAIResponse(body=document[10:])

    async def _play(self, request: Any, context: Any) -> AsyncIterator[tuple[int, bool]]:
        script = self.scripts.popleft() if self.scripts else self.usual
        metadata = md.texts(context.invocation_metadata())
        seen = Seen(metadata, request, context.time_remaining(), text=script.text)
        self.seen.append(seen)
        self._arrived.set()
        context.set_trailing_metadata(((md.REPLICA, self.replica.replica_id),))
        try:
            if script.slow_s:
                await asyncio.sleep(script.slow_s)
            delivered = getattr(request, "resume", inference.ResumePoint()).tokens
            done = len(delivered[0].token_ids) if delivered else 0
            for n in range(done, script.tokens):
                ends = script.error is None and not script.dies and not script.hangs
                yield n, ends and n == script.tokens - 1
            if script.error is not None:
                raise script.error
            if script.dies:
                task = asyncio.create_task(self.kill())
                self._dying.add(task)
                task.add_done_callback(self._dying.discard)
                await asyncio.Event().wait()
            if script.hangs:
                await seen.go_on.wait()
                yield script.tokens, True
            context.set_trailing_metadata(
                ((md.USAGE, f"2,{script.tokens},0"), (md.REPLICA, self.replica.replica_id))
            )
        except asyncio.CancelledError:
            seen.cancelled_at = time.monotonic()
            raise
        finally:
            seen.ended.set()


def _events(path: str, body: dict[str, Any], text: str, n: int, *, last: bool) -> bytes:
    base = {"id": "cmpl-1", "created": 1, "model": body["model"]}
    finish = "stop" if last else None
    if path == CHAT:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        base["object"] = "chat.completion.chunk"
    else:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        base["object"] = "text_completion"
    events = [{**base, "choices": [choice]}]
    if last and (body.get("stream_options") or {}).get("include_usage"):
        events.append({**base, "choices": [], "usage": _usage(n + 1)})
    rendered = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (rendered + ("data: [DONE]\n\n" if last else "")).encode()


def _document(path: str, tokens: int) -> dict[str, Any]:
    text = "".join(f"t{n} " for n in range(tokens))
    base: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": "chat", "usage": _usage(tokens)}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    if path == CHAT:
        message = {"role": "assistant", "content": text}
        return {**base, "object": "chat.completion", "choices": [{**choice, "message": message}]}
    if path == COMPLETIONS:
        return {**base, "object": "text_completion", "choices": [{**choice, "text": text}]}
    vector = {"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}
    return {**base, "object": "list", "data": [vector]}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": tokens + 2}


def a_refusal(reason: Reason, *, tokens: int = 0, **fields: Any) -> Script:
    return Script(tokens=tokens, error=ForebayError(reason, "As the test says.", **fields))


@dataclasses.dataclass
class RunningRouter:
    """A router that serves."""

    instance: Instance
    channel: grpc.aio.Channel
    stopping: asyncio.Event
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://{self.instance.addresses['http']}"

    @property
    def inference(self) -> Any:
        return inference_rpc.InferenceServiceStub(self.channel)

    @property
    def view(self) -> Any:
        return router_rpc.RouterServiceStub(self.channel)

    async def until_serving(self, state: int = health_pb2.HealthCheckResponse.SERVING) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="forebay.inference.v1.InferenceService")
        watch = stub.Watch(request)
        try:
            async with asyncio.timeout(WAIT_S):
                while (await watch.read()).status != state:
                    pass
        finally:
            watch.cancel()


StartRouter = Callable[..., Awaitable[RunningRouter]]
StartStandIn = Callable[..., Awaitable[StandIn]]


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """A file of secrets, as the routers of a fleet share it."""
    path = tmp_path / "secret"
    path.write_text(new_secret() + "\n")
    return path


@pytest.fixture
async def store(etcd: str) -> AsyncIterator[Store]:
    async with Store.open([etcd]) as store:
        yield store


async def put_catalogue(store: Store, keys: Keys) -> None:
    model = registry.Model(
        name="chat",
        versions=[registry.ModelVersion(version=v, created_unix_s=7) for v in ("v1", "v2", "v3")],
        split=[registry.SplitEntry(version="v1", weight=100)],
        created_unix_s=5,
    )
    alias = registry.Alias(name="default", target="chat")
    await store.put(keys.model("chat"), to_json(model))
    await store.put(keys.alias("default"), to_json(alias))


@pytest.fixture
async def catalogue(store: Store, keys: Keys) -> None:
    """`chat` with all traffic on v1, `default` for it."""
    await put_catalogue(store, keys)


@pytest.fixture
async def start_stand_in(store: Store, keys: Keys) -> AsyncIterator[StartStandIn]:
    running: list[StandIn] = []

    async def start(
        replica_id: str = "r1", *, announced: bool = True, store: Store = store
    ) -> StandIn:
        stand_in = StandIn(replica_id, store, keys)  # type: ignore[abstract]  # does not steer
        running.append(stand_in)
        await stand_in.start(announced=announced)
        return stand_in

    yield start
    for stand_in in running:
        await stand_in.kill()


@pytest.fixture
async def start_router(etcd: str, namespace: str) -> AsyncIterator[StartRouter]:
    running: list[RunningRouter] = []

    async def start(
        *, etcd: str = etcd, drain_timeout_s: float = 0.0, **options: Any
    ) -> RunningRouter:
        common = CommonConfig(
            etcd_endpoints=(etcd,),
            namespace=namespace,
            instance_id=f"router-{len(running)}",
            drain_timeout_s=drain_timeout_s,
        )
        options.setdefault("open", not options.get("key_secret_file"))
        config = Config(grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0", **options)
        stopping = asyncio.Event()
        started: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        serving = serve(
            common, config, stopping, registry=CollectorRegistry(), on_started=started.set_result
        )
        task = asyncio.create_task(serving)
        waited: set[asyncio.Future[Any]] = {task, started}
        await asyncio.wait(waited, return_when="FIRST_COMPLETED", timeout=WAIT_S)
        if task.done():
            task.result()
        instance = started.result()
        router = RunningRouter(instance, connect(instance.addresses["grpc"]), stopping, task)
        running.append(router)
        return router

    yield start
    for router in running:
        await router.channel.close()
        router.stopping.set()
        await asyncio.wait_for(router.task, WAIT_S)


@pytest.fixture
async def router(start_router: StartRouter, catalogue: None) -> RunningRouter:
    """A router that knows the catalogue, soon."""
    return await start_router(no_replica_wait_s=0.3)
