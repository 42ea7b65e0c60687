"""gRPC's length-prefixed messages, cut out of slices that end anywhere.

A message is one flag octet (1: compressed), four octets of length, and that many octets.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TypeAlias

Message: TypeAlias = tuple[bool, bytes]
"""Whether it is compressed, and its octets."""

PREFIX_BYTES = 5
_PREFIX = Struct(">BI")
_unpack = _PREFIX.unpack_from
_pack = _PREFIX.pack
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""zlib's names for a gzip member and for RFC 1950, which is what gRPC calls deflate."""


class MessageError(Exception):
    """The peer's messages cannot be read."""

    before: list[Message]
    """Messages that were complete ahead of the fault in the same slice."""

    def __init__(self, text: str, before: list[Message] | None = None) -> None:
        super().__init__(text)
        self.before = before or []


class TooLargeError(MessageError):
    """A message is larger than its limit, before or after decompression."""


class UnsupportedError(MessageError):
    """A message is compressed in a way that is not spoken here."""


class CorruptError(MessageError):
    """A message's prefix or its compressed form is invalid."""


def prefix(length: int, *, compressed: bool = False) -> bytes:
    """The five octets ahead of a message of `length` octets."""
    return _pack(compressed, length)


def frame(message: bytes, *, compressed: bool = False) -> bytes:
    """A message with its prefix."""
    return _pack(compressed, len(message)) + message


def decompress(message: bytes, encoding: str, limit: int) -> bytes:
    """Expand a message compressed as `grpc-encoding` says.

    Never makes more than `limit` + 1 octets, whatever the message claims.

    Raises:
        TooLargeError: it expands to more than `limit` octets.
        UnsupportedError: the encoding is not identity, gzip or deflate.
        CorruptError: it is not one whole stream of that encoding.
    """
    if encoding in ("identity", ""):
        if len(message) > limit:
            raise TooLargeError(f"a message of more than {limit} octets")
        return message
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise UnsupportedError("an unknown message encoding")
    inflate = zlib.decompressobj(bits)
    try:
        expanded = inflate.decompress(message, limit + 1)
    except zlib.error:
        raise CorruptError("a message that cannot be decompressed") from None
    if len(expanded) > limit:
        raise TooLargeError(f"a message that expands to more than {limit} octets")
    if not inflate.eof or inflate.unused_data:
        raise CorruptError("a message that is not one compressed stream")
    return expanded


class MessageReader:
    """Cuts one stream's payload into messages. Holds at most one message that is not complete."""

    __slots__ = ("_buffer", "_error", "_limit", "_refused", "_rest", "_skip", "_stop")

    def __init__(self, message_bytes: int) -> None:
        self._limit = message_bytes
        self._buffer = bytearray()
        self._stop = 0
        """Size of the buffered message with its prefix; 0 while the prefix is not whole."""
        self._skip = 0
        """Octets of a refused message that are still to come."""
        self._error: MessageError | None = None
        self._refused = 0
        self._rest = b""

    @property
    def buffered(self) -> int:
        """Octets held of a message that is not complete."""
        return len(self._buffer)

    @property
    def at_boundary(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer and not self._skip and self._error is None

    def feed(self, data: bytes, start: int, end: int) -> list[Message]:
        """Take `data[start:end]`; answer the messages it completes, in order.

        Raises:
            TooLargeError: a prefix announces a message over the limit; `skip` goes on behind it.
            CorruptError: a flag is neither 0 nor 1. The reader is of no more use.
        """
        messages: list[Message] = []
        if self._buffer or self._skip or self._error is not None:
            start = self._resume(data, start, end, messages)
        limit = self._limit
        while end - start >= PREFIX_BYTES:
            flag, length = _unpack(data, start)
            if flag > 1 or length > limit:
                self._rest = data[start + PREFIX_BYTES : end]
                raise self._refuse(flag, length, messages)
            stop = start + PREFIX_BYTES + length
            if stop > end:
                self._stop = stop - start
                break
            messages.append((flag == 1, data[start + PREFIX_BYTES : stop]))
            start = stop
        if start < end:
            self._buffer += data[start:end]
        return messages

    def skip(self) -> list[Message]:
        """After a TooLargeError: drop that message as it comes, and go on behind it.

        Answers the messages behind it that were complete in the same slice; raises as `feed` does.
        """
        assert isinstance(self._error, TooLargeError)
        rest, self._rest = self._rest, b""
        self._error = None
        self._skip = self._refused
        return self.feed(rest, 0, len(rest))

    def _resume(self, data: bytes, start: int, end: int, messages: list[Message]) -> int:
        """Go on with what an earlier slice began; answers where the next message starts."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._skip:
            dropped = min(self._skip, end - start)
            self._skip -= dropped
            return start + dropped
        buffer = self._buffer
        if not self._stop:
            taken = min(PREFIX_BYTES - len(buffer), end - start)
            buffer += data[start : start + taken]
            start += taken
            if len(buffer) < PREFIX_BYTES:
                return end
            flag, length = _unpack(buffer)
            if flag > 1 or length > self._limit:
                buffer.clear()
                self._rest = data[start:end]
                raise self._refuse(flag, length, messages)
            self._stop = PREFIX_BYTES + length
        taken = min(self._stop - len(buffer), end - start)
        buffer += data[start : start + taken]
        if len(buffer) == self._stop:
            messages.append((buffer[0] == 1, bytes(memoryview(buffer)[PREFIX_BYTES:])))
            self._buffer = bytearray()
            self._stop = 0
        return start + taken

    def _refuse(self, flag: int, length: int, before: list[Message]) -> MessageError:
        if flag > 1:
            self._rest = b""
            self._error = CorruptError("a message with an invalid flag", before)
        else:
            self._refused = length
            self._error = TooLargeError(f"a message of more than {self._limit} octets", before)
        return self._error


class Boundary:
    """Follows where messages end in a payload that is passed on unread. Holds no message."""

    __slots__ = ("_left", "_prefix", "messages")

    def __init__(self) -> None:
        self.messages = 0
        """Whole messages that went by."""
        self._left = 0
        """Octets still to come of the message whose prefix went by."""
        self._prefix = b""
        """A prefix that is not whole: at most four octets."""

    @property
    def at_boundary(self) -> bool:
        """Whether the last octet that went by ended a message, or none did."""
        return not self._left and not self._prefix

    def advance(self, data: bytes, start: int, end: int) -> int:
        """Go on over `data[start:end]`; answers how many messages it completed."""
        completed = 0
        if self._left or self._prefix:
            completed, start = self._resume(data, start, end)
        while end - start >= PREFIX_BYTES:
            start += PREFIX_BYTES + _unpack(data, start)[1]
            if start > end:
                self._left = start - end
                break
            completed += 1
        else:
            if start < end:
                self._prefix = data[start:end]
        self.messages += completed
        return completed

    def _resume(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Finish the message an earlier slice began: 1 or 0, and where the next one starts."""
        if self._prefix:
            taken = min(PREFIX_BYTES - len(self._prefix), end - start)
            self._prefix += data[start : start + taken]
            start += taken
            if len(self._prefix) < PREFIX_BYTES:
                return 0, end
            self._left = _unpack(self._prefix)[1]
            self._prefix = b""
        taken = min(self._left, end - start)
        self._left -= taken
        return int(not self._left), start + taken
