"""What a replica's engines have cached, as its batcher tells it, for placement.

A replica that tells nothing (an older batcher, an engine without such events) is no fault: what was
sent there is taken for what it has.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay_common.backoff import Backoff

from forebay_router.core.place import Placer

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_UNSERVED_PAUSE_S = 60.0
"""Between two questions whether a batcher that does not serve it does so now."""
_UNKNOWN_WAIT_S = 2.0
"""Longest wait for a replica's own report to name a model that its cache was told of."""


async def follow_cache(
    replica_id: str,
    channel: Callable[[], grpc.aio.Channel],
    placer: Placer,
    *,
    changed: Callable[[], asyncio.Event],
    interval_ms: int,
    backoff_max_s: float,
    rng: random.Random,
) -> None:
    """Tell placement what a replica has cached, until cancelled.

    Args:
        replica_id: whose caches.
        channel: gives the channel to its batcher.
        placer: is told.
        changed: gives an event that is set when the replica has reported anew.
        interval_ms: least time between two messages, in milliseconds.
        backoff_max_s: longest pause between two attempts, in seconds.
        rng: spreads the pauses.
    """
    backoff = Backoff(base_s=_FIRST_PAUSE_S, cap_s=backoff_max_s, rng=rng)
    request = engine.WatchCacheRequest(interval_ms=interval_ms)
    while True:
        pause_s = 0.0
        call = engine_rpc.CacheServiceStub(channel()).WatchCache(request)
        try:
            revision: int | None = None
            async for response in call:
                if revision is not None and response.revision != revision + 1:
                    break
                revision = response.revision
                if not await _tell(replica_id, response, placer, changed):
                    break
                backoff.reset()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                pause_s = _UNSERVED_PAUSE_S
            else:
                _log.debug("the cache of %s is not told: %s", replica_id, error.code().name)
        finally:
            call.cancel()
            placer.untold(replica_id)
        await asyncio.sleep(pause_s or backoff.next_s())


async def _tell(
    replica_id: str,
    response: engine.WatchCacheResponse,
    placer: Placer,
    changed: Callable[[], asyncio.Event],
) -> bool:
    """Whether all of a message could be told."""
    for model in response.models:
        if model.source == engine.CACHE_SOURCE_UNSPECIFIED:
            placer.untold(replica_id, model.model_version)
            continue
        stored = list(model.stored)
        # Two streams tell of one replica, and this one may be ahead.
        try:
            async with asyncio.timeout(_UNKNOWN_WAIT_S):
                while not placer.cached(
                    replica_id,
                    model.model_version,
                    stored=stored,
                    removed=model.removed,
                    reset=model.reset,
                ):
                    await changed().wait()
        except TimeoutError:
            return False
    return True
