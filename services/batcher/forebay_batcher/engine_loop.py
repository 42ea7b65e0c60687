"""Follows the engine host, and makes what it says hold for the queue and the connections.

Without the host nothing is known of its models, so none is offered until it is heard again;
requests that run already go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

import grpc
from forebay_common.backoff import Backoff
from forebay_wire.client import ClientPool

from forebay_batcher import metrics
from forebay_batcher.adapters.engine import is_serving, watch_engine
from forebay_batcher.core.models import Engine
from forebay_batcher.core.queue import Capacity
from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Replica

_log = logging.getLogger(__name__)
_RETRY_S_MIN = 0.05


def target_of(socket_path: str) -> str:
    """The gRPC address of a runner."""
    return f"unix:{socket_path}"


class EngineLoop:
    """Knows the engine host."""

    def __init__(
        self,
        address: str,
        *,
        replica: Replica,
        queue: QueueLoop,
        pool: ClientPool,
        load_interval_ms: int,
        retry_s_max: float,
        rng: random.Random,
    ) -> None:
        self._address = address
        self._replica = replica
        self._queue = queue
        self._pool = pool
        self._load_interval_ms = load_interval_ms
        self._backoff = Backoff(base_s=_RETRY_S_MIN, cap_s=retry_s_max, rng=rng)
        self._targets: dict[str, int] = {}

    async def run(self) -> None:
        """Follow the host until cancelled, calling it again whenever it is lost."""
        while True:
            ending = "OK"
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                ending = error.code().name
            if active := len(self._replica.engine.active):
                _log.warning("engine host lost, and with it %d models (%s)", active, ending)
            metrics.ENGINE_CONNECTED.set(0)
            self._show(self._replica.engine.silent())
            await asyncio.sleep(self._backoff.next_s())

    async def check_runner(self, model_version: str, runner: Capacity) -> None:
        """After a connection broke: if nobody answers at the runner's socket, offer it no more,
        without waiting for its host to notice."""
        model = self._replica.engine.models.get(model_version)
        if model is None or not model.is_active or model.generation != runner.generation:
            return
        if await is_serving(runner.target):
            return
        _log.warning("runner of %s (generation %d) is gone", model_version, runner.generation)
        self._show(self._replica.engine.without_runner(model_version, runner.generation))

    async def _follow(self) -> None:
        states = watch_engine(self._address, load_interval_ms=self._load_interval_ms)
        async with contextlib.aclosing(states):
            async for models in states:
                self._backoff.reset()
                metrics.ENGINE_CONNECTED.set(1)
                self._show(self._replica.engine.described(models))

    def _show(self, engine: Engine) -> None:
        before = self._replica.engine
        self._replica.set_engine(engine)
        self._queue.set_capacities(engine.capacities())
        self._retain(engine)
        for model_version in before.models.keys() - engine.models.keys():
            metrics.SLOTS.remove(model_version)
            metrics.IN_FLIGHT.remove(model_version)
        for model in engine.models.values():
            metrics.SLOTS.labels(model.model_version).set(model.slots if model.is_active else 0)

    def _retain(self, engine: Engine) -> None:
        """Keep the connections to runners that are there. A new runner at an old address gets a new
        connection, because the old one may be waiting before it tries again."""
        targets = {
            target_of(model.socket_path): model.generation
            for model in engine.models.values()
            if model.socket_path and engine.lost.get(model.model_version) != model.generation
        }
        if targets == self._targets:
            return
        old = self._targets
        self._pool.retain([t for t in targets if old.get(t, targets[t]) == targets[t]])
        self._targets = targets
