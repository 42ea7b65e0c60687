"""The other end of a core connection, for tests: feeds it bytes, and reads what it answers with
libraries that are not ours (`hyperframe`, `hpack`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import hpack
from forebay_wire.core import frames
from forebay_wire.core.connection import Connection
from forebay_wire.core.frames import ErrorCode, frame
from forebay_wire.core.headers import NO_TABLE, Headers, encode
from forebay_wire.core.limits import Limits
from forebay_wire.core.stream import Budget, Stream
from hyperframe.frame import Frame

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
ANSWER: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS: Headers = [(b"grpc-status", b"0")]
WIDE = 2**31 - 1


class Recorder:
    """A receiver that remembers what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails_on: set[str] = set()

    def _note(self, *what: Any) -> None:
        self.told.append(what)
        if what[0] in self.fails_on:
            raise RuntimeError("a receiver with a bug")

    def on_headers(self, headers: Headers, ended: bool) -> None:
        self._note("headers", [(bytes(k), bytes(v)) for k, v in headers], ended)

    def on_data(self, data: bytes, start: int, end: int) -> None:
        # How DATA was cut into frames means nothing, so what comes in a row is one.
        before = self.told.pop()[1] if self.kinds[-1:] == ["data"] else b""
        self._note("data", before + data[start:end])

    def on_end(self) -> None:
        self._note("end")

    def on_reset(self, code: ErrorCode) -> None:
        self._note("reset", code)

    def on_blocked(self) -> None:
        self._note("blocked")

    def on_drained(self) -> None:
        self._note("drained")

    @property
    def data(self) -> bytes:
        """All payload that came."""
        return b"".join(what[1] for what in self.told if what[0] == "data")

    @property
    def resets(self) -> list[ErrorCode]:
        """Why the stream is no more."""
        return [what[1] for what in self.told if what[0] == "reset"]

    @property
    def kinds(self) -> list[str]:
        """What it was told, without contents."""
        return [what[0] for what in self.told]


@dataclasses.dataclass
class Request:
    """What an owner was told of a stream that a client opened."""

    stream: Stream
    headers: Headers
    ended: bool
    oversized: bool
    recorder: Recorder


class Owner:
    """An owner that remembers; it cuts a stream when too much waits."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.overfull: list[Stream] = []
        self.writable = 0
        self.capacity = 0
        self.closed = 0
        self.fails_on_request = False

    def on_request(self, stream: Stream, headers: Headers, *, ended: bool, oversized: bool) -> None:
        recorder = Recorder()
        stream.receiver = recorder
        stream.on_data = recorder.on_data
        self.requests.append(Request(stream, headers, ended, oversized, recorder))
        if self.fails_on_request:
            raise RuntimeError("an owner with a bug")

    def on_capacity(self) -> None:
        self.capacity += 1

    def on_overfull(self, stream: Stream) -> None:
        self.overfull.append(stream)
        stream.connection.break_stream(stream, ErrorCode.CANCEL)

    def on_writable(self) -> None:
        self.writable += 1

    def on_closed(self) -> None:
        self.closed += 1


class End:
    """A core connection under test."""

    def __init__(
        self, *, is_client: bool, budget: Budget | None = None, now: float = 0.0, **limits: Any
    ) -> None:
        self.limits = Limits(**limits)
        self.owner = Owner()
        self.now = now
        self.connection = Connection(
            self.owner, self.limits, is_client=is_client, now=now, budget=budget
        )
        self._decoder = hpack.Decoder()

    def feed(self, *pieces: bytes) -> list[tuple[Any, ...]]:
        """Have it take bytes; gives what it answers."""
        self.connection.receive(b"".join(pieces), self.now)
        return self.said()

    def said(self) -> list[tuple[Any, ...]]:
        """The frames it has to write, as tuples that begin with their type."""
        return [self._describe(each) for each in read_frames(self.connection.take())]

    def request(
        self, stream_id: int, *, headers: Headers = REQUEST, ended: bool = False
    ) -> Request:
        """Have a client open a stream."""
        self.connection.receive(headers_frame(stream_id, headers, ended=ended), self.now)
        return self.owner.requests[-1]

    def open(self, *, ended: bool = True) -> tuple[Stream, Recorder]:
        """Open a stream, as a client."""
        recorder = Recorder()
        stream = self.connection.open(recorder)
        stream.send_headers(encode(REQUEST))
        if ended:
            stream.end()
        return stream, recorder

    def _describe(self, each: Any) -> tuple[Any, ...]:
        kind = type(each).__name__.removesuffix("Frame")
        if kind == "Data":
            return (kind, each.stream_id, each.data, "END_STREAM" in each.flags)
        if kind == "Headers":
            assert "END_HEADERS" in each.flags
            fields = self._decoder.decode(each.data, raw=True)
            return (kind, each.stream_id, list(map(tuple, fields)), "END_STREAM" in each.flags)
        if kind == "RstStream":
            return (kind, each.stream_id, ErrorCode(each.error_code))
        if kind == "GoAway":
            return (kind, each.last_stream_id, ErrorCode(each.error_code))
        if kind == "WindowUpdate":
            return (kind, each.stream_id, each.window_increment)
        if kind == "Settings":
            return (kind, "ACK") if "ACK" in each.flags else (kind, dict(each.settings))
        if kind == "Ping":
            return (kind, "ACK" if "ACK" in each.flags else "", each.opaque_data)
        raise AssertionError(f"a frame that we never send: {each}")


def read_frames(data: bytes) -> list[Any]:
    """Read frames; they must be whole."""
    data = data.removeprefix(frames.PREFACE)
    found: list[Any] = []
    while data:
        each, length = Frame.parse_frame_header(memoryview(data[:9]), strict=True)
        assert length <= 16384
        assert len(data) >= 9 + length, "a frame that is not whole"
        each.parse_body(memoryview(data[9 : 9 + length]))
        found.append(each)
        data = data[9 + length :]
    return found


def a_server(**options: Any) -> End:
    """A server whose client has introduced itself, and has acknowledged its settings."""
    end = End(is_client=False, **options)
    end.feed(frames.PREFACE, settings(), frame(frames.SETTINGS, frames.ACK, 0))
    return end


def a_client(**options: Any) -> End:
    """A client whose server has introduced itself, and has acknowledged its settings."""
    end = End(is_client=True, **options)
    end.feed(settings(), frame(frames.SETTINGS, frames.ACK, 0))
    return end


def settings(**values: int) -> bytes:
    """A SETTINGS frame, by the names RFC 9113 gives its values."""
    return frames.settings_frame((getattr(frames, name), v) for name, v in values.items())


def headers_frame(stream_id: int, headers: Headers = REQUEST, *, ended: bool = False) -> bytes:
    """HEADERS, and CONTINUATION where it needs some."""
    return frames.header_frames(stream_id, block_of(headers), end_stream=ended)


def block_of(headers: Headers) -> bytes:
    """A header block that may be the first behind our settings."""
    return NO_TABLE + encode(headers)


def data_frame(stream_id: int, payload: bytes, *, ended: bool = False, padding: int = -1) -> bytes:
    """DATA; padded by as many octets unless `padding` is negative."""
    flags = frames.END_STREAM if ended else 0
    if padding < 0:
        return frame(frames.DATA, flags, stream_id, payload)
    padded = bytes((padding,)) + payload + bytes(padding)
    return frame(frames.DATA, flags | frames.PADDED, stream_id, padded)


def rst_frame(stream_id: int, code: ErrorCode = ErrorCode.CANCEL) -> bytes:
    """RST_STREAM."""
    return frames.rst_stream(stream_id, code)


def died_of(end: End, code: ErrorCode, said: list[tuple[Any, ...]]) -> bool:
    """Whether it ended the connection for this reason: the last thing it says is a GOAWAY, its
    owner knows, and nothing is left behind."""
    connection = end.connection
    assert said, "it died without a word"
    assert said[-1][0] == "GoAway", said[-1]
    assert said[-1][2] is code, said[-1]
    assert connection.closed is code
    assert end.owner.closed == 1
    assert not connection.streams
    assert not connection.blocked
    assert not connection.can_open
    assert end.feed(frame(frames.PING, 0, 0, bytes(8))) == []
    return True
