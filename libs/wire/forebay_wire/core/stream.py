"""One stream of an HTTP/2 connection: what it may send, what it may get, and how it ends.

Invariants: it sends nothing that a window of either level does not allow; what cannot go waits in
order and is counted in the connection's budget; its receiver hears of its end once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from forebay_wire.core import frames
from forebay_wire.core.frames import MAX_FRAME_BYTES, ErrorCode, pack
from forebay_wire.core.headers import Headers

if TYPE_CHECKING:
    from forebay_wire.core.connection import Connection

_NOTHING_FITS = -(1 << 40)
_END_OF_DATA = b""
# A window that cuts DATA into pieces smaller than this earns the peer no patience.
_SLIVER_BYTES = 1024

OnData = Callable[[bytes, int, int], None]


class Receiver(Protocol):
    """Is told what happens on one stream. Must not raise; if it does, its stream is reset."""

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """Headers came: the answer's, or trailers."""
        ...

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """Payload came: `data[start:end]`. `Stream.on_data` may be replaced by another method."""
        ...

    def on_end(self) -> None:
        """The peer ended its side with the last DATA frame."""
        ...

    def on_reset(self, code: ErrorCode) -> None:
        """The stream is no more: the peer reset it, broke the rules, or the connection ended."""
        ...

    def on_blocked(self) -> None:
        """What was sent waits for the peer's window."""
        ...

    def on_drained(self) -> None:
        """Nothing that was sent waits any more; only after `on_blocked`."""
        ...


class Budget:
    """Bytes that may be kept, over many streams."""

    __slots__ = ("left_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.left_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are kept now."""
        return self.limit_bytes - self.left_bytes


class Stream:
    """One stream. Made by its connection alone."""

    __slots__ = (
        "_ended_here",
        "_ended_there",
        "_final",
        "_pending",
        "_said_blocked",
        "connection",
        "held",
        "id",
        "moved_bytes",
        "on_data",
        "pending_bytes",
        "receive_left",
        "receive_low",
        "receive_window",
        "receiver",
        "stalled_bytes",
        "stalled_since",
        "window",
    )

    def __init__(
        self, connection: Connection, stream_id: int, receiver: Receiver, receive_window: int
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.receiver = receiver
        self.on_data: OnData = receiver.on_data
        self.window = connection.peer_window
        self.receive_window = receive_window
        self.receive_left = receive_window
        self.receive_low = (receive_window + 1) // 2
        self.held = False
        """Whether the peer gets no more credit, because what it sends is not taken on."""
        self.pending_bytes = 0
        self.moved_bytes = 0
        """Bytes that waited and were then sent; shows whether a slow reader moves at all."""
        self.stalled_bytes = 0
        self.stalled_since: float | None = None
        self._pending: deque[bytes | memoryview] | None = None
        self._final: bytes | None = None
        self._ended_here = False
        self._ended_there = False
        self._said_blocked = False

    @property
    def is_open(self) -> bool:
        """Whether it is still a stream of its connection."""
        return self.connection.streams.get(self.id) is self

    @property
    def ended_here(self) -> bool:
        """Whether our side has ended, or will once what waits is sent."""
        return self._ended_here or self._final is not None

    @property
    def ended_there(self) -> bool:
        """Whether the peer has ended its side."""
        return self._ended_there

    def send_headers(self, block: bytes) -> None:
        """Send a header block that opens our side."""
        if not self.ended_here:
            self.connection.write_headers(self.id, block, end_stream=False)

    def send(self, data: bytes, start: int, end: int) -> None:
        """Send `data[start:end]` as DATA, now or when the peer's windows allow."""
        length = end - start
        connection = self.connection
        if (
            self._pending is None
            and length <= self.window
            and length <= connection.window
            and length <= MAX_FRAME_BYTES
        ):
            self.window -= length
            connection.window -= length
            out = connection.out
            if not out:
                connection.owner.on_writable()
            out.append(pack(length << 8, 0, self.id))
            out.append(data[start:end])
            return
        self._wait(data[start:end], None)

    def end(self) -> None:
        """End our side after what was sent."""
        if self.ended_here:
            return
        if self._pending is not None:
            self._final = _END_OF_DATA
            return
        self.connection.write(pack(frames.DATA, frames.END_STREAM, self.id))
        self._end_here()

    def send_whole(self, data: bytes) -> None:
        """Send DATA, and end our side with it."""
        length = len(data)
        connection = self.connection
        if (
            self._pending is None
            and length <= self.window
            and length <= connection.window
            and length <= MAX_FRAME_BYTES
        ):
            self.window -= length
            connection.window -= length
            connection.write(pack(length << 8, frames.END_STREAM, self.id))
            connection.out.append(data)
            self._end_here()
            return
        self._wait(data, _END_OF_DATA)

    def send_trailers(self, block: bytes) -> None:
        """End our side with trailers, after what was sent."""
        if self.ended_here:
            return
        if self._pending is not None:
            self._final = block
            return
        self.connection.write_headers(self.id, block, end_stream=True)
        self._end_here()

    def cut(self, block: bytes) -> None:
        """End our side with trailers at once; what waits is dropped."""
        if self._ended_here:
            return
        self._drop()
        self.send_trailers(block)

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once, both ways. Its receiver hears nothing of it."""
        if self.is_open:
            self.connection.reset(self, code)

    def hold(self) -> None:
        """Give the peer no more credit."""
        self.held = True

    def resume(self) -> None:
        """Give the peer credit again."""
        self.held = False
        if self.receive_left < self.receive_low and not self._ended_there and self.is_open:
            self.connection.replenish(self)

    def trickle(self, kept_bytes: int) -> None:
        """While held, give credit for what was taken on meanwhile.

        `kept_bytes` is what is not taken on yet. With what may still come it stays within a window.
        """
        increment = self.receive_window - self.receive_left - kept_bytes
        if increment > 0 and not self._ended_there and self.is_open:
            self.receive_left += increment
            self.connection.write(frames.window_update(self.id, increment))

    def pump(self) -> None:
        """Send of what waits as much as the windows allow."""
        connection, pending = self.connection, self._pending
        if pending is None:
            return
        while pending:
            room = min(self.window, connection.window, MAX_FRAME_BYTES)
            if room <= 0:
                return
            part = pending.popleft()
            length = len(part)
            if length > room:
                pending.appendleft(part[room:])
                part, length = part[:room], room
                if room < _SLIVER_BYTES:
                    connection.unearned += 2
            self.window -= length
            connection.window -= length
            self.moved_bytes += length
            self.pending_bytes -= length
            connection.give_back(length)
            ends = self._final is _END_OF_DATA and not pending
            connection.write(pack(length << 8, frames.END_STREAM if ends else 0, self.id))
            connection.out.append(part)
        final, said_blocked = self._final, self._said_blocked
        self._drop()
        self.stalled_since = None
        if final is _END_OF_DATA:
            self._end_here()
        elif final is not None:
            self.send_trailers(final)
        elif said_blocked:
            self.receiver.on_drained()

    def note_ended_there(self) -> None:
        """The peer has ended its side."""
        self._ended_there = True
        self.refuse_data()
        if self._ended_here:
            self.connection.forget(self)
        elif self.connection.is_client:
            # The answer is complete: nobody wants the rest of the request.
            self.connection.reset(self, ErrorCode.NO_ERROR)

    def refuse_data(self) -> None:
        """Take DATA for a fault from now on."""
        self.on_data = self._refuse_data

    def release(self) -> None:
        """Give back what it keeps; it is no longer a stream of its connection."""
        self._drop()
        self._ended_here = True
        self.window = _NOTHING_FITS
        self.on_data = _ignore_data

    def _wait(self, data: bytes, final: bytes | None) -> None:
        if self.ended_here:
            return
        connection = self.connection
        pending = self._pending
        if pending is None:
            pending = self._pending = deque()
            connection.blocked[self.id] = self
        # A large piece leaves in many: a view is cut without copying the rest each time.
        pending.append(memoryview(data) if len(data) > MAX_FRAME_BYTES else data)
        self.pending_bytes += len(data)
        self._final = final
        connection.keep(len(data))
        # Part of it may go at once; a piece that is larger than a frame always comes this way.
        self.pump()
        if self._pending is None:
            return
        if connection.is_overfull:
            connection.owner.on_overfull(self)
        elif not self._said_blocked:
            self._said_blocked = True
            self.receiver.on_blocked()

    def _drop(self) -> None:
        if self._pending is not None:
            self.connection.give_back(self.pending_bytes)
            self.connection.blocked.pop(self.id, None)
            self._pending = None
            self.pending_bytes = 0
        self._final = None
        self._said_blocked = False

    def _end_here(self) -> None:
        self._ended_here = True
        self.window = _NOTHING_FITS
        if self._ended_there:
            self.connection.forget(self)
        elif not self.connection.is_client:
            # The answer is complete: the rest of the request is not wanted (RFC 9113 §8.1).
            self.connection.reset(self, ErrorCode.NO_ERROR)

    def _refuse_data(self, data: bytes, start: int, end: int) -> None:
        self.connection.blame(self, ErrorCode.STREAM_CLOSED)


class Nobody:
    """Receives for a stream that nobody has taken yet."""

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """Nothing to do."""

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Nothing to do."""

    def on_reset(self, code: ErrorCode) -> None:
        """Nothing to do."""

    def on_blocked(self) -> None:
        """Nothing to do."""

    def on_drained(self) -> None:
        """Nothing to do."""


def _ignore_data(data: bytes, start: int, end: int) -> None:
    """Data that was under way when its stream was reset."""
