"""Models that no replica serves: where to load one, how many requests may wait for it, how long it
will take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from enum import IntEnum


class Presence(IntEnum):
    """How near a model version is to being served on a host; lower is nearer."""

    ASLEEP = 0
    ABSENT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A replica that could load a model."""

    replica_id: str
    presence: Presence
    models: int
    """Model versions on it."""
    requests: int
    """Queued and in flight there."""


def choose_host(hosts: Iterable[Host], *, tried: Container[str]) -> Host | None:
    """Where to wake or load a model: where it sleeps, else where there is the least.

    All routers that see the same choose the same, so a load that two of them order is one.
    """
    return min(
        (host for host in hosts if host.replica_id not in tried),
        key=lambda host: (host.presence, host.models, host.requests, host.replica_id),
        default=None,
    )


class LoadTimes:
    """How long loads took, by model version: the newest counts for half."""

    def __init__(self, *, most: int = 1024) -> None:
        self._most = most
        self._seconds: dict[str, float] = {}

    def note(self, model_version: str, seconds: float) -> None:
        """A load took so long."""
        known = self._seconds.pop(model_version, seconds)
        self._seconds[model_version] = (known + seconds) / 2
        if len(self._seconds) > self._most:
            del self._seconds[next(iter(self._seconds))]

    def remaining_s(self, model_version: str, elapsed_s: float, *, otherwise: float) -> float:
        """Seconds a load that runs will still take, at least one; `otherwise` where nothing is
        known of it."""
        expected_s = self._seconds.get(model_version, otherwise)
        return max(1.0, expected_s - elapsed_s)
