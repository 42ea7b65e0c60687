"""A client's HTTP/1.1 connection: requests in, answers out in the same order.

While a request is answered, what comes behind it is kept unread up to a bound, so that the client's
leaving is still seen. Every state but an answer in the making has a deadline, so nothing hangs.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from enum import Enum
from typing import Any, Protocol

import httptools
from forebay_common.errors import ForebayError, Reason

from forebay_wire.core import http1 as core
from forebay_wire.exchange import Endpoint
from forebay_wire.http1_exchange import Http1Exchange, Work

# Parsed at once. Bounds how many pipelined requests are taken up in one turn of the loop.
_SLICE_BYTES = 16 << 10
# Kept unread behind a request in work.
_AHEAD_BYTES = 64 << 10
# After a last answer the client has this long to read it and to close. A close over unread bytes of
# a body would reset the connection before the answer is read: while more come, they are dropped, as
# long as a body may take and up to so many times its limit.
_LINGER_S = 2.0
_DROPPED_BODIES = 8
_JOIN_BYTES = 64 << 10
_NEVER = math.inf


class Front(Work, Protocol):
    """What a connection needs of its server."""

    connections: set[Connection]
    stalled: set[Connection]
    """Those whose clients do not take what was written."""

    def find(self, head: core.RequestHead) -> Endpoint:
        """What answers a request. Raises ForebayError where nothing does."""

    def forget(self, connection: Connection) -> None:
        """A connection is lost."""

    def now(self) -> float:
        """The loop's time, in seconds."""

    def flush_later(self, connection: Connection) -> None:
        """Call its `flush` before the loop waits again."""


class _Phase(Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    WORK = "work"
    CLOSING = "closing"


class Connection(asyncio.Protocol):
    """One client."""

    __slots__ = (
        "_ahead",
        "_chunk_bytes",
        "_current",
        "_dropped",
        "_fed",
        "_fields",
        "_incoming",
        "_is_advancing",
        "_is_continued",
        "_is_deaf",
        "_is_in_head",
        "_is_reading_paused",
        "_is_stalled",
        "_lingers_until",
        "_outgoing",
        "_parser",
        "_phase",
        "_progress_s",
        "_slice_bytes",
        "_spoiled",
        "_target",
        "_transport",
        "_unsent",
        "_upgrades",
        "_waiting",
        "_will_flush",
        "deadline",
        "front",
    )

    def __init__(self, front: Front) -> None:
        self.front = front
        self.deadline = _NEVER
        """When `expire` is due, on the loop's clock."""
        self._transport: Any = None
        self._phase = _Phase.IDLE
        self._parser = httptools.HttpRequestParser(self)
        # The request that is being read.
        self._is_in_head = False
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._fed = 0
        """Bytes read since the head began, and at most a slice more."""
        self._slice_bytes = 0
        self._chunk_bytes = 0
        """Bytes read since a chunked body began."""
        self._incoming: Http1Exchange | None = None
        """Its exchange, once its head is whole, until it is."""
        self._upgrades = False
        self._is_continued = False
        """The parser reads the body of a request whose head another one has read."""
        self._spoiled: ForebayError | None = None
        self._is_deaf = False
        """Nothing that comes is read as requests any more."""
        self._dropped = 0
        self._lingers_until = 0.0
        # Requests in order.
        self._current: Http1Exchange | None = None
        self._waiting: deque[Http1Exchange] = deque()
        self._ahead = b""
        self._outgoing: list[bytes] = []
        self._will_flush = False
        self._is_advancing = False
        self._is_reading_paused = False
        # The client's reading.
        self._is_stalled = False
        self._unsent = 0
        self._progress_s = 0.0

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or refuse one connection too many."""
        self._transport = transport
        front = self.front
        front.connections.add(self)
        excess = len(front.connections) - front.limits.connections
        if excess > max(64, front.limits.connections // 16):
            self._transport.abort()
            return
        if excess > 0:
            message = "There are too many connections here."
            self._spoil(ForebayError(Reason.QUEUE_FULL, message, retry_after_s=1))
            self._advance()
        self._settle()

    def data_received(self, data: bytes) -> None:
        """Read requests, or keep what comes while one is answered."""
        if self._is_deaf:
            self._drop(data)
            return
        current = self._current
        if self._ahead or (current is not None and current.is_complete):
            self._keep(data)
            return
        self._read(data)
        self._settle()

    def eof_received(self) -> None:
        """The client is gone, or has read our last answer; the transport closes by itself."""
        self.flush()
        self._leave()
        if self._phase is not _Phase.CLOSING:
            self._begin_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything."""
        self.front.forget(self)
        self._leave()
        self._transport = None
        self.deadline = _NEVER
        # They refer to us.
        del self._parser
        self._incoming = self._spoiled = None

    def pause_writing(self) -> None:
        """The client does not take what was written."""
        self._is_stalled = True
        self._watch_progress()
        current = self._current
        if current is not None and current.listener is not None:
            current.listener.hold()

    def resume_writing(self) -> None:
        """The client takes it again."""
        self._is_stalled = False
        self.front.stalled.discard(self)
        current = self._current
        if current is not None and current.listener is not None:
            current.listener.resume()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_continued:
            return
        self._is_in_head = True
        self._target = b""
        self._fields = []
        self._fed = self._slice_bytes
        if self._phase is not _Phase.CLOSING:
            # Each request has its own deadline.
            self._phase = _Phase.IDLE

    def on_url(self, part: bytes) -> None:
        """A part of the request's target."""
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a chunked body."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole: say where the request goes, or why it does not."""
        if self._is_continued:
            return
        self._is_in_head = False
        parser = self._parser
        limits = self.front.limits
        try:
            head = core.read_head(
                parser.get_method(), self._target, parser.get_http_version(), self._fields
            )
        except ForebayError as error:
            self._spoiled = error
            raise
        exchange = self._incoming = Http1Exchange(self, head)
        self._waiting.append(exchange)
        self._upgrades = parser.should_upgrade()
        self._chunk_bytes = 0
        try:
            if self._fed > limits.header_bytes or len(self._fields) > limits.headers:
                core.check_size(self._target, self._fields, limits)
            exchange.endpoint = self.front.find(head)
            if head.length is not None and head.length > limits.body_bytes:
                raise core.body_too_large(limits)
        except ForebayError as error:
            exchange.refusal = error
        self._fields = []

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        exchange = self._incoming
        assert exchange is not None, "a body follows a head"
        exchange.size += len(part)
        if exchange.refusal is None:
            front = self.front
            if exchange.size > front.limits.body_bytes:
                exchange.refusal = core.body_too_large(front.limits)
                exchange.release()
            elif front.kept_bytes > front.limits.request_bytes:
                exchange.refusal = core.no_room()
                exchange.release()
            else:
                exchange.parts.append(part)
                exchange.kept_bytes += len(part)
                front.kept_bytes += len(part)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._upgrades:
            return
        assert self._incoming is not None, "a request has a head"
        self._incoming.is_complete = True
        self._incoming = None
        self._is_continued = False

    # Reading.

    def _read(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            # Of bytes, the whole slice is the same object.
            part = data[at : at + _SLICE_BYTES]
            at += len(part) - self._parse(part)
            self._advance()
            if at == len(data):
                return
            if self._is_deaf:
                self._drop(data[at:])
                return
            if self._incoming is None:
                # Behind a request in work, or after a slice full of requests.
                self._keep(data[at:])
                if self._current is None:
                    asyncio.get_running_loop().call_soon(self._go_on)
                return

    def _parse(self, part: bytes) -> int:
        """Feed the parser; answers how many bytes at the end it has not read."""
        self._slice_bytes = len(part)
        self._fed += len(part)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            return self._stay(len(part) - upgrade.args[0])
        except httptools.HttpParserError:
            self._spoil(self._spoiled or core.malformed())
            return 0
        exchange = self._incoming
        if exchange is None:
            # A head a little over the limit is read to its end and refused there, on a connection
            # that lives.
            limits = self.front.limits
            if self._is_in_head and self._fed > limits.header_bytes + _SLICE_BYTES:
                self._spoil(core.head_too_large(limits))
        elif exchange.head.length is None:
            self._chunk_bytes += len(part)
            if core.is_mostly_framing(self._chunk_bytes, exchange.size):
                self._spoil(core.malformed("The body's chunks are too small."))
        if exchange is not None and exchange.is_answered and self._drops_too_much(exchange):
            self._spoil(core.body_too_large(self.front.limits))
        return 0

    def _drops_too_much(self, exchange: Http1Exchange) -> bool:
        return exchange.size > 2 * self.front.limits.body_bytes

    def _stay(self, unread: int) -> int:
        """Ignore an offer to speak something else, as RFC 9110 §7.8 allows.

        The parser has taken the request to end with its head. Its body is read by another parser,
        which is told of the body alone.
        """
        self._upgrades = False
        exchange = self._incoming
        assert exchange is not None, "an upgrade has a head"
        head = exchange.head
        if head.method == "CONNECT" or head.length == 0:
            self._incoming = None
            exchange.is_complete = True
            if head.method == "CONNECT":
                exchange.closes = True
                self._is_deaf = True
                return 0
            self._parser = httptools.HttpRequestParser(self)
            return unread
        self._is_continued = True
        self._parser = httptools.HttpRequestParser(self)
        framing = b"transfer-encoding:chunked"
        if head.length is not None:
            framing = b"content-length:%d" % head.length
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        return unread

    def _spoil(self, error: ForebayError) -> None:
        """What comes from here on cannot be read: answer so in its turn, and close."""
        exchange = self._incoming
        if exchange is None:
            exchange = Http1Exchange(self, None)
            self._waiting.append(exchange)
        self._incoming = None
        exchange.refusal = error
        exchange.is_complete = True
        exchange.closes = True
        self._is_in_head = False
        self._is_deaf = True

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > _AHEAD_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > _DROPPED_BODIES * self.front.limits.body_bytes:
            self._transport.abort()
        elif self._phase is _Phase.CLOSING:
            self.deadline = min(self.front.now() + _LINGER_S, self._lingers_until)

    def _go_on(self) -> None:
        """Take up what was kept behind a request that is answered now."""
        if self._transport is None or self._phase is _Phase.CLOSING:
            return
        self._advance()
        if self._current is None and not self._is_deaf:
            data, self._ahead = self._ahead, b""
            if self._is_reading_paused:
                self._is_reading_paused = False
                self._transport.resume_reading()
            self._read(data)
        self._settle()

    # Answering.

    def _advance(self) -> None:
        """Answer requests in order, as far as they are read."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._phase is not _Phase.CLOSING:
                exchange = self._current
                if exchange is None:
                    if not self._waiting:
                        return
                    exchange = self._current = self._waiting.popleft()
                if not exchange.is_started:
                    if exchange.refusal is not None or exchange.is_complete:
                        exchange.start()
                        if self._is_stalled and exchange.listener is not None:
                            exchange.listener.hold()
                    elif exchange.head.expects and not (exchange.is_asked or exchange.size):
                        exchange.is_asked = True
                        self.write(core.CONTINUE)
                if exchange.is_answered and (exchange.closes or self.front.draining):
                    self._close()
                    return
                if not (exchange.is_answered and exchange.is_complete):
                    return
                self._current = None
        finally:
            self._is_advancing = False

    def answered(self) -> None:
        """The current exchange's answer is written."""
        if self._is_advancing or self._transport is None:
            return
        if self._waiting or self._ahead:
            # Not at once: whoever has answered is in the middle of its own work.
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        self._advance()
        self._settle()

    def ends_with(self, exchange: Http1Exchange) -> bool:
        """Whether the connection ends with this exchange's answer."""
        if exchange.closes or not exchange.head.keeps_alive or self.front.draining:
            return True
        if exchange.is_complete:
            return False
        # The rest of a refused body is read and dropped if it is bounded, and if it comes.
        limit, length = 2 * self.front.limits.body_bytes, exchange.head.length
        return (exchange.head.expects and not exchange.is_asked) or (
            length is not None and length > limit
        )

    def write(self, data: bytes) -> None:
        """Send bytes of the current exchange's answer, with all else of this turn of the loop."""
        self.flush_later()
        self._outgoing.append(data)

    def flush_later(self) -> None:
        """See `Carrier`."""
        if not self._will_flush:
            self._will_flush = True
            self.front.flush_later(self)

    def flush(self) -> None:
        """Hand what was written to the transport."""
        self._will_flush = False
        parts = self._outgoing
        current = self._current
        if current is not None and current.has_begun:
            unsent = current.take_unsent()
            if unsent:
                # This is the token path: nearly always there is nothing else.
                if not parts and self._transport is not None:
                    self._transport.write(unsent)
                    return
                parts.append(unsent)
        if not parts or self._transport is None:
            return
        self._outgoing = []
        if len(parts) == 1:
            self._transport.write(parts[0])
        elif sum(map(len, parts)) <= _JOIN_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    # Time.

    def expire(self, now: float) -> None:
        """Do what is due once `deadline` has passed."""
        phase = self._phase
        if phase is _Phase.CLOSING:
            if self._transport.get_write_buffer_size() and self in self.front.stalled:
                self.deadline = now + _LINGER_S
            else:
                self._transport.abort()
        elif phase is _Phase.IDLE:
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._close()
        elif phase in (_Phase.HEAD, _Phase.BODY):
            what = "body" if phase is _Phase.BODY else "request"
            exchange = self._incoming
            if exchange is not None and exchange.is_answered:
                self._transport.abort()
                return
            self._spoil(core.malformed(f"The {what} did not arrive in time."))
            self._advance()
            self._settle()

    def check_progress(self, now: float) -> None:
        """Cut a client that has taken nothing of what waits for it for too long."""
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._progress_s = now
        self._unsent = unsent
        if not unsent:
            self.front.stalled.discard(self)
        elif now - self._progress_s >= self.front.limits.slow_reader_s:
            self._leave()
            self._transport.abort()

    def drain(self) -> None:
        """Close if nothing is being asked or answered; what is, ends with its answer."""
        if self._phase is _Phase.IDLE:
            self._close()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _settle(self) -> None:
        """Note what the connection waits for now, and until when."""
        if self._phase is _Phase.CLOSING or self._transport is None:
            return
        current = self._current
        if current is not None and current.is_complete:
            phase = _Phase.WORK
        elif self._incoming is not None:
            phase = _Phase.BODY
        elif self._is_in_head:
            phase = _Phase.HEAD
        else:
            phase = _Phase.IDLE
        if phase is self._phase and phase is not _Phase.IDLE:
            return
        self._phase = phase
        limits = self.front.limits
        if phase is _Phase.WORK:
            self.deadline = _NEVER
        elif phase is _Phase.IDLE:
            self.deadline = self.front.now() + limits.idle_s
        else:
            self.deadline = self.front.now() + limits.body_read_s

    def _begin_closing(self) -> None:
        self._phase = _Phase.CLOSING
        self._is_deaf = True
        self._ahead = b""
        self._drop_waiting()
        self._incoming = None
        now = self.front.now()
        self.deadline = now + _LINGER_S
        self._lingers_until = now + max(_LINGER_S, self.front.limits.body_read_s)
        if self._transport.get_write_buffer_size():
            self._watch_progress()

    def _close(self) -> None:
        """Send what is written and close, in such a way that the client can read it first."""
        self.flush()
        self._begin_closing()
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        elif self._current is None or self._current.is_complete:
            self._transport.close()

    def _leave(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
        self._drop_waiting()
        self._is_deaf = True

    def _drop_waiting(self) -> None:
        for exchange in self._waiting:
            exchange.release()
        self._waiting.clear()

    def _watch_progress(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._progress_s = self.front.now()
        self.front.stalled.add(self)
