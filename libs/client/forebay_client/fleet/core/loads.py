"""How far each model has come on each replica, from what their batchers report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from forebay_client.fleet.core.state import Load, PhaseTime

_FAILED = "failed"
_LAUNCH = "launch "


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One model of a replica, as reported."""

    model_version: str
    state: str
    phase: str


class Loads:
    """Measures phases by the moments at which they were seen to change."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, str], Load] = {}
        self.failures: dict[str, list[str]] = {}
        """On which replicas the load of each model version was seen to fail, once per failure."""

    def observe(self, replica_id: str, models: Iterable[Seen], *, now: float) -> bool:
        """Take in a replica's report; returns whether anything changed.

        Args:
            replica_id: whose report it is.
            models: every model on it.
            now: seconds, on the clock that the result is to be read by.
        """
        changed = False
        for seen in models:
            key = (replica_id, seen.model_version)
            before = self._loads.get(key)
            if before is None:
                self._loads[key] = Load(replica_id, seen.model_version, seen.state, seen.phase, now)
            elif (before.state, before.phase) != (seen.state, seen.phase):
                self._loads[key] = _advanced(before, seen, now)
            else:
                continue
            changed = True
            if seen.state == _FAILED:
                self.failures.setdefault(seen.model_version, []).append(replica_id)
        return changed

    def forget(self, replica_ids: Iterable[str]) -> bool:
        """Drop replicas that are gone; returns whether there were any."""
        gone = set(replica_ids)
        keys = [key for key in self._loads if key[0] in gone]
        for key in keys:
            del self._loads[key]
        return bool(keys)

    def all(self) -> tuple[Load, ...]:
        """Every load, in the order they were first seen."""
        return tuple(self._loads.values())


def lost_launches(effects: Sequence[Sequence[str]], *, alive: int) -> tuple[str, ...]:
    """Replicas that were launched and are no more, those launched last first.

    Args:
        effects: what the autoscaler has ordered, such as `launch r-77b0`, newest decision first.
        alive: how many replicas there are, in whatever state.
    """
    launched = [
        effect.removeprefix(_LAUNCH).split()[0]
        for decision in effects
        for effect in decision
        if effect.startswith(_LAUNCH)
    ]
    # Who is alive is not said, but the newest are the likeliest.
    return tuple(launched[alive:])


def _advanced(before: Load, seen: Seen, now: float) -> Load:
    phases = before.phases
    if before.phase:
        phases = (*phases, PhaseTime(before.phase, now - before.since_unix_s))
    if seen.phase and not before.phase:
        # A new load: a runner that died is being started again.
        phases = ()
    return Load(before.replica_id, seen.model_version, seen.state, seen.phase, now, phases)
