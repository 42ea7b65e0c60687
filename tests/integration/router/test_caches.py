"""Requests go where their prompt is cached, as batchers tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay_common import metadata as md
from forebay_common.discovery import Keys
from forebay_common.prefixes import prefix_hashes, text_bytes
from forebay_common.server import Server
from forebay_common.store import Store

from .conftest import MODEL, WAIT_S, RunningRouter, StandIn, StartRouter, eventually

pytestmark = pytest.mark.integration

PROMPT = "The river rises over stone and mill. " * 400
NAMES = prefix_hashes(text_bytes(PROMPT))


class CachingStandIn(StandIn, engine_rpc.CacheServiceServicer):
    """A replica that tells what it has cached."""

    cache_watchers = 0

    async def start(self, address: str = "127.0.0.1:0", *, announced: bool = True) -> None:
        self.told: asyncio.Queue[engine.WatchCacheResponse] = asyncio.Queue()
        server = self._server = Server()
        inference_rpc.add_InferenceServiceServicer_to_server(self, server.grpc)
        batcher_rpc.add_BatcherServiceServicer_to_server(self, server.grpc)
        engine_rpc.add_CacheServiceServicer_to_server(self, server.grpc)
        self.replica.address = await server.listen(address)
        if announced:
            await self.announce()

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.cache_watchers += 1
        try:
            while True:
                yield await self.told.get()
        finally:
            self.cache_watchers -= 1

    def tell(self, revision: int, **fields: Any) -> None:
        model = engine.CachedPrefixes(
            model_version=fields.pop("model_version", MODEL),
            source=fields.pop("source", engine.CACHE_SOURCE_EVENTS),
            **fields,
        )
        self.told.put_nowait(engine.WatchCacheResponse(revision=revision, models=[model]))


Start = Callable[..., Awaitable[CachingStandIn]]


@pytest.fixture
async def start_caching(store: Store, keys: Keys) -> AsyncIterator[Start]:
    running: list[CachingStandIn] = []

    async def start(replica_id: str) -> CachingStandIn:
        stand_in = CachingStandIn(replica_id, store, keys)  # type: ignore[abstract]
        running.append(stand_in)
        await stand_in.start()
        return stand_in

    yield start
    for stand_in in running:
        await stand_in.kill()


@pytest.fixture
async def router(start_router: StartRouter, catalogue: None) -> RunningRouter:
    return await start_router(slow_start_s=0.0, explore_share=0.0)


async def cached_tokens(router: RunningRouter) -> dict[str, int]:
    """Of the prompt, at each candidate."""
    request = inference.GenerateRequest(model="chat", text=PROMPT)
    call = router.inference.Generate(request, timeout=WAIT_S)
    assert [part async for part in call]
    request_id = dict(await call.trailing_metadata())[md.REQUEST_ID]
    explained = await router.view.ExplainRequest(
        router_pb.ExplainRequestRequest(request_id=request_id), timeout=WAIT_S
    )
    [attempt] = explained.attempts
    return {one.replica_id: one.cached_tokens for one in attempt.candidates}


async def test_a_request_goes_where_its_prompt_is_cached(
    router: RunningRouter, start_caching: Start
) -> None:
    replicas = [await start_caching(f"r{n}") for n in range(3)]
    await eventually(lambda: all(replica.cache_watchers for replica in replicas))
    for replica in replicas:
        replica.tell(1, reset=True, stored=NAMES if replica is replicas[2] else [])

    async def found() -> bool:
        tokens = await cached_tokens(router)
        return tokens.get("r2", 0) > 3000

    await eventually(found)
    before = len(replicas[2].seen)
    await cached_tokens(router)
    assert len(replicas[2].seen) == before + 1


async def test_what_is_told_before_the_report_names_the_model_is_kept(
    router: RunningRouter, start_caching: Start
) -> None:
    other = "other@v1"
    first = await start_caching("r1")
    await start_caching("r2")
    await eventually(lambda: first.cache_watchers == 1)
    first.tell(1, reset=True, stored=NAMES, model_version=other)
    first.tell(2, reset=True, stored=NAMES)
    await eventually(lambda: first.told.empty())
    models = [*first.replica.models]
    models[0].model_version = other
    del first.replica.models[:]
    first.replica.models.extend(models)
    first.replica.models.add(model_version=MODEL, state=engine.MODEL_STATE_ACTIVE, slots=8)
    await first.change()

    async def found() -> bool:
        return (await cached_tokens(router)).get("r1", 0) > 3000

    await eventually(found)
    assert first.cache_watchers == 1


async def test_after_a_gap_it_is_asked_again(router: RunningRouter, start_caching: Start) -> None:
    replica = await start_caching("r1")
    await eventually(lambda: replica.cache_watchers == 1)
    replica.tell(1, reset=True)
    replica.tell(3, stored=NAMES)
    await eventually(lambda: replica.told.empty())
    replica.tell(1, reset=True)
    replica.tell(2, stored=NAMES[:3])
    await eventually(lambda: replica.told.empty() and replica.cache_watchers == 1)
