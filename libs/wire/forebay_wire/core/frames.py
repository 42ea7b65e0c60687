"""HTTP/2 frames on the wire (RFC 9113 §4 and §6)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Everybody must take frames of this size, and nobody is told that we would take larger ones.
MAX_FRAME_BYTES = 16384
MAX_WINDOW_BYTES = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1
DEFAULT_WINDOW_BYTES = 65535

# A frame's header: length and type in one word, flags, stream. The highest bit of the stream is
# reserved and ignored.
HEADER = Struct(">IBI")
pack = HEADER.pack
unpack = HEADER.unpack_from

DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

HEADER_TABLE_SIZE = 0x1
ENABLE_PUSH = 0x2
MAX_CONCURRENT_STREAMS = 0x3
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_SIZE = 0x5
MAX_HEADER_LIST_SIZE = 0x6

_SETTING = Struct(">HI")


class ErrorCode(IntEnum):
    """Why a stream or a connection ended (RFC 9113 §7), and one of our own that is never sent."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD
    CONNECTION_LOST = -1
    """The connection ended under the stream."""


def error_code(number: int) -> ErrorCode:
    """The code with this number; INTERNAL_ERROR for one that RFC 9113 does not know."""
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.INTERNAL_ERROR


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(settings: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))


def read_settings(payload: bytes) -> Iterable[tuple[int, int]]:
    """The settings of a frame whose length was checked."""
    return _SETTING.iter_unpack(payload)


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode) -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big"))


def header_frames(stream_id: int, block: bytes, *, end_stream: bool) -> bytes:
    """HEADERS, and as many CONTINUATION frames as the block needs."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= MAX_FRAME_BYTES:
        return pack(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    parts = [block[i : i + MAX_FRAME_BYTES] for i in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream_id, parts[0])]
    frames += (frame(CONTINUATION, 0, stream_id, part) for part in parts[1:-1])
    frames.append(frame(CONTINUATION, END_HEADERS, stream_id, parts[-1]))
    return b"".join(frames)
