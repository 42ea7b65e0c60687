"""What engines have in their prefix caches, told to whoever watches: runner and batcher serve it.

A watcher gets all there is, then what changes. While it is not read, changes that undo each other
cancel, and once more have come together than there are names, it will get all there is again: what
waits for a watcher is never larger than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import grpc
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as rpc

from forebay_common.errors import ForebayError, Reason

SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"].full_name
INTERVAL_MS = 100
_INTERVAL_MS_MIN = 10
_WATCHERS_MAX = 1024
_CHANGES_MIN = 1024
"""So many may always wait for a watcher, however little is cached."""
_NAMES_PER_MESSAGE = 1 << 18
"""Eight bytes each; more follow in further messages."""


class CacheFeed:
    """The cached prefixes of some model versions. Used from one event loop only."""

    def __init__(self, *, names_max: int) -> None:
        """Of each model version, at most `names_max` names are kept and told."""
        self._names_max = names_max
        self._models: dict[str, dict[int, None]] = {}
        self._watches: set[CacheWatch] = set()

    @property
    def watches(self) -> int:
        """How many watch."""
        return len(self._watches)

    def begin(self, model_version: str) -> None:
        """From now on it is known what is cached of a model version: nothing yet."""
        self._models[model_version] = {}
        self._reset(model_version)

    def end(self, model_version: str) -> None:
        """It is no longer known."""
        if self._models.pop(model_version, None) is not None:
            self._reset(model_version)

    def tell(self, model_version: str, *, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Names of a model version that was begun are cached now, or no longer."""
        names = self._models[model_version]
        gone = [name for name in removed if name in names]
        for name in gone:
            del names[name]
        new = [name for name in stored if name not in names]
        del new[max(0, self._names_max - len(names)) :]
        names.update(dict.fromkeys(new))
        if new or gone:
            for watch in self._watches:
                watch._note(model_version, names, new, gone)

    def names(self, model_version: str) -> int:
        """How many names of a model version are cached."""
        return len(self._models.get(model_version, ()))

    def watch(self) -> CacheWatch:
        """Begin to watch. The watch has to be closed.

        Raises:
            ForebayError: QUEUE_FULL.
        """
        if len(self._watches) >= _WATCHERS_MAX:
            raise ForebayError(Reason.QUEUE_FULL, "Too many watch already.", retry_after_s=1.0)
        watch = CacheWatch(self)
        self._watches.add(watch)
        return watch

    def _reset(self, model_version: str) -> None:
        for watch in self._watches:
            watch._reset(model_version)


class CacheWatch:
    """One watcher's place."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed
        self._pending: dict[str, dict[int, bool]] = {}
        """Of each model version that changed, whether names are cached now."""
        self._anew: set[str] = set(feed._models)
        """Model versions of which all is to be told."""
        self._news = asyncio.Event()
        self._news.set()

    async def changed(self) -> None:
        """Wait until there is something to tell; the first time at once."""
        await self._news.wait()

    def take(self) -> list[pb.CachedPrefixes]:
        """What is to be told now, at most as much as a message holds."""
        left = _NAMES_PER_MESSAGE
        told: list[pb.CachedPrefixes] = []
        for model_version in [*self._anew, *(self._pending.keys() - self._anew)]:
            if left <= 0:
                return told
            entry = self._take_model(model_version, left)
            left -= len(entry.stored) + len(entry.removed)
            told.append(entry)
        if not self._anew and not self._pending:
            self._news.clear()
        return told

    def close(self) -> None:
        """Watch no longer."""
        self._feed._watches.discard(self)

    def _take_model(self, model_version: str, most: int) -> pb.CachedPrefixes:
        entry = pb.CachedPrefixes(model_version=model_version)
        names = self._feed._models.get(model_version)
        if names is not None:
            entry.source = pb.CACHE_SOURCE_EVENTS
        if model_version in self._anew:
            self._anew.discard(model_version)
            self._pending.pop(model_version, None)
            entry.reset = True
            if names:
                self._pending[model_version] = dict.fromkeys(names, True)
        changes = self._pending.get(model_version, {})
        taken = list(islice(changes, most))
        for name in taken:
            (entry.stored if changes.pop(name) else entry.removed).append(name)
        if not changes:
            self._pending.pop(model_version, None)
        return entry

    def _note(
        self, model_version: str, names: dict[int, None], new: list[int], gone: list[int]
    ) -> None:
        if model_version in self._anew:
            return
        changes = self._pending.setdefault(model_version, {})
        for name, cached in _each(new, gone):
            # What changed back before it was told is as it was.
            if changes.pop(name, cached) is cached:
                changes[name] = cached
        if len(changes) > max(_CHANGES_MIN, len(names)):
            self._reset(model_version)
        elif changes:
            self._news.set()
        else:
            del self._pending[model_version]

    def _reset(self, model_version: str) -> None:
        self._pending.pop(model_version, None)
        self._anew.add(model_version)
        self._news.set()


class CacheService(rpc.CacheServiceServicer):
    """Serves a feed."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed

    async def WatchCache(  # noqa: N802
        self, request: pb.WatchCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        """Tell what is cached, and what changes."""
        interval_s = max(_INTERVAL_MS_MIN, request.interval_ms or INTERVAL_MS) / 1000
        watch = self._feed.watch()
        revision = 0
        try:
            while True:
                await watch.changed()
                models = watch.take()
                if models or not revision:
                    revision += 1
                    yield pb.WatchCacheResponse(revision=revision, models=models)
                await asyncio.sleep(interval_s)
        finally:
            watch.close()


def _each(new: list[int], gone: list[int]) -> Iterator[tuple[int, bool]]:
    for name in gone:
        yield name, False
    for name in new:
        yield name, True
