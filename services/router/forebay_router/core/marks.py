"""Replicas this router holds for down before their lease says so.

A mark is set when a connection to the replica was lost, and cleared by evidence that is newer than
the mark: a report that came over a watch opened after it.
"""

from __future__ import annotations

from collections.abc import Set


class Marks:
    """The set of replicas that are down, and how often each was marked."""

    def __init__(self) -> None:
        self._down: set[str] = set()
        self._counts: dict[str, int] = {}

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._down

    @property
    def down(self) -> Set[str]:
        """The ids that are marked, to read: always the same set."""
        return self._down

    def mark(self, replica_id: str) -> bool:
        """Hold a replica for down. Returns whether it was up until now."""
        self._counts[replica_id] = self._counts.get(replica_id, 0) + 1
        if replica_id in self._down:
            return False
        self._down.add(replica_id)
        return True

    def epoch(self, replica_id: str) -> int:
        """Grows with each mark; evidence carries the epoch at which its collection began."""
        return self._counts.get(replica_id, 0)

    def clear(self, replica_id: str, epoch: int) -> bool:
        """Take a replica for up again, unless it was marked after `epoch`.

        Returns:
            Whether it was down until now.
        """
        if replica_id not in self._down or self.epoch(replica_id) != epoch:
            return False
        self._down.discard(replica_id)
        return True

    def forget(self, replica_id: str) -> None:
        """Drop a replica that left."""
        self._down.discard(replica_id)
        self._counts.pop(replica_id, None)
