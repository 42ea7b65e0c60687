"""A watcher of a CacheService, as a router is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as rpc
from forebay_common.channel import connect

BOUND_S = 20


class CacheView:
    """What was told so far. What cannot be right fails the test that waits."""

    def __init__(self) -> None:
        self.names: dict[str, set[int]] = {}
        self.sources: dict[str, pb.CacheSource.ValueType] = {}
        self.resets = 0
        self.messages = 0
        self._revision = 0
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    def of(self, model_version: str) -> set[int]:
        """The names of a model version that are cached."""
        return self.names.get(model_version, set())

    def is_told(self, model_version: str) -> bool:
        """Whether there is a report of a model version."""
        return self.sources.get(model_version) == pb.CACHE_SOURCE_EVENTS

    async def until(self, holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        """Wait until something is so by what was told."""
        assert self._following is not None
        async with asyncio.timeout(bound_s):
            while not holds():
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({news, self._following}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if self._following.done():
                    self._following.result()
                    raise AssertionError("the watch ended")

    def take(self, response: pb.WatchCacheResponse) -> None:
        """Take in a message."""
        self._revision += 1
        assert response.revision == self._revision
        self.messages += 1
        for entry in response.models:
            if entry.reset:
                self.resets += 1
                self.names[entry.model_version] = set()
            names = self.names[entry.model_version]
            assert not names & set(entry.stored)
            assert set(entry.removed) <= names
            names |= set(entry.stored)
            names -= set(entry.removed)
            self.sources[entry.model_version] = entry.source
        self._news.set()


@contextlib.asynccontextmanager
async def watched(address: str, *, interval_ms: int = 10) -> AsyncIterator[CacheView]:
    """Watch a hop's caches; its first message has come."""
    view = CacheView()
    async with connect(address) as channel:
        call: Any = rpc.CacheServiceStub(channel).WatchCache(
            pb.WatchCacheRequest(interval_ms=interval_ms)
        )

        async def follow() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in call:
                    view.take(response)

        view._following = asyncio.create_task(follow())
        try:
            await view.until(lambda: view.messages > 0)
            yield view
        finally:
            call.cancel()
            await asyncio.wait({view._following})
