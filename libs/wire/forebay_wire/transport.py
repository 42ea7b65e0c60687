"""Puts a core connection on a socket: what comes in, what goes out, and what time alone brings.

All that is written in one turn of the event loop leaves in one piece per connection: one engine
step over many streams is one system call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from forebay_common.errors import Reason

from forebay_wire.core.connection import Connection
from forebay_wire.core.frames import ErrorCode
from forebay_wire.core.headers import Headers
from forebay_wire.core.limits import Limits
from forebay_wire.core.stream import Budget, Stream

_log = logging.getLogger(__name__)

TICK_S = 0.5
"""How often time is looked at; timeouts of connections are this exact."""
# gRPC servers cut a client that pings a third time without a message in between, unless five
# minutes have passed (`grpc.http2.max_ping_strikes`, `min_ping_interval_without_data_ms`).
_PINGS_IN_SILENCE = 2
_LONG_SILENCE_S = 310.0
_LOOKS_WHILE_WAITING = 4
_LAST_WORDS_S = 2.0
_BUFFER_HIGH_BYTES = 256 << 10

OnRequest = Callable[[Stream, Headers, bool, bool], None]
OnCut = Callable[[Stream, Reason], None]
OnWaiting = Callable[[Stream], None]


class Turn:
    """Writes, once per turn of the event loop, what its connections have to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: list[Wire] = []

    def mark(self, wire: Wire) -> None:
        """A connection has something to write."""
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.append(wire)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for wire in dirty:
            wire.flush()


class Wires:
    """All connections of one server or one pool, and the clock they share."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.turn = Turn(self.loop)
        self.all: set[Wire] = set()
        self._past_resets = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wire: Wire) -> None:
        """A connection was made."""
        self.all.add(wire)
        self._empty.clear()
        if self._timer is None:
            self._timer = self.loop.call_later(TICK_S, self._tick)

    def discard(self, wire: Wire) -> None:
        """A connection is gone."""
        if wire in self.all:
            self.all.remove(wire)
            self._past_resets += wire.connection.resets
        if not self.all:
            self._empty.set()

    @property
    def resets(self) -> int:
        """Streams that peers have reset, ever."""
        return self._past_resets + sum(wire.connection.resets for wire in self.all)

    async def empty(self) -> None:
        """Wait until no connection is left."""
        await self._empty.wait()

    def abort(self) -> None:
        """Cut every connection."""
        for wire in list(self.all):
            wire.abort()

    def _tick(self) -> None:
        self._timer = None
        now = self.loop.time()
        for wire in list(self.all):
            try:
                wire.tick(now)
            except Exception:
                _log.exception("unexpected error on a connection")
                wire.abort()
        if self.all:
            self._timer = self.loop.call_later(TICK_S, self._tick)


class Wire(asyncio.Protocol):
    """One connection on its socket."""

    connection: Connection

    def __init__(
        self,
        wires: Wires,
        *,
        is_client: bool,
        budget: Budget | None = None,
        on_request: OnRequest | None = None,
        on_capacity: Callable[[], None] | None = None,
        on_cut: OnCut | None = None,
        on_waiting: OnWaiting | None = None,
        on_lost: Callable[[Wire], None] | None = None,
        age_s: float | None = None,
    ) -> None:
        """`on_cut` ends a stream with a status; without it streams are reset. `on_waiting` is told
        of each stream whose reader lags, a few times within `slow_reader_s`. `age_s` is how long
        the connection may live; None is for ever."""
        self._wires = wires
        self._limits = wires.limits
        self._is_client = is_client
        self._budget = budget
        self._on_request = on_request
        self._on_capacity = on_capacity
        self._on_cut = on_cut
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        self._age_s = age_s
        self._transport: Any = None
        self._made_at = 0.0
        self._used_at = 0.0
        self._pinged_at: float | None = None
        self._ping = b""
        self._pings = 0
        self._retired_at: float | None = None
        self._retire_grace_s: float | None = None
        self._is_retired_for_good = False
        self._paused_at: float | None = None
        self._told_waiting_at = 0.0
        self._closing_at: float | None = None

    # --- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begin; a server speaks once it was spoken to."""
        self._transport = transport
        transport.set_write_buffer_limits(high=_BUFFER_HIGH_BYTES)
        _tune(transport.get_extra_info("socket"))
        self._made_at = self._used_at = self._wires.loop.time()
        self.connection = Connection(
            self,
            self._limits,
            is_client=self._is_client,
            now=self._made_at,
            budget=self._budget,
        )
        self._wires.add(self)
        if self._is_client:
            self._wires.turn.mark(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        connection = self.connection
        is_first = connection.out and not self._is_client and not connection.is_greeted
        connection.receive(data, self._wires.loop.time())
        if is_first and self._closing_at is None:
            self._wires.turn.mark(self)

    def eof_received(self) -> bool:
        """Close also our side."""
        return False

    def pause_writing(self) -> None:
        """The peer does not read fast enough."""
        self._paused_at = self._wires.loop.time()
        self.connection.pause()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._paused_at = None
        self.connection.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams."""
        self._wires.discard(self)
        self.connection.lost()
        if self._on_lost is not None:
            self._on_lost(self)

    # --- Owner of the connection ---------------------------------------------------------------

    def on_request(self, stream: Stream, headers: Headers, *, ended: bool, oversized: bool) -> None:
        """See `core.connection.Owner`."""
        assert self._on_request is not None, "only a server gets requests"
        self._on_request(stream, headers, ended, oversized)

    def on_capacity(self) -> None:
        """See `core.connection.Owner`."""
        connection = self.connection
        if not connection.streams:
            self._used_at = connection.now
            if self._is_retired_for_good or (self._is_client and connection.is_retiring):
                self.close()
        if self._on_capacity is not None:
            self._on_capacity()

    def on_writable(self) -> None:
        """See `core.connection.Owner`."""
        self._wires.turn.mark(self)

    def on_overfull(self, stream: Stream) -> None:
        """See `core.connection.Owner`."""
        self._cut(stream, Reason.SLOW_READER)

    def on_closed(self) -> None:
        """See `core.connection.Owner`."""
        if self._transport is not None and not self._transport.is_closing():
            self.flush()
            self.close()

    # --- What others ask -----------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether the peer does not read fast enough."""
        return self._paused_at is not None

    def flush(self) -> None:
        """Write what is there to write."""
        if self.connection.out:
            data = self.connection.take()
            if not self._transport.is_closing():
                self._transport.write(data)

    def close(self) -> None:
        """Close once all is written; cut if that takes too long."""
        if self._closing_at is None:
            self._closing_at = self._wires.loop.time()
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """Cut at once."""
        self._transport.abort()

    def retire(self, grace_s: float) -> None:
        """Take no new streams; close when those that are open have ended, or after `grace_s`."""
        if self._retired_at is not None or self._closing_at is not None:
            self._retire_grace_s = min(self._retire_grace_s or grace_s, grace_s)
            return
        self._retired_at = self._wires.loop.time()
        self._retire_grace_s = grace_s
        if self._is_client or not self.connection.is_greeted:
            self._retire_for_good()
        else:
            self.connection.go_away(gracefully=True)
            # Its answer shows that the client has seen the announcement.
            self._ping = b"goingawy"
            self.connection.ping(self._ping)

    def tick(self, now: float) -> None:
        """Do what time brings."""
        connection = self.connection
        connection.now = now
        if self._closing_at is not None:
            if now - self._closing_at > _LAST_WORDS_S:
                self.abort()
            return
        if not self._is_in_time(now):
            return
        for stream in connection.slow_readers():
            self._cut(stream, Reason.SLOW_READER)
        self._tell_waiting(now)
        self._tick_retirement(now)
        self._tick_keepalive(now)

    def _tell_waiting(self, now: float) -> None:
        # Often enough that the hop behind, which cuts slow readers by itself, sees it in time.
        due_s = self._limits.slow_reader_s / _LOOKS_WHILE_WAITING
        if self._on_waiting is not None and now - self._told_waiting_at >= due_s:
            self._told_waiting_at = now
            for stream in list(self.connection.blocked.values()):
                self._on_waiting(stream)

    def _cut(self, stream: Stream, reason: Reason) -> None:
        if self._on_cut is not None:
            self._on_cut(stream, reason)
        else:
            self.connection.break_stream(stream, ErrorCode.CANCEL)

    def _is_in_time(self, now: float) -> bool:
        """Whether the peer has done in time what it must."""
        limits, connection = self._limits, self.connection
        sent_at = connection.settings_sent_at
        if self._paused_at is not None and now - self._paused_at > limits.slow_reader_s:
            self.abort()
            return False
        # A client that says nothing at all is no client.
        greeting_s = limits.connect_timeout_s if not connection.is_greeted else None
        if greeting_s is not None and now - self._made_at > max(greeting_s, 2 * TICK_S):
            connection.fail(ErrorCode.SETTINGS_TIMEOUT)
            return False
        if sent_at is not None and now - sent_at > limits.settings_timeout_s:
            connection.fail(ErrorCode.SETTINGS_TIMEOUT)
            return False
        return True

    def _tick_retirement(self, now: float) -> None:
        limits, connection = self._limits, self.connection
        if self._retired_at is None:
            is_old = self._age_s is not None and now - self._made_at > self._age_s
            is_idle = not connection.streams and now - self._used_at > limits.idle_s
            if is_old or is_idle:
                self.retire(limits.connection_age_grace_s)
            return
        if not self._is_retired_for_good:
            # A client's library may have had a call on its way when it answered the ping.
            is_seen = (
                connection.acknowledged_ping == self._ping and now - self._retired_at > 2 * TICK_S
            )
            if is_seen or now - self._retired_at > limits.keepalive_timeout_s:
                self._retire_for_good()
        if self._retire_grace_s is not None and now - self._retired_at > self._retire_grace_s:
            for stream in list(connection.streams.values()):
                self._cut(stream, Reason.DRAINING)

    def _retire_for_good(self) -> None:
        self._is_retired_for_good = True
        self.connection.go_away(gracefully=False)
        if not self.connection.streams:
            self.close()

    def _tick_keepalive(self, now: float) -> None:
        limits, connection = self._limits, self.connection
        # Nothing was heard for long when we pinged. The loop's clock stands still within a turn and
        # counts milliseconds: an answer that seems to be as old as its ping did come.
        if self._pinged_at is not None and connection.heard_at < self._pinged_at:
            if now - self._pinged_at > limits.keepalive_timeout_s:
                # It may have died without a word: what we write would go nowhere.
                connection.lost()
                self.abort()
            return
        if not connection.streams:
            return
        if self._pinged_at is not None and connection.carried_at >= self._pinged_at:
            self._pings = 0
        must_be_shy = (
            limits.pings_sparingly and self._is_client and self._pings >= _PINGS_IN_SILENCE
        )
        silence_s = _LONG_SILENCE_S if must_be_shy else limits.keepalive_s
        if now - connection.heard_at >= silence_s:
            self._pings += 1
            self._pinged_at = now
            connection.ping(b"forebay!")


def _tune(sock: Any) -> None:
    """Have the kernel find dead peers, also while nothing is said."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
