"""The port behind which replicas come into being and end: processes, pods, or a record of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Protocol

from forebay.engine.v1 import engine_service_pb2 as engine

from forebay_autoscaler.core.observe import Launched


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOrder:
    """A replica to launch, as a standby."""

    replica_id: str
    pool: str
    specs: tuple[engine.ModelSpec, ...]


class Launcher(Protocol):
    """Runs replicas. What it runs outlives it, and is found again by the next one.

    Orders raise ForebayError: STALE_FENCE when somebody with a higher fence has taken over,
    LOAD_FAILED when nothing could be started. It calls its `on_change` whenever `launched` or
    `gone` change by themselves.
    """

    @property
    def carries_out(self) -> bool:
        """Whether orders have an effect. Where they do not, nobody else is ordered anything."""
        ...

    async def begin(self, fence: int) -> None:
        """Take over for a leader: find what runs, and refuse the orders of earlier leaders."""
        ...

    def launched(self) -> tuple[Launched, ...]:
        """What it runs now."""
        ...

    def gone(self) -> Set[str]:
        """The replicas that ended last, bounded."""
        ...

    async def launch(self, order: LaunchOrder) -> None:
        """Start a replica and return; it loads by itself."""
        ...

    def mark_leaving(self, replica_id: str, *, leaving: bool) -> None:
        """Remember, also for the next leader, that a replica is to go; or no longer."""
        ...

    def mark_active(self, replica_id: str) -> None:
        """Remember, also for the next leader, that a replica takes traffic."""
        ...

    async def stop(self, replica_id: str) -> None:
        """End a replica and return when nothing is left of it. Idempotent."""
        ...

    async def close(self, *, stop_replicas: bool) -> None:
        """Let go of the replicas, or end them first."""
        ...
