"""A launcher that launches nothing and keeps what it was asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Set

from forebay_autoscaler.core.observe import Launched
from forebay_autoscaler.launcher import LaunchOrder

_log = logging.getLogger(__name__)


class DryRunLauncher:
    """Records orders, the newest `limit` of them. See `forebay_autoscaler.launcher.Launcher`."""

    def __init__(self, *, limit: int = 1000) -> None:
        self.recorded: deque[str] = deque(maxlen=limit)

    @property
    def carries_out(self) -> bool:
        return False

    async def begin(self, fence: int) -> None:
        self._record(f"begin {fence}")

    def launched(self) -> tuple[Launched, ...]:
        return ()

    def gone(self) -> Set[str]:
        return frozenset()

    async def launch(self, order: LaunchOrder) -> None:
        versions = ",".join(spec.model_version for spec in order.specs)
        self._record(f"launch {order.replica_id} {order.pool} {versions}")

    def mark_leaving(self, replica_id: str, *, leaving: bool) -> None:
        self._record(f"mark {replica_id} {'leaving' if leaving else 'staying'}")

    def mark_active(self, replica_id: str) -> None:
        self._record(f"mark {replica_id} active")

    async def stop(self, replica_id: str) -> None:
        self._record(f"stop {replica_id}")

    async def close(self, *, stop_replicas: bool) -> None:
        self._record("close")

    def _record(self, order: str) -> None:
        _log.info("dry run: %s", order)
        self.recorded.append(order)
