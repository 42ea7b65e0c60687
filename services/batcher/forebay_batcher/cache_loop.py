"""Passes on what the runners have in their prefix caches, all model versions together.

A runner is followed while its model takes requests. What it told is forgotten with it, or when it
can no longer be heard: a report that nobody corrects would be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import AsyncGenerator, Callable

import grpc
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay_common.backoff import Backoff
from forebay_common.cache_feed import CacheFeed

from forebay_batcher import metrics
from forebay_batcher.core.models import Model
from forebay_batcher.replica import Replica, Watch

_log = logging.getLogger(__name__)
_RETRY_S_MIN = 0.05
_LOOK_S = 1.0
"""Changes of load alone are looked at this often; no runner comes or goes with them."""

WatchRunner = Callable[[str], AsyncGenerator[pb.WatchCacheResponse, None]]
"""Watches the cache of the runner at a socket; raises grpc.RpcError when that ends."""


class CacheLoop:
    """Follows the caches of the replica's runners."""

    def __init__(
        self,
        replica: Replica,
        feed: CacheFeed,
        *,
        watch: WatchRunner,
        retry_s_max: float,
        rng: random.Random,
    ) -> None:
        self._replica = replica
        self._feed = feed
        self._watch = watch
        self._retry_s_max = retry_s_max
        self._rng = rng
        self._followed: dict[str, tuple[int, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        watch = Watch(self._replica, interval_s=_LOOK_S)
        try:
            while True:
                await watch.next()
                self._reconcile()
        finally:
            tasks = [task for _, task in self._followed.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reconcile(self) -> None:
        active = {
            model.model_version: model for model in self._replica.engine.active if model.socket_path
        }
        for model_version, (generation, task) in list(self._followed.items()):
            model = active.get(model_version)
            if model is None or model.generation != generation:
                del self._followed[model_version]
                task.cancel()
                self._feed.end(model_version)
                metrics.CACHED_PREFIXES.remove(model_version)
        for model_version, model in active.items():
            if model_version not in self._followed:
                task = asyncio.create_task(self._follow(model), name=f"cache {model_version}")
                self._followed[model_version] = (model.generation, task)
                names = functools.partial(self._feed.names, model_version)
                metrics.CACHED_PREFIXES.labels(model_version).set_function(names)

    async def _follow(self, model: Model) -> None:
        backoff = Backoff(base_s=_RETRY_S_MIN, cap_s=self._retry_s_max, rng=self._rng)
        while True:
            try:
                await self._pass_on(model, backoff)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _log.info("the runner of %s does not report its cache", model.model_version)
                    return
                _log.debug("the cache of %s is not heard: %s", model.model_version, error.code())
            except Exception:
                _log.exception("the cache of %s cannot be followed", model.model_version)
            # Whoever was replaced by a newer runner's task was cancelled, and never gets here.
            self._feed.end(model.model_version)
            await asyncio.sleep(backoff.next_s())

    async def _pass_on(self, model: Model, backoff: Backoff) -> None:
        """Pass on what one watch tells, until it ends or has a gap."""
        feed, model_version = self._feed, model.model_version
        revision: int | None = None
        is_told = False
        async with contextlib.aclosing(self._watch(model.socket_path)) as responses:
            async for response in responses:
                if revision is not None and response.revision != revision + 1:
                    return
                revision = response.revision
                backoff.reset()
                for entry in response.models:
                    if entry.model_version != model_version:
                        continue
                    if entry.reset:
                        is_told = entry.source != pb.CACHE_SOURCE_UNSPECIFIED
                        if is_told:
                            feed.begin(model_version)
                        else:
                            feed.end(model_version)
                    if is_told:
                        feed.tell(model_version, stored=entry.stored, removed=entry.removed)
