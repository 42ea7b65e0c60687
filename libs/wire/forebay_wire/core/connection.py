"""One HTTP/2 connection, either end, without its socket (RFC 9113).

Bytes go in through `receive`, bytes come out of `take`, and what happens is told to the receiver of
each stream. Invariants: flow-control windows of both levels are kept in both directions; a fault of
one stream ends that stream alone, a fault of the connection ends it with a GOAWAY; the receiver of
a stream hears of its end once: by the peer's regular end of an answer, or by `on_reset`.
"""

from __future__ import annotations

import logging
from typing import Protocol

from forebay_wire.core import frames
from forebay_wire.core.frames import MAX_FRAME_BYTES, ErrorCode, unpack
from forebay_wire.core.headers import NO_TABLE, HeaderDecoder, HeaderError, Headers, size_of
from forebay_wire.core.limits import Limits
from forebay_wire.core.patience import Patience
from forebay_wire.core.stream import Budget, Nobody, Receiver, Stream

_log = logging.getLogger(__name__)
# A header block may be this many times as large as the list that is allowed, so that the answer
# can be a refusal instead of the end of the connection.
_BLOCK_SLACK = 8
_CONTINUATIONS_MAX = 64
_RESETS_REMEMBERED = 1024
_GAPS_REMEMBERED = 16
_HTTP1_HINT = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port takes gRPC over HTTP/2.\n"
)


class Owner(Protocol):
    """Is told what happens on a connection."""

    def on_request(self, stream: Stream, headers: Headers, *, ended: bool, oversized: bool) -> None:
        """A client opened a stream. Sets `stream.receiver` and `stream.on_data`."""
        ...

    def on_capacity(self) -> None:
        """Something changed about whether more streams can be opened."""
        ...

    def on_overfull(self, stream: Stream) -> None:
        """More waits for slow readers than may; this stream, which waits, has to end."""
        ...

    def on_writable(self) -> None:
        """There is something to `take`, where there was nothing before."""
        ...

    def on_closed(self) -> None:
        """The connection is over once what is left to `take` was written."""
        ...


class Connection:
    """The state of one connection."""

    __slots__ = (
        "_assembling",
        "_buffer",
        "_decoder",
        "_gaps",
        "_going_away",
        "_greeted",
        "_last_peer_id",
        "_next_id",
        "_patience",
        "_peer_going_away",
        "_pings_due",
        "_preface_left",
        "_receive_left",
        "_receive_window",
        "_request_window",
        "_reset_here",
        "_said_no_table",
        "_withheld",
        "acknowledged_ping",
        "blocked",
        "budget",
        "carried_at",
        "closed",
        "heard_at",
        "is_client",
        "limits",
        "now",
        "out",
        "owner",
        "peer_streams",
        "peer_window",
        "resets",
        "settings_sent_at",
        "streams",
        "unearned",
        "window",
    )

    def __init__(
        self,
        owner: Owner,
        limits: Limits,
        *,
        is_client: bool,
        now: float,
        budget: Budget | None = None,
    ) -> None:
        """`budget` bounds what waits for slow readers; None leaves it unbounded."""
        self.owner = owner
        self.limits = limits
        self.is_client = is_client
        self.budget = budget
        self.out: list[bytes | memoryview] = []
        self.unearned = 0
        """How many pieces of `out` were forced by the peer and earn it no patience."""
        self.window = frames.DEFAULT_WINDOW_BYTES
        """What may be sent now; 0 while the transport is full."""
        self.peer_window = frames.DEFAULT_WINDOW_BYTES
        self.peer_streams = frames.MAX_STREAM_ID
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}
        self.now = now
        self.heard_at = now
        self.settings_sent_at: float | None = now
        self.closed: ErrorCode | None = None
        self.carried_at = now
        """When a message or its headers came last."""
        self.acknowledged_ping = b""
        self.resets = 0
        """Streams that the peer reset."""
        self._withheld: int | None = None
        self._buffer = b""
        self._preface_left = b"" if is_client else frames.PREFACE
        self._greeted = False
        self._said_no_table = False
        self._decoder = HeaderDecoder(list_bytes_max=limits.header_bytes * _BLOCK_SLACK)
        self._assembling: _Assembly | None = None
        # The window of a connection cannot be made smaller than it is at first.
        self._receive_window = max(limits.connection_window_bytes, frames.DEFAULT_WINDOW_BYTES)
        self._receive_left = self._receive_window
        self._request_window = (
            limits.stream_window_bytes if is_client else limits.request_window_bytes
        )
        self._next_id = 1 if is_client else 2
        self._last_peer_id = 0
        self._going_away: int | None = None
        self._peer_going_away = False
        self._reset_here: dict[int, None] = {}
        self._gaps: list[range] = []
        """Streams that the peer passed over, the latest."""
        self._pings_due = 0
        self._patience = Patience(limits.nuisances, limits.nuisances_per_s, now)
        self._greet()

    # --- What its owner asks -------------------------------------------------------------------

    @property
    def can_open(self) -> bool:
        """Whether another stream may be opened now."""
        return (
            self.closed is None
            and not self._peer_going_away
            and self._going_away is None
            and self._greeted
            and len(self.streams) < self.peer_streams
            and self._next_id < frames.MAX_STREAM_ID - 1
        )

    @property
    def is_retiring(self) -> bool:
        """Whether it takes no new streams any more."""
        return (
            self.closed is not None
            or self._peer_going_away
            or self._going_away is not None
            or self._next_id >= frames.MAX_STREAM_ID - 1
        )

    @property
    def is_greeted(self) -> bool:
        """Whether the peer's settings have come."""
        return self._greeted

    def open(self, receiver: Receiver) -> Stream:
        """Open a stream; only when `can_open`."""
        assert self.can_open, "the owner asks before it opens a stream"
        stream = Stream(self, self._next_id, receiver, self._request_window)
        self.streams[stream.id] = stream
        self._next_id += 2
        return stream

    def take(self) -> bytes:
        """What must be written now."""
        out = self.out
        if len(out) > self.unearned:
            self._patience.earn(len(out) - self.unearned)
        self.unearned = 0
        data = b"".join(out)
        out.clear()
        return data

    def write(self, frame: bytes) -> None:
        """Append to what must be written."""
        if not self.out:
            self.owner.on_writable()
        self.out.append(frame)

    def write_headers(self, stream_id: int, block: bytes, *, end_stream: bool) -> None:
        """Write a header block made by `core.headers`."""
        if not self._said_no_table:
            self._said_no_table = True
            block = NO_TABLE + block
        self.write(frames.header_frames(stream_id, block, end_stream=end_stream))

    def ping(self, payload: bytes) -> None:
        """Ask for a sign of life; `acknowledged_ping` becomes the payload."""
        self._pings_due += 1
        self.write(frames.frame(frames.PING, 0, 0, payload))

    def go_away(self, *, gracefully: bool) -> None:
        """Take no new streams. Gracefully first announces it, and is called again for good after
        the announcement must have arrived."""
        if self.closed is not None:
            return
        if gracefully and not self.is_client and self._going_away is None:
            self.write(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
            self._going_away = frames.MAX_STREAM_ID
        else:
            self.write(frames.goaway(self._last_peer_id, ErrorCode.NO_ERROR))
            self._going_away = self._last_peer_id

    def slow_readers(self) -> list[Stream]:
        """Streams of which nothing was taken for `slow_reader_s`. To be asked now and then."""
        slow = []
        for stream in self.blocked.values():
            if stream.stalled_since is None or stream.moved_bytes != stream.stalled_bytes:
                stream.stalled_since, stream.stalled_bytes = self.now, stream.moved_bytes
            elif self.now - stream.stalled_since >= self.limits.slow_reader_s:
                slow.append(stream)
        return slow

    def pause(self) -> None:
        """The transport is full: nothing more may be sent."""
        if self._withheld is None:
            self._withheld, self.window = self.window, 0

    def resume(self) -> None:
        """The transport takes more."""
        if self._withheld is not None:
            self.window, self._withheld = self.window + self._withheld, None
            self._pump_all()

    @property
    def is_paused(self) -> bool:
        """Whether the transport is full."""
        return self._withheld is not None

    def lost(self) -> None:
        """The transport is gone."""
        self._close(ErrorCode.CONNECTION_LOST)

    def fail(self, code: ErrorCode) -> None:
        """End the connection because the peer broke a rule or does not answer."""
        if self.closed is None:
            self.write(frames.goaway(self._last_peer_id, code))
            self._close(code)

    # --- What streams ask ----------------------------------------------------------------------

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream; see `Stream.reset`."""
        self.write(frames.rst_stream(stream.id, code))
        self._remember_reset(stream.id)
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """A stream has ended, one way or another."""
        if self.streams.pop(stream.id, None) is None:
            return
        stream.release()
        self.owner.on_capacity()

    def break_stream(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream because of a fault, and tell its receiver."""
        if not stream.is_open:
            return
        self.reset(stream, code)
        self._tell_reset(stream, code)

    def blame(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream because its peer broke a rule. Who makes us reset many is cut: it would
        get round the limit on streams that way."""
        if self._bear():
            self.unearned += 1
            self.break_stream(stream, code)

    def replenish(self, stream: Stream) -> None:
        """Give credit for what was taken on."""
        increment = stream.receive_window - stream.receive_left
        if increment > 0:
            stream.receive_left = stream.receive_window
            self.write(frames.window_update(stream.id, increment))

    def keep(self, size: int) -> None:
        """Count bytes that wait."""
        if self.budget is not None:
            self.budget.left_bytes -= size

    @property
    def is_overfull(self) -> bool:
        """Whether more waits than may."""
        return self.budget is not None and self.budget.left_bytes < 0

    def give_back(self, size: int) -> None:
        """Count bytes that wait no more."""
        if self.budget is not None:
            self.budget.left_bytes += size

    # --- What comes in -------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> None:
        """Take bytes from the peer. `now` is in seconds on a monotonic clock."""
        if self.closed is not None:
            return
        self.now = self.heard_at = now
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        size = len(data)
        offset = 0
        if self._preface_left:
            offset = self._read_preface(data)
            if offset == 0:
                return
        received = 0
        streams = self.streams
        # Between the frames of one header block nothing else may come.
        is_assembling = self._assembling is not None
        header = unpack(data, offset) if size - offset >= 9 else None
        while header is not None:
            word, flags, stream_id = header
            length = word >> 8
            start = offset + 9
            end = start + length
            if length > MAX_FRAME_BYTES:
                self.fail(ErrorCode.FRAME_SIZE_ERROR)
                return
            if end > size:
                break
            offset = end
            header = unpack(data, offset) if size - offset >= 9 else None
            # The usual frame by far: DATA with content and without padding, on a stream we know.
            if not word & 0xFF and word and flags < 2 and not is_assembling:
                stream = streams.get(stream_id)
                if stream is not None:
                    content = data
                    if header is not None and header[2] == stream_id and not flags:
                        content, offset = _join(data, start, end)
                        header = unpack(data, offset) if size - offset >= 9 else None
                        start, end = 0, len(content)
                        length = end
                    received += length
                    left = stream.receive_left = stream.receive_left - length
                    if left < stream.receive_low:
                        if left < 0:
                            self.blame(stream, ErrorCode.FLOW_CONTROL_ERROR)
                            continue
                        if not stream.held and not flags:
                            self.replenish(stream)
                    try:
                        # Through a name of its own: the interpreter then reads the slot directly.
                        on_data = stream.on_data
                        on_data(content, start, end)
                        if flags and stream.id in streams:
                            stream.note_ended_there()
                            stream.receiver.on_end()
                    except Exception:
                        self._faulted(stream)
                    continue
            if not word & 0xFF:
                received += length
            # What was told of the last frame may have ended the connection.
            if self.closed is None:
                self._read_frame(word & 0xFF, flags, stream_id & 0x7FFFFFFF, data[start:end])
            if self.closed is not None:
                return
            is_assembling = self._assembling is not None
        if self.closed is not None:
            return
        if offset < size:
            self._buffer = data[offset:]
        if received:
            self.carried_at = now
            self._receive_left -= received
            if self._receive_left < 0:
                self.fail(ErrorCode.FLOW_CONTROL_ERROR)
            elif self._receive_left < self._receive_window // 2:
                increment = self._receive_window - self._receive_left
                self._receive_left += increment
                self.write(frames.window_update(0, increment))

    def _greet(self) -> None:
        limits = self.limits
        settings = [
            (frames.HEADER_TABLE_SIZE, 0),
            (frames.INITIAL_WINDOW_SIZE, self._request_window),
            (frames.MAX_HEADER_LIST_SIZE, limits.header_bytes),
        ]
        if self.is_client:
            settings.append((frames.ENABLE_PUSH, 0))
        else:
            settings.append((frames.MAX_CONCURRENT_STREAMS, limits.streams))
        greeting = frames.settings_frame(settings)
        more = self._receive_window - frames.DEFAULT_WINDOW_BYTES
        if more > 0:
            greeting += frames.window_update(0, more)
        self.out.append((frames.PREFACE if self.is_client else b"") + greeting)

    def _read_preface(self, data: bytes) -> int:
        """The offset behind the preface; 0 when it is not complete or wrong."""
        preface = self._preface_left
        if data.startswith(preface):
            self._preface_left = b""
            return len(preface)
        if preface.startswith(data):
            self._buffer = data
        elif not self._greeted and data[:1].isalpha():
            self.out[:] = [_HTTP1_HINT]
            self._close(ErrorCode.HTTP_1_1_REQUIRED)
        else:
            self.fail(ErrorCode.PROTOCOL_ERROR)
        return 0

    def _read_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        cuts_in = self._assembling is not None and kind != frames.CONTINUATION
        is_settings = kind == frames.SETTINGS and not flags & frames.ACK
        if cuts_in or not (self._greeted or is_settings):
            self.fail(ErrorCode.PROTOCOL_ERROR)
        elif kind == frames.DATA:
            self._read_data(flags, stream_id, payload)
        elif kind == frames.HEADERS:
            self._read_headers(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._read_window_update(stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._read_rst_stream(stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._read_continuation(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            self._read_settings(flags, stream_id, payload)
        elif kind == frames.PING:
            self._read_ping(flags, stream_id, payload)
        elif kind == frames.GOAWAY:
            self._read_goaway(stream_id, payload)
        elif kind == frames.PRIORITY:
            self._read_priority(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            self.fail(ErrorCode.PROTOCOL_ERROR)
        else:
            self._bear()

    def _read_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        """DATA that is padded, empty, or for no stream."""
        if stream_id == 0 or self._is_idle(stream_id):
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        content = payload
        if flags & frames.PADDED:
            unpadded = _without_padding(payload)
            if unpadded is None:
                self.fail(ErrorCode.PROTOCOL_ERROR)
                return
            content = unpadded
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self._reset_here:
                self._refuse(stream_id, ErrorCode.STREAM_CLOSED)
            return
        ended = bool(flags & frames.END_STREAM)
        stream.receive_left -= len(payload)
        if stream.receive_left < 0:
            self.blame(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if not content and not ended and not self._bear():
            return
        if stream.receive_left < stream.receive_low and not stream.held and not ended:
            self.replenish(stream)
        try:
            if content or stream.ended_there:
                stream.on_data(content, 0, len(content))
            if ended and self.streams.get(stream_id) is stream:
                stream.note_ended_there()
                stream.receiver.on_end()
        except Exception:
            self._faulted(stream)

    def _read_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        content: bytes | None = payload
        if flags & frames.PADDED:
            content = _without_padding(payload)
        if content is not None and flags & frames.PRIORITIZED:
            if len(content) < 5:
                self.fail(ErrorCode.FRAME_SIZE_ERROR)
                return
            depends_on_itself = int.from_bytes(content[:4], "big") & 0x7FFFFFFF == stream_id
            content = None if depends_on_itself else content[5:]
        if content is None:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        ended = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._take_headers(stream_id, content, ended)
        else:
            self._assembling = _Assembly(stream_id, ended, [content], len(content))

    def _read_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        assembly = self._assembling
        if assembly is None or assembly.stream_id != stream_id:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        assembly.parts.append(payload)
        assembly.size_bytes += len(payload)
        if (
            len(assembly.parts) > _CONTINUATIONS_MAX
            or assembly.size_bytes > self.limits.header_bytes * _BLOCK_SLACK
        ):
            self.fail(ErrorCode.ENHANCE_YOUR_CALM)
            return
        if flags & frames.END_HEADERS:
            self._assembling = None
            self._take_headers(stream_id, b"".join(assembly.parts), assembly.ended)

    def _take_headers(self, stream_id: int, block: bytes, ended: bool) -> None:
        try:
            headers = self._decoder.decode(block)
        except HeaderError:
            self.fail(ErrorCode.COMPRESSION_ERROR)
            return
        self.carried_at = self.now
        limit = self.limits.header_bytes
        oversized = self._decoder.may_exceed(len(block), limit) and size_of(headers) > limit
        stream = self.streams.get(stream_id)
        if stream is None:
            self._take_first_headers(stream_id, headers, ended=ended, oversized=oversized)
        elif stream.ended_there:
            self.blame(stream, ErrorCode.STREAM_CLOSED)
        elif not self.is_client and not ended:
            # After a request's headers only trailers may come.
            self.blame(stream, ErrorCode.PROTOCOL_ERROR)
        elif oversized:
            self.blame(stream, ErrorCode.ENHANCE_YOUR_CALM)
        else:
            if ended:
                stream.note_ended_there()
            try:
                stream.receiver.on_headers(headers, ended)
            except Exception:
                self._faulted(stream)

    def _take_first_headers(
        self, stream_id: int, headers: Headers, *, ended: bool, oversized: bool
    ) -> None:
        if stream_id in self._reset_here:
            self._bear()
            return
        if self.is_client:
            if self._is_idle(stream_id):
                self.fail(ErrorCode.PROTOCOL_ERROR)
            else:
                self._refuse(stream_id, ErrorCode.STREAM_CLOSED)
            return
        if stream_id % 2 == 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        if stream_id <= self._last_peer_id:
            was_used = not any(stream_id in gap for gap in self._gaps)
            self.fail(ErrorCode.STREAM_CLOSED if was_used else ErrorCode.PROTOCOL_ERROR)
            return
        if self._going_away is not None and stream_id > self._going_away:
            # Our GOAWAY said that it would not be looked at: the client sends it elsewhere.
            self._remember_reset(stream_id)
            return
        if stream_id > self._last_peer_id + 2:
            self._gaps.append(range(self._last_peer_id + 1, stream_id))
            del self._gaps[:-_GAPS_REMEMBERED]
        self._last_peer_id = stream_id
        if len(self.streams) >= self.limits.streams:
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM)
            self._remember_reset(stream_id)
            return
        stream = Stream(self, stream_id, Nobody(), self._request_window)
        if self.settings_sent_at is not None:
            # The client may not have seen yet that its window is smaller than HTTP/2's own.
            stream.receive_left = max(stream.receive_left, frames.DEFAULT_WINDOW_BYTES)
        self.streams[stream_id] = stream
        if ended:
            stream.note_ended_there()
        try:
            self.owner.on_request(stream, headers, ended=ended, oversized=oversized)
        except Exception:
            self._faulted(stream)
        if ended and stream.is_open:
            # The owner has put its own method there.
            stream.refuse_data()

    def _read_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            self.fail(ErrorCode.FRAME_SIZE_ERROR)
            return
        increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if not self._patience.bear_update(self.now):
            self.fail(ErrorCode.ENHANCE_YOUR_CALM)
            return
        if stream_id == 0:
            self._widen(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        if increment == 0:
            self.blame(stream, ErrorCode.PROTOCOL_ERROR)
            return
        if stream.ended_here and stream.id not in self.blocked:
            return
        stream.window += increment
        if stream.window > frames.MAX_WINDOW_BYTES:
            self.blame(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        self._pump(stream)

    def _widen(self, increment: int) -> None:
        if increment == 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        window = (self.window if self._withheld is None else self._withheld) + increment
        if window > frames.MAX_WINDOW_BYTES:
            self.fail(ErrorCode.FLOW_CONTROL_ERROR)
        elif self._withheld is None:
            were_all_waiting = self.window <= 0
            self.window = window
            # While it was open, those who waited did so for their own windows.
            if were_all_waiting:
                self._pump_all()
        else:
            self._withheld = window

    def _pump(self, stream: Stream) -> None:
        try:
            stream.pump()
        except Exception:
            self._faulted(stream)

    def _pump_all(self) -> None:
        """Let those who wait send, in turn: who could not send all goes to the end."""
        for stream in list(self.blocked.values()):
            if self.window <= 0:
                return
            self._pump(stream)
            if self.blocked.pop(stream.id, None) is not None:
                self.blocked[stream.id] = stream

    def _read_rst_stream(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            self.fail(ErrorCode.FRAME_SIZE_ERROR)
            return
        if stream_id == 0 or self._is_idle(stream_id):
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        if not self._bear():
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        self.resets += 1
        self.forget(stream)
        self._tell_reset(stream, frames.error_code(int.from_bytes(payload, "big")))

    def _read_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
        elif flags & frames.ACK:
            if payload:
                self.fail(ErrorCode.FRAME_SIZE_ERROR)
            elif self.settings_sent_at is None:
                self._bear()
            else:
                self._take_acknowledgement()
        elif len(payload) % 6:
            self.fail(ErrorCode.FRAME_SIZE_ERROR)
        elif not self._greeted or self._bear():
            self._take_settings(payload)

    def _take_acknowledgement(self) -> None:
        """From here on the peer keeps to our settings."""
        self.settings_sent_at = None
        self._decoder.forbid_table()
        excess = frames.DEFAULT_WINDOW_BYTES - self._request_window
        if excess > 0 and not self.is_client:
            for stream in list(self.streams.values()):
                stream.receive_left -= excess
                if not stream.held:
                    stream.resume()

    def _take_settings(self, payload: bytes) -> None:
        settings: dict[int, int] = {}
        for name, value in frames.read_settings(payload):
            fault = self._fault_of(name, value)
            if fault is not None:
                self.fail(fault)
                return
            settings[name] = value
        self.peer_streams = settings.get(frames.MAX_CONCURRENT_STREAMS, self.peer_streams)
        # Only the last of several values counts: a frame of thousands, times as many streams,
        # would be cheap to send and dear to obey.
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self.peer_window)
        change, self.peer_window = window - self.peer_window, window
        if change:
            for stream in self.streams.values():
                stream.window += change
                if stream.window > frames.MAX_WINDOW_BYTES:
                    self.fail(ErrorCode.FLOW_CONTROL_ERROR)
                    return
        # Ahead of any DATA that the new window allows: a peer may count it from then on.
        self._reply(frames.pack(frames.SETTINGS, frames.ACK, 0))
        self._greeted = True
        if change > 0:
            self._pump_all()
        self.owner.on_capacity()

    def _fault_of(self, name: int, value: int) -> ErrorCode | None:
        """What is wrong with a setting; those we do not know are ignored."""
        if name == frames.INITIAL_WINDOW_SIZE and value > frames.MAX_WINDOW_BYTES:
            return ErrorCode.FLOW_CONTROL_ERROR
        if name == frames.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 2**24:
            return ErrorCode.PROTOCOL_ERROR
        if name == frames.ENABLE_PUSH and (value > 1 or (value == 1 and self.is_client)):
            return ErrorCode.PROTOCOL_ERROR
        return None

    def _read_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
        elif len(payload) != 8:
            self.fail(ErrorCode.FRAME_SIZE_ERROR)
        elif flags & frames.ACK and self._pings_due:
            self._pings_due -= 1
            self.acknowledged_ping = payload
        elif self._bear() and not flags & frames.ACK:
            self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _read_goaway(self, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
            return
        if len(payload) < 8:
            self.fail(ErrorCode.FRAME_SIZE_ERROR)
            return
        last_id = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
        if self._peer_going_away and not self._bear():
            return
        self._peer_going_away = True
        if self.is_client:
            # These the peer has not touched: they may be sent again elsewhere.
            for stream in [s for s in self.streams.values() if s.id > last_id]:
                self.forget(stream)
                self._tell_reset(stream, ErrorCode.REFUSED_STREAM)
        self.owner.on_capacity()

    def _read_priority(self, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            self.fail(ErrorCode.PROTOCOL_ERROR)
        elif len(payload) != 5 or int.from_bytes(payload[:4], "big") & 0x7FFFFFFF == stream_id:
            wrong_size = len(payload) != 5
            code = ErrorCode.FRAME_SIZE_ERROR if wrong_size else ErrorCode.PROTOCOL_ERROR
            stream = self.streams.get(stream_id)
            if stream is not None:
                self.blame(stream, code)
            else:
                self.fail(code)
        else:
            self._bear()

    def _remember_reset(self, stream_id: int) -> None:
        """What is still under way on it is no fault of the peer."""
        self._reset_here[stream_id] = None
        if len(self._reset_here) > _RESETS_REMEMBERED:
            del self._reset_here[next(iter(self._reset_here))]

    # --- Rules ---------------------------------------------------------------------------------

    def _is_idle(self, stream_id: int) -> bool:
        """Whether a stream was never opened."""
        if bool(stream_id % 2) == self.is_client:
            return stream_id >= self._next_id
        return stream_id > self._last_peer_id and stream_id not in self._reset_here

    def _reply(self, frame: bytes) -> None:
        self.unearned += 1
        self.write(frame)

    def _refuse(self, stream_id: int, code: ErrorCode) -> None:
        """Reset what is no stream of ours."""
        if self._bear():
            self._reply(frames.rst_stream(stream_id, code))

    def _bear(self) -> bool:
        """Bear with a frame that costs its sender nothing; False when there were too many."""
        if self._patience.bear(self.now):
            return True
        self.fail(ErrorCode.ENHANCE_YOUR_CALM)
        return False

    def _faulted(self, stream: Stream) -> None:
        """Our own mistake on one stream must not end the others."""
        _log.exception("unexpected error on a stream")
        self.break_stream(stream, ErrorCode.INTERNAL_ERROR)

    def _tell_reset(self, stream: Stream, code: ErrorCode) -> None:
        try:
            stream.receiver.on_reset(code)
        except Exception:
            _log.exception("unexpected error at the end of a stream")

    def _close(self, code: ErrorCode) -> None:
        if self.closed is not None:
            return
        self.closed = code
        self._buffer = b""
        self._assembling = None
        for stream in list(self.streams.values()):
            self.forget(stream)
            self._tell_reset(stream, ErrorCode.CONNECTION_LOST)
        self.owner.on_closed()


def _join(data: bytes, start: int, end: int) -> tuple[bytes, int]:
    """The payload of a DATA frame and of those of the same stream right behind it, as far as one
    frame could hold it; and where it ends. The stream's number stands ahead of `start`.

    An answer that comes faster than it is taken then costs much less per message.
    """
    parts = [data[start:end]]
    stream_id = unpack(data, start - 9)[2]
    room = MAX_FRAME_BYTES - (end - start)
    size = len(data)
    while size - end >= 9:
        word, flags, next_id = unpack(data, end)
        length = word >> 8
        stop = end + 9 + length
        if next_id != stream_id or word & 0xFF or flags or not 0 < length <= room or stop > size:
            break
        parts.append(data[end + 9 : stop])
        room -= length
        end = stop
    return b"".join(parts), end


class _Assembly:
    """A header block that comes in several frames."""

    __slots__ = ("ended", "parts", "size_bytes", "stream_id")

    def __init__(self, stream_id: int, ended: bool, parts: list[bytes], size_bytes: int) -> None:
        self.stream_id = stream_id
        self.ended = ended
        self.parts = parts
        self.size_bytes = size_bytes


def _without_padding(payload: bytes) -> bytes | None:
    """What a padded frame holds; None when the padding is longer than the frame."""
    if not payload or payload[0] >= len(payload):
        return None
    return payload[1 : len(payload) - payload[0]]
