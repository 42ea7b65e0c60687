"""What the policy needs of the world around it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from forebay_router.core.place import Ledger, Replica
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
    def ledger(self) -> Ledger:
        """This router's own requests on them; always the same ledger."""
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
