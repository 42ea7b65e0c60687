"""HTTP/1.1 of a server: what a head means, what is refused, and how answers look.

The octets themselves are read by llhttp, strictly: it refuses bare CR and LF, folded lines, spaces
before a colon, control characters, two lengths, and a length beside a transfer encoding. Here are
the rules that it leaves to its user; without them two servers could cut a stream of requests at
different places. Whatever breaks one of them ends its connection.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import unquote

from forebay_common.errors import ForebayError, Reason

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CHUNKS_AT_HAND = 2048
CHUNK_HEADS = [b"%x\r\n" % size for size in range(CHUNKS_AT_HAND)]
"""What stands ahead of a chunk, by its size: formatting it costs as much as sending it on."""
JSON = "application/json"
_PHRASES = {499: "Client Closed Request"} | {int(s): s.phrase for s in HTTPStatus}
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding"})
_LISTS = frozenset({b"connection", b"content-encoding", b"expect", b"tracestate"})
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_CONTENT_TYPE = re.compile(r"[\x20-\x7e]{1,200}")
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31}
# How much framing a chunked body may have beyond twice its content: tiny chunks cost far more to
# read than to send, and extensions and trailers are read for nothing.
_FRAMING_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may make large, many or slow."""

    body_bytes: int = 16 << 20
    """Largest body of a request, in bytes, before and after decompression."""
    request_bytes: int = 512 << 20
    """Most bytes of all bodies that are kept at once, while they come and until they are answered;
    more are refused with QUEUE_FULL."""
    header_bytes: int = 32 << 10
    """Largest request line and header section together, in bytes."""
    headers: int = 100
    """Most header fields of a request."""
    answer_bytes: int = 256 << 20
    """Largest answer that is kept until it is whole, in bytes."""
    body_read_s: float = 30.0
    """Longest time a head may take to arrive, and then a body."""
    slow_reader_s: float = 30.0
    """How long a client may take nothing of what waits for it before it is cut."""
    idle_s: float = 75.0
    """How long a connection without a request is kept."""
    connections: int = 16384
    """Most connections at once; more are answered 503 and closed."""


@dataclasses.dataclass(slots=True)
class RequestHead:
    """A request without its body."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    headers: dict[bytes, bytes]
    """Names in lower case; of a repeated field the first value, and all of a list."""
    length: int | None
    """Of the body, in bytes; None when it comes in chunks."""
    is_http_1_0: bool
    keeps_alive: bool
    """Whether the client can use its connection again."""
    expects: bool
    """Whether the client waits for `100 Continue` before it sends the body."""

    def text(self, name: bytes) -> str | None:
        """A header's value; None where it is absent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def malformed(message: str = "This is not a valid HTTP request.") -> ForebayError:
    """The refusal of what ends its connection."""
    return ForebayError(Reason.INVALID_ARGUMENT, message)


def read_head(method: bytes, target: bytes, version: str, fields: Fields) -> RequestHead:
    """Understand what llhttp has read.

    Raises:
        ForebayError: it is no request of HTTP/1.0 or 1.1, or where it ends could be disputed.
    """
    is_http_1_0 = version == "1.0"
    if not is_http_1_0 and version != "1.1":
        raise malformed("HTTP/1.1 is spoken here.")
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        name = name.lower()  # noqa: PLW2901
        if name not in headers:
            headers[name] = value
        elif name in _LISTS:
            headers[name] += b", " + value
        elif name in _ONCE:
            raise malformed("A header that must stand once is repeated.")
    if b"host" not in headers and not is_http_1_0:
        raise malformed("The Host header is missing.")
    length: int | None = 0
    if b"content-length" in headers:
        length = int(headers[b"content-length"])
    elif b"transfer-encoding" in headers:
        if is_http_1_0 or headers[b"transfer-encoding"].strip().lower() != b"chunked":
            raise malformed("Of transfer encodings only 'chunked' is taken, and in HTTP/1.1 only.")
        length = None
    keeps_alive = not is_http_1_0
    if b"connection" in headers:
        options = {option.strip() for option in headers[b"connection"].lower().split(b",")}
        keeps_alive = b"close" not in options and (keeps_alive or b"keep-alive" in options)
    return RequestHead(
        method=method.decode("latin-1"),
        path=_path_of(target),
        headers=headers,
        length=length,
        is_http_1_0=is_http_1_0,
        keeps_alive=keeps_alive,
        expects=b"expect" in headers
        and length != 0
        and not is_http_1_0
        and headers[b"expect"].strip().lower() == b"100-continue",
    )


def _path_of(target: bytes) -> str:
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.match(target)
        if absolute is not None:
            target = target[absolute.end() :] or b"/"
    path = target.partition(b"#")[0].partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


def check_size(target: bytes, fields: Fields, limits: HttpLimits) -> None:
    """Hold a head against its limits.

    Raises:
        ForebayError: HEADERS_TOO_LARGE.
    """
    if len(fields) > limits.headers:
        raise ForebayError(
            Reason.HEADERS_TOO_LARGE, f"There are more than {limits.headers} headers."
        )
    # Each field with its colon, space and line end; the request line with method and version.
    size = len(target) + 16 + sum(len(name) + len(value) + 4 for name, value in fields)
    if size > limits.header_bytes:
        raise head_too_large(limits)


def head_too_large(limits: HttpLimits) -> ForebayError:
    """The refusal of a head over `header_bytes`."""
    message = f"The URL and the headers are larger than the {limits.header_bytes} bytes allowed."
    return ForebayError(Reason.HEADERS_TOO_LARGE, message)


def body_too_large(limits: HttpLimits) -> ForebayError:
    """The refusal of a body over `body_bytes`."""
    message = f"The body is larger than the {limits.body_bytes} bytes allowed."
    return ForebayError(Reason.BODY_TOO_LARGE, message)


def no_room() -> ForebayError:
    """The refusal of a body beyond `request_bytes`."""
    message = "There is no room for more requests now."
    return ForebayError(Reason.QUEUE_FULL, message, retry_after_s=1)


def is_mostly_framing(wire_bytes: int, body_bytes: int) -> bool:
    """Whether a body that took `wire_bytes` to send holds too little for that."""
    return wire_bytes > 3 * body_bytes + _FRAMING_BYTES


def decode_body(body: bytes, encoding: bytes, limits: HttpLimits) -> bytes:
    """Undo a body's `Content-Encoding`. Never makes more than `body_bytes` + 1.

    Raises:
        ForebayError: it expands to too much, is not what it says, or its encoding is not taken.
    """
    encoding = encoding.strip().lower()
    if encoding in (b"", b"identity"):
        return body
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        if encoding != b"deflate":
            message = "Of content encodings only 'gzip' and 'deflate' are taken."
            raise ForebayError(Reason.INVALID_ARGUMENT, message, param="content-encoding")
        # Some clients send the bare stream instead of RFC 1950's form of it.
        bits = 15 if body[:1] and body[0] & 0x0F == 8 else -15
    inflate = zlib.decompressobj(bits)
    try:
        expanded = inflate.decompress(body, limits.body_bytes + 1)
    except zlib.error:
        expanded = None
    if expanded is not None and len(expanded) > limits.body_bytes:
        raise body_too_large(limits)
    if expanded is None or not inflate.eof or inflate.unused_data:
        raise ForebayError(Reason.INVALID_ARGUMENT, "The body is not as its headers say.")
    return expanded


class Writer:
    """Makes heads of answers. Everything but the date and the request id is made once."""

    def __init__(self, server: str) -> None:
        self._server = f"Server: {server}\r\n"
        self._fixed: dict[tuple[str, bool, bool], bytes] = {}

    def whole(
        self,
        status: int,
        content_type: str,
        length: int,
        *,
        date: bytes,
        request_id: str,
        connection: str = "",
        extra: Iterable[tuple[str, str]] = (),
    ) -> bytes:
        """The head of an answer whose size is known. `connection` is that header's value, `date`
        the text of that header with the end of the head behind it."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in extra])
        if connection:
            lines += f"Connection: {connection}\r\n"
        return (
            f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n{self._server}"
            f"Content-Type: {clean_content_type(content_type)}\r\nContent-Length: {length}\r\n"
            f"{lines}X-Request-Id: {request_id}\r\nDate: "
        ).encode("latin-1") + date

    def stream(
        self,
        content_type: str,
        *,
        date: bytes,
        request_id: str,
        chunked: bool,
        closes: bool,
        extra: Iterable[tuple[str, str]] = (),
    ) -> bytes:
        """The head of an answer that comes in parts: in chunks, or until the connection ends."""
        key = (content_type, chunked, closes)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._stream_head(content_type, chunked=chunked, closes=closes)
            # Content types are the replicas'; a replica that varies them must not fill memory.
            if len(self._fixed) < 64:
                self._fixed[key] = fixed
        lines = "".join([f"{name}: {value}\r\n" for name, value in extra]) if extra else ""
        return b"%b%b\r\n%bDate: %b" % (
            fixed,
            request_id.encode("ascii"),
            lines.encode("latin-1"),
            date,
        )

    def _stream_head(self, content_type: str, *, chunked: bool, closes: bool) -> bytes:
        return (
            f"HTTP/1.1 200 OK\r\n{self._server}Content-Type: {clean_content_type(content_type)}\r\n"
            "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
            + ("Transfer-Encoding: chunked\r\n" if chunked else "")
            + ("Connection: close\r\n" if closes else "")
            + "X-Request-Id: "
        ).encode("latin-1")


def clean_content_type(content_type: str) -> str:
    """A content type that cannot break a head; JSON's where the given one would."""
    return content_type if _CONTENT_TYPE.fullmatch(content_type) else JSON
