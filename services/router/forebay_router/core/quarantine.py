"""Requests that end the runners they run on are not given to every runner in turn.

When a runner dies, each request it had not yet answered a word of is a suspect. A suspect goes on
alone: never two of them at once on one replica before their first token, so that the next death
tells which one it was. A first token clears it; a second death condemns it, and whoever sends the
same again within `kept_s` is refused.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Set

CONDEMNED = 2
Death = tuple[str, float]
"""Of a runner: its replica, and when it was lost."""


@dataclasses.dataclass(slots=True)
class _Suspicion:
    deaths: int
    last: Death
    until_s: float


class Quarantine:
    """What is known of suspects, by a digest of the request."""

    def __init__(self, *, most: int, kept_s: float) -> None:
        """
        Args:
            most: suspects that are remembered.
            kept_s: how long after its last death.
        """
        self._most = most
        self._kept_s = kept_s
        self._suspicions: OrderedDict[bytes, _Suspicion] = OrderedDict()
        self._occupied: dict[str, bytes] = {}

    @property
    def has_suspects(self) -> bool:
        """Whether digests are worth making."""
        return bool(self._suspicions)

    @property
    def occupied(self) -> Set[str]:
        """Replicas that have a suspect which gave no token yet."""
        return self._occupied.keys()

    def deaths(self, digest: bytes, now: float) -> int:
        """Runners that died with this request unanswered."""
        suspicion = self._suspicions.get(digest)
        if suspicion is None:
            return 0
        if suspicion.until_s <= now:
            del self._suspicions[digest]
            return 0
        return suspicion.deaths

    def enter(self, replica_id: str, digest: bytes) -> None:
        """A suspect goes to a replica, which has no other."""
        assert replica_id not in self._occupied, "suspects go alone"
        self._occupied[replica_id] = digest

    def leave(self, replica_id: str, digest: bytes) -> bool:
        """It has ended there, or given a token. Returns whether the replica is free again by it."""
        if self._occupied.get(replica_id) != digest:
            return False
        del self._occupied[replica_id]
        return True

    def clear(self, digest: bytes) -> None:
        """It gave a token: it was another one."""
        self._suspicions.pop(digest, None)

    def suspect(self, digest: bytes, now: float, death: Death) -> int:
        """A runner died with this request unanswered, however many times it was sent there: the
        same may be asked by many. Returns how many have died."""
        deaths = self.deaths(digest, now)
        if not deaths or self._suspicions[digest].last != death:
            deaths += 1
        self._suspicions[digest] = _Suspicion(deaths, death, now + self._kept_s)
        self._suspicions.move_to_end(digest)
        while len(self._suspicions) > self._most:
            self._suspicions.popitem(last=False)
        return deaths
