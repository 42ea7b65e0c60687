"""What the policy needs of the world around it."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from forebay_common.errors import ForebayError

from forebay_router.core.place import Placer, Replica
from forebay_router.core.resolve import Catalogue


class CatalogueSource(Protocol):
    """The last known catalogue."""

    @property
    def is_listed(self) -> bool:
        """Whether the catalogue was ever read."""
        ...

    async def ready(self) -> None:
        """Wait until it was read."""
        ...

    def current(self) -> Catalogue:
        """The catalogue; empty before it was read."""
        ...


class ReplicaSource(Protocol):
    """The last known replicas."""

    @property
    def placer(self) -> Placer:
        """What places requests among them; always the same."""
        ...

    @property
    def down(self) -> Container[str]:
        """Ids of replicas that are held for down; always the same container."""
        ...

    @property
    def revision(self) -> int:
        """Grows with each change that can make a replica placeable."""
        ...

    def replicas(self) -> Sequence[Replica]:
        """All of them."""
        ...

    async def changed(self, since_revision: int) -> None:
        """Wait until `revision` is another one."""
        ...

    def mark_down(self, replica_id: str) -> None:
        """Hold a replica for down until it shows that it is not."""
        ...

    def nudge(self) -> None:
        """Have everybody who waits for a replica look again."""
        ...


class ColdModels(Protocol):
    """Models that no replica serves; `forebay_router.cold_loop.Cold`."""

    def is_cold(self, model_version: str) -> bool:
        """Whether no replica has it, or is about to."""
        ...

    def is_coming(self, model_version: str) -> bool:
        """Whether somebody is making it ready."""
        ...

    def is_awaited(self, model_version: str) -> bool:
        """Whether requests wait for it, or for their turn after they did."""
        ...

    def hold(self, model_version: str) -> AbstractContextManager[asyncio.Semaphore]:
        """Let a request wait for it, and have it made ready; gives the gate to pass then."""
        ...

    def failure(self, model_version: str) -> ForebayError | None:
        """Why it cannot be had now."""
        ...

    def phase(self, model_version: str) -> str:
        """What a request for it waits for."""
        ...

    def remaining_s(self, model_version: str) -> float:
        """Seconds until it will be ready, as far as can be told."""
        ...
