"""One watch of etcd, from its creation to its end, however that comes about.

etcd is asked for a sign of life whenever it was quiet, because a connection that died without a
word looks like one on which nothing happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Self

import grpc.aio
from aetcd import rpc

from forebay_common.members import REQUIRE_LEADER, Members, to_error


class WatchEndedError(Exception):
    """The watch is over; what it watched must be listed again before another is opened."""


async def changes(
    members: Members,
    create: Any,
    *,
    timeout_s: float,
    progress_interval_s: float,
    silence_s: float,
) -> AsyncGenerator[Sequence[Any], None]:
    """Batches of events, empty ones as signs of life. Raises WatchEndedError.

    `create` says from which revision on; what was before is known to the caller.
    """
    member = await members.choose(time.monotonic() + timeout_s)
    requests = _Requests(rpc.WatchRequest(create_request=create))
    # Not once etcd is back, which may then be another one: what was listed would be stale.
    stream = member.watch.Watch(requests, metadata=REQUIRE_LEADER, wait_for_ready=False)
    last_revision = create.start_revision - 1
    batch: list[Any] = []
    with requests, member.hold(stream) as call:
        try:
            while True:
                response = await _hear(call, requests, progress_interval_s, silence_s)
                member.heard()
                if response.canceled:
                    raise WatchEndedError(_why_cancelled(response))
                if response.header.revision < last_revision:
                    raise WatchEndedError("etcd lost data or this member lags behind")
                batch.extend(response.events)
                if response.fragment:
                    continue
                if batch:
                    last_revision = batch[-1].kv.mod_revision
                yield batch
                batch = []
        except asyncio.CancelledError:
            if member.was_cut():
                raise WatchEndedError("its connection was replaced") from None
            raise
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, TimeoutError) as error:
            await members.suspect(member)
            raise WatchEndedError(to_error(error)) from error


async def _hear(
    call: Any, requests: _Requests, progress_interval_s: float, silence_s: float
) -> Any:
    """The next response. TimeoutError once etcd kept silent for too long."""
    # Cancelling a read would end the call, so one read outlives several waits.
    reading = asyncio.ensure_future(call.read())
    silent_since = time.monotonic()
    try:
        while True:
            await asyncio.wait({reading}, timeout=progress_interval_s)
            if reading.done():
                break
            if time.monotonic() - silent_since >= silence_s:
                raise TimeoutError
            requests.ask_for_progress()
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()
    response = reading.result()
    if response is grpc.aio.EOF:
        raise WatchEndedError("etcd closed the stream")
    return response


class _Requests:
    """What a watch sends: its creation, then a request for progress whenever one is wanted.

    `call.write` is not used, because in grpc.aio it can wait forever on a call that was cancelled.
    """

    def __init__(self, create: Any) -> None:
        self._create: Any = create
        self._wanted = asyncio.Event()
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over = True
        self._wanted.set()

    def ask_for_progress(self) -> None:
        """Send a request for progress, once, even if an earlier one is not yet sent."""
        self._wanted.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield self._create
        while True:
            await self._wanted.wait()
            if self._over:
                return
            self._wanted.clear()
            yield rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())


def _why_cancelled(response: Any) -> str:
    if response.compact_revision:
        return f"compacted at revision {response.compact_revision}"
    return response.cancel_reason or "cancelled by etcd"
