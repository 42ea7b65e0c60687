"""Follows the catalogue for every watcher of this process with one pair of etcd watches.

A watcher gets the newest catalogue whenever it is ready for one; what came in between is skipped.
While etcd is away the last catalogue stays.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Keys
from forebay_common.store import Snapshot, Store

from forebay_registry.adapters.catalogue_store import assemble


class CatalogueFeed:
    """The newest catalogue, and a wait for the next."""

    def __init__(
        self, store: Store, keys: Keys, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._prefixes = (keys.models, keys.aliases)
        self._clock = clock
        self._snapshots: dict[str, Snapshot] = {}
        self._heard_at = dict.fromkeys(self._prefixes, -math.inf)
        self._catalogue: registry.Catalogue | None = None
        self._published = asyncio.Event()

    @property
    def catalogue(self) -> registry.Catalogue | None:
        """The newest catalogue; None before etcd has answered. Not to be changed."""
        return self._catalogue

    def age_s(self, now: float) -> float:
        """Seconds since etcd last showed that the catalogue is current."""
        return max(0.0, now - min(self._heard_at.values()))

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for prefix in self._prefixes:
                group.create_task(self._follow(prefix))

    async def catalogues(self) -> AsyncGenerator[registry.Catalogue, None]:
        """The catalogue as it is, then again after each change."""
        sent: registry.Catalogue | None = None
        while True:
            published = self._published
            if self._catalogue is not None and self._catalogue is not sent:
                sent = self._catalogue
                yield sent
                continue
            await published.wait()

    async def _follow(self, prefix: str) -> None:
        def heard() -> None:
            self._heard_at[prefix] = self._clock()

        async with aclosing(self._store.watch(prefix, on_alive=heard)) as snapshots:
            async for snapshot in snapshots:
                self._snapshots[prefix] = snapshot
                self._publish()

    def _publish(self) -> None:
        if len(self._snapshots) < len(self._prefixes):
            return
        models, aliases = (self._snapshots[prefix] for prefix in self._prefixes)
        assembled = assemble(models, aliases)
        if self._catalogue is not None and _same(self._catalogue, assembled):
            return
        self._catalogue = assembled
        published, self._published = self._published, asyncio.Event()
        published.set()


def _same(old: registry.Catalogue, new: registry.Catalogue) -> bool:
    """Whether nothing but the revision of the reading differs."""
    return list(old.models) == list(new.models) and list(old.aliases) == list(new.aliases)
