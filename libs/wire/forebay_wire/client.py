"""Connections to peers: few, long-lived, made when they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from forebay_common.errors import ForebayError, Reason

from forebay_wire.core.connection import Connection
from forebay_wire.core.limits import Limits
from forebay_wire.transport import Wire, Wires

_BACKOFF_S_MIN = 0.05
_BACKOFF_S_MAX = 1.0


class Opening(Protocol):
    """A request that waits for a connection. It is told exactly one of these, unless withdrawn."""

    def on_connection(self, connection: Connection) -> None:
        """There is room for its stream; it opens it at once."""
        ...

    def on_unreachable(self, error: ForebayError) -> None:
        """There is no connection to be had."""
        ...


class ClientPool:
    """Connections to any number of peers."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        """Must be made while the event loop runs. `tls_server_name` is what certificates must name;
        the target's host when None."""
        self._limits = limits or Limits()
        self._tls = tls
        self._tls_server_name = tls_server_name
        self._wires = Wires(self._limits)
        self._peers: dict[str, _Peer] = {}

    @property
    def scheme(self) -> str:
        """What `:scheme` says."""
        return "http" if self._tls is None else "https"

    @property
    def message_bytes(self) -> int:
        """Largest message, in bytes."""
        return self._limits.message_bytes

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._wires.all)

    @property
    def streams(self) -> int:
        """Open streams."""
        return sum(len(wire.connection.streams) for wire in self._wires.all)

    @property
    def resets(self) -> int:
        """Streams that peers have reset."""
        return self._wires.resets

    def find(self, target: str) -> Connection | None:
        """A connection with room for a stream; None when `wait` must be asked for one."""
        peer = self._peers.get(target)
        return peer.find() if peer is not None else None

    def wait(self, target: str, opening: Opening) -> None:
        """Tell `opening` when there is room, or that there is none to be had.

        Never calls it before it returns.
        """
        peer = self._peers.get(target)
        if peer is None:
            peer = self._peers[target] = _Peer(target, self._wires, self._tls, self._server_name)
        peer.wait(opening)

    def withdraw(self, target: str, opening: Opening) -> None:
        """Forget one that waits."""
        peer = self._peers.get(target)
        if peer is not None:
            with contextlib.suppress(ValueError):
                peer.waiting.remove(opening)

    def retain(self, targets: Iterable[str], *, grace_s: float = 30.0) -> None:
        """Part with every other peer; its open streams get `grace_s`."""
        kept = set(targets)
        for target in [t for t in self._peers if t not in kept]:
            self._peers.pop(target).retire(grace_s)

    async def close(self, grace_s: float = 0.0) -> None:
        """Part with every peer."""
        self.retain((), grace_s=grace_s)
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wires.empty(), grace_s)
        self._wires.abort()
        await self._wires.empty()

    def _server_name(self, host: str) -> str | None:
        if self._tls is None:
            return None
        return self._tls_server_name or host


class _Peer:
    """One peer, its connections, and who waits for one."""

    def __init__(self, target: str, wires: Wires, tls: ssl.SSLContext | None, name: object) -> None:
        self.target = target
        self.waiting: deque[Opening] = deque()
        self._wires = wires
        self._tls = tls
        self._name = name
        self._open: list[Wire] = []
        self._connecting: asyncio.Task[None] | None = None
        self._failed_at = 0.0
        self._backoff_s = 0.0
        self._serving = False

    def find(self) -> Connection | None:
        best: Connection | None = None
        for wire in self._open:
            connection = wire.connection
            if connection.can_open and (
                best is None or len(connection.streams) < len(best.streams)
            ):
                best = connection
        return best

    def wait(self, opening: Opening) -> None:
        loop, limits = self._wires.loop, self._wires.limits
        if len(self.waiting) >= limits.pending_per_peer:
            loop.call_soon(opening.on_unreachable, _full())
        elif self._backoff_s and loop.time() - self._failed_at < self._backoff_s:
            loop.call_soon(opening.on_unreachable, _unreachable())
        else:
            self.waiting.append(opening)
            self._connect_if_needed()

    def retire(self, grace_s: float) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self._refuse_waiting()
        for wire in list(self._open):
            wire.retire(grace_s)
            if grace_s <= 0:
                wire.abort()

    def _connect_if_needed(self) -> None:
        usable = [wire for wire in self._open if not wire.connection.is_retiring]
        is_greeting = any(not wire.connection.is_greeted for wire in usable)
        if (
            self.waiting
            and self._connecting is None
            and not is_greeting
            and len(usable) < self._wires.limits.connections_per_peer
        ):
            self._connecting = self._wires.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._wires.limits.connect_timeout_s):
                await self._dial()
        except (OSError, TimeoutError):
            # ssl.SSLError is an OSError, too.
            self._note_failure()
            self._refuse_waiting()
        finally:
            self._connecting = None

    async def _dial(self) -> None:
        loop = self._wires.loop

        def make() -> Wire:
            return Wire(
                self._wires, is_client=True, on_capacity=self._serve, on_lost=self._note_lost
            )

        if self.target.startswith("unix:"):
            path = self.target.removeprefix("unix:")
            name = "localhost" if self._tls is not None else None
            _, wire = await loop.create_unix_connection(
                make, path, ssl=self._tls, server_hostname=name
            )
        else:
            host, _, port = self.target.rpartition(":")
            host = host.strip("[]")
            name = self._name(host) if callable(self._name) else None
            _, wire = await loop.create_connection(
                make, host, int(port), ssl=self._tls, server_hostname=name
            )
        self._open.append(wire)
        self._serve()

    def _serve(self) -> None:
        """Give those who wait what room there is."""
        if not self.waiting or self._serving:
            return
        self._serving = True
        try:
            while self.waiting:
                connection = self.find()
                if connection is None:
                    break
                self._backoff_s = 0.0
                self.waiting.popleft().on_connection(connection)
        finally:
            self._serving = False
        self._connect_if_needed()

    def _note_lost(self, wire: Wire) -> None:
        if wire in self._open:
            self._open.remove(wire)
        if not wire.connection.is_greeted:
            self._note_failure()
            self._refuse_waiting()
        self._connect_if_needed()

    def _note_failure(self) -> None:
        self._failed_at = self._wires.loop.time()
        self._backoff_s = min(max(_BACKOFF_S_MIN, self._backoff_s * 2), _BACKOFF_S_MAX)

    def _refuse_waiting(self) -> None:
        waiting, self.waiting = self.waiting, deque()
        for opening in waiting:
            self._wires.loop.call_soon(opening.on_unreachable, _unreachable())


def _unreachable() -> ForebayError:
    return ForebayError(Reason.REPLICA_LOST, "The replica cannot be reached.")


def _full() -> ForebayError:
    return ForebayError(
        Reason.QUEUE_FULL, "Too many requests wait for the replica.", retry_after_s=1.0
    )
