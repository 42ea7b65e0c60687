"""The replica's present state, and waiting for it to change.

Whoever watches reads the whole state each time, so a change that nobody saw is never missed.
"""

from __future__ import annotations

import asyncio
import dataclasses

from forebay_batcher.core.models import Engine
from forebay_batcher.core.standing import Standing


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What never changes while the process lives."""

    replica_id: str
    pool: str
    version: str


class Replica:
    """The engine's state and the replica's standing. Used from one event loop only."""

    def __init__(self, identity: Identity, standing: Standing) -> None:
        self.identity = identity
        self.address = ""
        """Where it listens; empty until it does."""
        self._engine = Engine()
        self._standing = standing
        self._revision = 0
        self._structure = 0
        self._changed: asyncio.Event | None = None
        """Made by whoever waits: the load changes twice per request, mostly with nobody there."""
        self._restructured = asyncio.Event()

    @property
    def engine(self) -> Engine:
        """What is known of the engine host."""
        return self._engine

    @property
    def standing(self) -> Standing:
        """Role, draining, fence."""
        return self._standing

    @property
    def is_ready(self) -> bool:
        """Requests can be served now."""
        return self._standing.is_serving and bool(self._engine.active)

    @property
    def is_warm(self) -> bool:
        """A standby that can be claimed."""
        standing = self._standing
        waits = not standing.draining and not standing.is_serving
        return waits and self._engine.is_warm

    def set_engine(self, engine: Engine) -> None:
        """Replace what is known of the engine host."""
        restructured = _structure(engine) != _structure(self._engine)
        self._engine = engine
        self._publish(restructured=restructured)

    def set_standing(self, standing: Standing) -> None:
        """Replace the standing."""
        if standing == self._standing:
            return
        self._standing = standing
        self._publish(restructured=True)

    def touch(self) -> None:
        """Say that the load has changed."""
        self._publish(restructured=False)

    def nudge(self) -> None:
        """Have everybody who watches look again at once."""
        self._publish(restructured=True)

    def _publish(self, *, restructured: bool) -> None:
        self._revision += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        if restructured:
            self._structure += 1
            self._restructured.set()
            self._restructured = asyncio.Event()


class Watch:
    """One watcher's place. Changes of structure (states, role, draining) are told at once, changes
    of load alone at most once per interval."""

    def __init__(self, replica: Replica, *, interval_s: float) -> None:
        self._replica = replica
        self._interval_s = interval_s
        self._revision = -1
        self._structure = -1
        self._next_load_at = 0.0

    async def next(self) -> None:
        """Wait until there is something to tell; the first time at once."""
        replica = self._replica
        if self._revision == replica._revision:
            if replica._changed is None:
                replica._changed = asyncio.Event()
            await replica._changed.wait()
        if self._structure == replica._structure:
            try:
                async with asyncio.timeout_at(self._next_load_at):
                    await replica._restructured.wait()
            except TimeoutError:
                pass
        self._revision = replica._revision
        self._structure = replica._structure
        self._next_load_at = asyncio.get_running_loop().time() + self._interval_s


def _structure(engine: Engine) -> object:
    return engine.heard, [
        (
            m.model_version,
            m.state,
            m.phase,
            m.generation,
            m.slots,
            m.context_tokens,
            m.task,
            m.reason,
        )
        for m in engine.models.values()
    ]
