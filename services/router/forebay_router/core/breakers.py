"""Takes replicas out that answer with faults, and lets them in again by probes.

A breaker is CLOSED while its replica is well. Faults in a row, or too large a share of faults among
recent outcomes, open it: the replica gets no requests for a while that doubles each time. Then it
is HALF_OPEN: one request at a time goes there, and after enough of them ended well in a row the
breaker closes; one fault opens it again. A probe is over with its first message: an answer may take
minutes more.

Only what speaks against the replica is a fault. A caller's mistake, a refusal because it is full,
and a caller that leaves say nothing. What was in flight when a replica died was lost once, however
many requests it was. However many are bad, at least half of a model's replicas stay in: errors that
come from everywhere are not cured by taking replicas away.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Set
from enum import StrEnum


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(StrEnum):
    """What an attempt says of its replica."""

    WELL = "well"
    FAULT = "fault"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """When a breaker opens and closes."""

    faults_in_a_row: int = 3
    fault_share: float = 0.25
    """Of recent outcomes."""
    faults_least: float = 3.0
    """Recent faults below which the share says nothing."""
    half_life_s: float = 5.0
    """Time in which an outcome loses half of its weight."""
    open_s: float = 10.0
    open_max_s: float = 300.0
    probes: int = 3
    """Probes in a row that must end well."""


@dataclasses.dataclass(slots=True, eq=False)
class _Breaker:
    well: float = 0.0
    faults: float = 0.0
    weighed_s: float = 0.0
    in_a_row: int = 0
    lost_s: float = -math.inf
    """When it was last lost with all it had in flight."""
    state: State = State.CLOSED
    openings: int = 0
    until_s: float = 0.0
    probing: int = 0
    probes_well: int = 0


Peers = Callable[[], tuple[int, int]]
"""Replicas that could take the same requests, and how many of them are excluded by breakers."""


class Breakers:
    """The breakers of one router."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        self._breakers: dict[str, _Breaker] = {}
        self._excluded: set[str] = set()
        self._due: list[tuple[float, str]] = []

    @property
    def excluded(self) -> Set[str]:
        """Replicas that get no request now: always the same set."""
        return self._excluded

    def state(self, replica_id: str) -> State:
        """Of a replica's breaker."""
        breaker = self._breakers.get(replica_id)
        return breaker.state if breaker is not None else State.CLOSED

    def advance(self, now: float) -> bool:
        """Half-open what has been open for long enough. Returns whether there was any."""
        due = self._due
        moved = False
        while due and due[0][0] <= now:
            until_s, replica_id = heapq.heappop(due)
            breaker = self._breakers.get(replica_id)
            if breaker is None or breaker.state is not State.OPEN or breaker.until_s != until_s:
                continue
            breaker.state = State.HALF_OPEN
            breaker.probing = breaker.probes_well = 0
            self._excluded.discard(replica_id)
            moved = True
        return moved

    def sent(self, replica_id: str) -> bool:
        """A request goes there. While the breaker is half open, it is the only one.

        Returns:
            Whether it is a probe: `ended` is to be told.
        """
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.state is not State.HALF_OPEN:
            return False
        breaker.probing += 1
        self._excluded.add(replica_id)
        return True

    def lost(self, replica_id: str, since_s: float, now: float) -> Verdict:
        """The replica was lost with a request that was sent at `since_s`. What was in flight
        together is lost together: the first of it is a fault, the others say nothing."""
        breaker = self._breakers.get(replica_id)
        if breaker is None:
            breaker = self._breakers[replica_id] = _Breaker(weighed_s=now)
        elif since_s <= breaker.lost_s:
            return Verdict.NOTHING
        breaker.lost_s = now
        return Verdict.FAULT

    def lost_at(self, replica_id: str) -> float:
        """When the replica was last lost, as `lost` was told; minus infinity for never."""
        breaker = self._breakers.get(replica_id)
        return breaker.lost_s if breaker is not None else -math.inf

    def ended(
        self, replica_id: str, verdict: Verdict, now: float, peers: Peers, *, is_probe: bool = False
    ) -> State | None:
        """An attempt there has ended, or has shown how it will.

        Returns:
            The breaker's new state, where it changed.
        """
        breaker = self._breakers.get(replica_id)
        if breaker is None:
            if verdict is not Verdict.FAULT:
                return None
            breaker = self._breakers[replica_id] = _Breaker(weighed_s=now)
        if breaker.state is State.HALF_OPEN:
            return self._end_probe(replica_id, breaker, verdict, now, is_probe=is_probe)
        if breaker.state is State.OPEN or verdict is Verdict.NOTHING:
            return None
        self._weigh(breaker, verdict, now)
        if verdict is Verdict.WELL:
            if not breaker.openings and breaker.faults < 0.1:
                del self._breakers[replica_id]
            return None
        if not self._is_bad(breaker):
            return None
        able, excluded = peers()
        if (excluded + 1) * 2 > able:
            return None
        return self._open(replica_id, breaker, now)

    def forget(self, replica_id: str) -> None:
        """Drop a replica that left."""
        self._breakers.pop(replica_id, None)
        self._excluded.discard(replica_id)

    def _end_probe(
        self,
        replica_id: str,
        breaker: _Breaker,
        verdict: Verdict,
        now: float,
        *,
        is_probe: bool,
    ) -> State | None:
        if verdict is Verdict.FAULT:
            return self._open(replica_id, breaker, now)
        # A request from before the breaker opened may end now, too: that it does proves nothing.
        if not is_probe:
            return None
        breaker.probing = max(0, breaker.probing - 1)
        if not breaker.probing:
            self._excluded.discard(replica_id)
        if verdict is Verdict.NOTHING:
            return None
        breaker.probes_well += 1
        if breaker.probes_well < self._options.probes:
            return None
        self._excluded.discard(replica_id)
        breaker.state = State.CLOSED
        breaker.well = breaker.faults = 0.0
        breaker.in_a_row = 0
        breaker.weighed_s = now
        return State.CLOSED

    def _weigh(self, breaker: _Breaker, verdict: Verdict, now: float) -> None:
        options = self._options
        elapsed_s = max(0.0, now - breaker.weighed_s)
        kept = 0.5 ** (elapsed_s / options.half_life_s)
        breaker.well *= kept
        breaker.faults *= kept
        breaker.weighed_s = now
        if verdict is Verdict.FAULT:
            breaker.faults += 1
            breaker.in_a_row += 1
            return
        breaker.well += 1
        breaker.in_a_row = 0
        if breaker.openings and breaker.well > 20 and breaker.faults < 0.1:
            # It has been well for some time: the next opening is a first one.
            breaker.openings = 0

    def _is_bad(self, breaker: _Breaker) -> bool:
        options = self._options
        if breaker.in_a_row >= options.faults_in_a_row:
            return True
        outcomes = breaker.well + breaker.faults
        return (
            breaker.faults >= options.faults_least
            and breaker.faults >= options.fault_share * outcomes
        )

    def _open(self, replica_id: str, breaker: _Breaker, now: float) -> State:
        options = self._options
        open_s = min(options.open_max_s, options.open_s * 2.0 ** min(breaker.openings, 30))
        breaker.openings += 1
        breaker.state = State.OPEN
        breaker.until_s = now + open_s
        breaker.in_a_row = 0
        heapq.heappush(self._due, (breaker.until_s, replica_id))
        self._excluded.add(replica_id)
        return State.OPEN
