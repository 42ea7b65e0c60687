"""What is known of the world: views of etcd, and what the launcher runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Keys, View, from_json
from forebay_common.store import Store

from forebay_autoscaler.adapters.pool_store import decode_pool
from forebay_autoscaler.core.catalogue import resolve
from forebay_autoscaler.core.model import Observation, ReplicaSeen
from forebay_autoscaler.core.observe import see_replicas
from forebay_autoscaler.core.refusal import RefusedError
from forebay_autoscaler.launcher import Launcher

CATALOGUE_UNKNOWN = "catalogue_unknown"


class World:
    """Keeps the views current, and makes an observation of them."""

    def __init__(
        self, store: Store, keys: Keys, launcher: Launcher, *, on_change: Callable[[], None]
    ) -> None:
        self._launcher = launcher
        self._on_change = on_change
        self._replicas = View(store, keys.replicas, _decode_replica)
        self._pools = View(store, keys.pools, _decode_pool)
        self._models = View(store, keys.models, _decode_model)
        self._aliases = View(store, keys.aliases, _decode_alias)

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            for view in (self._replicas, self._pools, self._models, self._aliases):
                group.create_task(view.run())
                group.create_task(self._tell(view))

    async def _tell(self, view: View[Any]) -> None:
        revision = view.revision
        while True:
            revision = await view.changed(revision)
            self._on_change()

    def age_s(self) -> float:
        """Since etcd last confirmed the records that orders are based on."""
        now = time.monotonic()
        return max(self._replicas.age_s(now), self._pools.age_s(now))

    def pools(self) -> Mapping[str, autoscaler.Pool]:
        """Every pool by name."""
        return {pool.name: pool for pool in self._pools.entries.values()}

    def replicas(self, pool: str) -> tuple[ReplicaSeen, ...]:
        """The pool's replicas."""
        return see_replicas(
            pool, self._replicas.entries.values(), self._launcher.launched(), self._launcher.gone()
        )

    def addresses(self) -> Mapping[str, str]:
        """Of the announced batchers, by replica."""
        return {record.replica_id: record.address for record in self._replicas.entries.values()}

    def specs(self, pool: autoscaler.Pool) -> tuple[engine.ModelSpec, ...]:
        """What a replica of the pool loads. RefusedError when the catalogue does not have it."""
        models = {model.name: model for model in self._models.entries.values()}
        aliases = {alias.name: alias for alias in self._aliases.entries.values()}
        return resolve(pool.models, models, aliases)

    def observe(self, pool: autoscaler.Pool, *, failed: Set[str] = frozenset()) -> Observation:
        """All that a tick knows of the pool.

        Args:
            pool: which.
            failed: replicas of which an order failed since the last tick.
        """
        return Observation(
            now_s=time.monotonic(),
            time_unix_ms=time.time_ns() // 1_000_000,
            age_s=self.age_s(),
            replicas=self.replicas(pool.name),
            gone=self._launcher.gone(),
            failed=failed,
            launch_blocker=self._launch_blocker(pool),
        )

    def _launch_blocker(self, pool: autoscaler.Pool) -> str:
        if self._models.revision == 0 or self._aliases.revision == 0:
            return CATALOGUE_UNKNOWN
        try:
            self.specs(pool)
        except RefusedError as refused:
            return refused.reason.lower()
        return ""


def _decode_replica(key: str, value: bytes) -> batcher.Replica:
    return from_json(batcher.Replica, value)


def _decode_pool(key: str, value: bytes) -> autoscaler.Pool:
    return decode_pool(value)


def _decode_model(key: str, value: bytes) -> registry.Model:
    return from_json(registry.Model, value)


def _decode_alias(key: str, value: bytes) -> registry.Alias:
    return from_json(registry.Alias, value)
