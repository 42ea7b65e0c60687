"""A second attempt beside a call's first, until one of them answers."""

from __future__ import annotations

from typing import Protocol

from forebay_common.errors import ForebayError, Reason, from_status

from forebay_wire.client import ClientPool
from forebay_wire.core.connection import Connection
from forebay_wire.core.frames import ErrorCode
from forebay_wire.core.headers import Headers, parse_trailers
from forebay_wire.core.stream import Stream
from forebay_wire.policy import Route


class Hedged(Protocol):
    """The call that a rival is an attempt of."""

    def open_on(self, connection: Connection, route: Route, rival: Rival) -> Stream:
        """Send the request as a route says."""

    def won_by(self, rival: Rival) -> None:
        """The rival has something of the answer: it goes on in place of the first attempt."""

    def lost_by(self, rival: Rival, error: ForebayError) -> None:
        """The rival failed before it had anything."""


class Rival:
    """Receives for the second attempt's stream. Once it has won, the call itself does."""

    __slots__ = ("_call", "_headers", "_pool", "_waits", "route", "stream")

    def __init__(self, call: Hedged, pool: ClientPool, route: Route) -> None:
        self._call = call
        self._pool = pool
        self._waits = False
        self._headers: list[tuple[Headers, bool]] = []
        self.route = route
        self.stream: Stream | None = None

    def start(self) -> None:
        """Find a connection, and send the request."""
        connection = self._pool.find(self.route.target)
        if connection is not None:
            self.on_connection(connection)
        else:
            self._waits = True
            self._pool.wait(self.route.target, self)

    def drop(self) -> None:
        """Give the attempt up."""
        self.withdraw()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.reset(ErrorCode.CANCEL)

    def withdraw(self) -> None:
        """Wait for a connection no longer."""
        if self._waits:
            self._waits = False
            self._pool.withdraw(self.route.target, self)

    def headers(self) -> list[tuple[Headers, bool]]:
        """Those that came, with whether they ended the stream; whoever takes over reads them."""
        return self._headers

    def on_connection(self, connection: Connection) -> None:
        """See `client.Opening`."""
        self._waits = False
        self.stream = self._call.open_on(connection, self.route, self)

    def on_unreachable(self, error: ForebayError) -> None:
        """See `client.Opening`."""
        self._waits = False
        self._call.lost_by(self, error)

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """See `core.connection.Receiver`."""
        self._headers.append((headers, ended))
        if not ended:
            return
        trailers = parse_trailers(headers)
        if trailers.code == 0:
            self._call.won_by(self)
            return
        self.stream = None
        code = 2 if trailers.code is None else trailers.code
        self._call.lost_by(self, from_status(code, trailers.details))

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """See `core.connection.Receiver`."""
        stream = self.stream
        if stream is not None:
            self._call.won_by(self)
            stream.on_data(data, start, end)

    def on_end(self) -> None:
        """See `core.connection.Receiver`."""
        self.stream = None
        self._call.lost_by(self, _failed())

    def on_reset(self, code: ErrorCode) -> None:
        """See `core.connection.Receiver`."""
        self.stream = None
        lost = ForebayError(Reason.REPLICA_LOST, "The replica's connection was lost.")
        self._call.lost_by(self, _failed() if code is ErrorCode.REFUSED_STREAM else lost)

    def on_blocked(self) -> None:
        """See `core.connection.Receiver`."""

    def on_drained(self) -> None:
        """See `core.connection.Receiver`."""


def _failed() -> ForebayError:
    return ForebayError(Reason.NO_REPLICA, "The replica did not take the request.")
