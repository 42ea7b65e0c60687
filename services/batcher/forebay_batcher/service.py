"""BatcherService: the replica for watchers, the queue for people, orders from the autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as pb
from forebay.batcher.v1 import batcher_service_pb2_grpc as rpc
from forebay_common.errors import ForebayError, Reason

from forebay_batcher.core.queue import Limits, PriorityClass
from forebay_batcher.drain import Drain
from forebay_batcher.ensure_loop import EnsureLoop
from forebay_batcher.messages import class_message, queued_message, replica_message
from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Replica, Watch

SERVICE = pb.DESCRIPTOR.services_by_name["BatcherService"].full_name

_LISTED_DEFAULT = 100
_LISTED_MAX = 10_000
_LOAD_INTERVAL_MS = 100

Context = grpc.aio.ServicerContext[Any, Any]


class BatcherService(rpc.BatcherServiceServicer):
    """Translates between the contract and the replica."""

    def __init__(
        self,
        *,
        replica: Replica,
        queue: QueueLoop,
        drain: Drain,
        ensure: EnsureLoop,
        limits: Limits,
        drain_timeout_s: float,
    ) -> None:
        self._replica = replica
        self._queue = queue
        self._drain = drain
        self._ensure = ensure
        self._limits = limits
        self._drain_timeout_s = drain_timeout_s

    async def WatchReplica(  # noqa: N802
        self, request: pb.WatchReplicaRequest, context: Context
    ) -> AsyncIterator[pb.WatchReplicaResponse]:
        interval_ms = request.load_interval_ms or _LOAD_INTERVAL_MS
        watch = Watch(self._replica, interval_s=interval_ms / 1000)
        revision = 0
        while True:
            await watch.next()
            revision += 1
            yield pb.WatchReplicaResponse(
                revision=revision, replica=replica_message(self._replica, self._queue.queue)
            )

    async def GetQueue(  # noqa: N802
        self, request: pb.GetQueueRequest, context: Context
    ) -> pb.GetQueueResponse:
        if request.limit > _LISTED_MAX:
            raise ForebayError(
                Reason.INVALID_ARGUMENT, f"limit must be at most {_LISTED_MAX}.", param="limit"
            )
        now, queue = time.monotonic(), self._queue.queue
        waiting = queue.listing(request.limit or _LISTED_DEFAULT, now)
        return pb.GetQueueResponse(
            requests=[queued_message(each, now) for each in waiting],
            depths=[
                pb.ClassDepth(
                    priority_class=class_message(priority),
                    queued=queue.depth(priority),
                    limit=self._limits.classes[priority].queued_max,
                )
                for priority in PriorityClass
            ],
        )

    async def ActivateReplica(  # noqa: N802
        self, request: pb.ActivateReplicaRequest, context: Context
    ) -> pb.ActivateReplicaResponse:
        replica = self._replica
        replica.set_standing(
            replica.standing.activate(request.fence, has_active_model=bool(replica.engine.active))
        )
        return pb.ActivateReplicaResponse(replica=replica_message(replica, self._queue.queue))

    async def DrainReplica(  # noqa: N802
        self, request: pb.DrainReplicaRequest, context: Context
    ) -> pb.DrainReplicaResponse:
        self._drain.begin(request.fence)
        remaining_s = context.time_remaining()
        timeout_s = self._drain_timeout_s if remaining_s is None else remaining_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain.finished()
        except TimeoutError:
            raise ForebayError(
                Reason.DEADLINE_EXCEEDED, "Requests are still running; the drain goes on."
            ) from None
        return pb.DrainReplicaResponse()

    async def EnsureModel(  # noqa: N802
        self, request: pb.EnsureModelRequest, context: Context
    ) -> AsyncIterator[pb.EnsureModelResponse]:
        if not request.spec.model_version:
            raise ForebayError(
                Reason.INVALID_ARGUMENT, "spec.model_version is required.", param="spec"
            )
        async with contextlib.aclosing(self._ensure.ensure(request.spec)) as models:
            async for model in models:
                yield pb.EnsureModelResponse(
                    state=model.state.value,  # type: ignore[arg-type]  # the contract's numbers
                    phase=model.phase,  # type: ignore[arg-type]  # passed on as it came
                )
