"""HTTP/2 header blocks and what gRPC keeps in them.

We announce a table of size 0 and use none ourselves, so a block means the same on any connection:
it can be read without state, made from ready parts, and remembered whole. `hpack` reads whatever
comes before the peer has confirmed that (RFC 7541; RFC 9113 §4.3, §8.2 and §8.3).
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from hpack.exceptions import HPACKError
from hpack.hpack import Decoder
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

Field: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = list[Field]

USER_AGENT = b"forebay/0.1"
NO_TABLE = b"\x20"
"""Begins our first block on a connection: no table from here on, so that a peer which forbids one
finds it gone already (RFC 9113 §4.3.1)."""

_FIELD_BYTES = 32
"""What RFC 9113 §6.5.2 adds for each field."""
_EXPANSION_MAX = 60
"""Bytes of list an octet of a block stands for at most: the largest static entry."""
_REMEMBERED_BYTES_MAX = 512
_CODE_UNKNOWN = 2
_CODE_MAX = 16
_MESSAGE_BYTES_MAX = 2048


class HeaderError(Exception):
    """A header block cannot be read: COMPRESSION_ERROR, the connection ends."""


class MalformedError(Exception):
    """A message's fields break HTTP/2's rules: PROTOCOL_ERROR, the stream ends."""


class TimeoutFormatError(ValueError):
    """A `grpc-timeout` is not what gRPC defines; the call is answered, the stream is sound."""


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request's checked fields."""

    method: str
    scheme: str
    path: str
    authority: str
    """`:authority`, else `host`, else empty."""
    content_type: str
    """Empty when absent, like the encodings."""
    encoding: str
    """`grpc-encoding`."""
    accept_encoding: str
    """`grpc-accept-encoding`."""
    timeout: str | None
    """`grpc-timeout` as it came."""
    content_length: int | None
    fields: dict[str, str]
    """All other fields with printable ASCII values; the last of a repeated name wins. Binary ones
    (`-bin`) and those with other octets, which gRPC's metadata cannot carry on, are left out. The
    dict is the caller's."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds the caller waits; None is for ever.

        Raises:
            TimeoutFormatError: the caller's figure is invalid.
        """
        return None if self.timeout is None else parse_timeout(self.timeout)


@dataclasses.dataclass(slots=True, eq=False)
class Response:
    """An answer's checked fields."""

    status: int
    content_type: str
    """Empty when absent, like `encoding`."""
    encoding: str
    """`grpc-encoding`."""
    content_length: int | None
    fields: dict[str, str]
    """All other fields, as in `Request`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trailers:
    """How a call ended."""

    code: int | None
    """None when `grpc-status` is absent; UNKNOWN when it is not one of gRPC's."""
    message: str
    details: bytes | None
    """`grpc-status-details-bin`; None when absent or not base64."""
    metadata: tuple[tuple[str, str], ...]
    """Other fields with printable ASCII values, in order."""


class HeaderDecoder:
    """Reads the header blocks of one connection, in order."""

    __slots__ = ("_contextless", "_decoder", "_list_bytes_max")

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._decoder = Decoder(max_header_list_size=list_bytes_max)
        self._contextless = False

    def forbid_table(self) -> None:
        """The peer has acknowledged our SETTINGS_HEADER_TABLE_SIZE of 0: its next block must say
        so."""
        self._decoder.max_allowed_table_size = 0
        self._contextless = self._decoder.header_table_size == 0

    def may_exceed(self, block_bytes: int, list_bytes: int) -> bool:
        """Whether a block of this size may stand for more than `list_bytes` of list."""
        return not self._contextless or block_bytes * _EXPANSION_MAX > list_bytes

    def decode(self, block: bytes) -> Headers:
        """Read a whole block; the list is the caller's.

        Raises:
            HeaderError: it is invalid or stands for more than `list_bytes_max` (`size_of`); this
                decoder is of no more use.
        """
        if self._contextless:
            if len(block) <= _REMEMBERED_BYTES_MAX:
                return list(_read_remembered(block, self._list_bytes_max))
            return _read(block, self._list_bytes_max)
        decoder = self._decoder
        try:
            headers = [(name, value) for name, value in decoder.decode(block, raw=True)]
        except HPACKError:
            # Its text repeats the peer's octets, which may be secrets.
            raise HeaderError("an invalid or oversized header block") from None
        self._contextless = decoder.max_allowed_table_size == decoder.header_table_size == 0
        return headers


def size_of(headers: Headers) -> int:
    """Bytes of a list as RFC 9113 §6.5.2 counts them."""
    return sum([len(name) + len(value) for name, value in headers]) + _FIELD_BYTES * len(headers)


def _static_names() -> dict[bytes, int]:
    names: dict[bytes, int] = {}
    for index, (name, _) in enumerate(HeaderTable.STATIC_TABLE, 1):
        names.setdefault(name, index)
    return names


_STATIC_FIELDS: dict[int, Field] = {
    0x80 | index: field for index, field in enumerate(HeaderTable.STATIC_TABLE, 1)
}
"""By the octet that stands for the whole field."""
_STATIC_NAMES: dict[int, bytes] = {
    index: name for index, (name, _) in enumerate(HeaderTable.STATIC_TABLE, 1)
}


def _read(block: bytes, list_bytes_max: int) -> Headers:
    """Read a block that may use no dynamic table."""
    headers: Headers = []
    position = size = 0
    end = len(block)
    counted = end * _EXPANSION_MAX > list_bytes_max
    try:
        while position < end:
            first = block[position]
            position += 1
            if first >= 0x80:
                field = _STATIC_FIELDS[first]
            else:
                if first >= 0x40:
                    # Literal "with indexing": a table of size 0 drops it at once (RFC 7541 §4.4).
                    # A name index of 63 and more would be a dynamic one.
                    index = first & 0x3F
                elif first >= 0x20:
                    if first != 0x20 or headers:
                        raise HeaderError("a table size that is not 0, or not ahead of the fields")
                    continue
                else:
                    index = first & 0x0F
                    if index == 0x0F:
                        index, position = _integer(block, position, index)
                if index:
                    name = _STATIC_NAMES[index]
                else:
                    length = block[position]
                    position += 1
                    if length < 0x7F:
                        name = block[position : position + length]
                        position += length
                    else:
                        name, position = _string(block, position, length)
                length = block[position]
                position += 1
                if length < 0x7F:
                    value = block[position : position + length]
                    position += length
                    if position > end:
                        raise HeaderError("a header block that ends within a field")
                else:
                    value, position = _string(block, position, length)
                field = (name, value)
            headers.append(field)
            if counted:
                size += len(field[0]) + len(field[1]) + _FIELD_BYTES
                if size > list_bytes_max:
                    raise HeaderError("an oversized header list")
    except LookupError:
        raise HeaderError("a header block with an unknown index or an end within a field") from None
    return headers


@lru_cache(maxsize=256)
def _read_remembered(block: bytes, list_bytes_max: int) -> tuple[Field, ...]:
    return tuple(_read(block, list_bytes_max))


def _integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    """The rest of an integer whose prefix is full (RFC 7541 §5.1), in at most five octets."""
    for shift in (0, 7, 14, 21, 28):
        octet = block[position]
        position += 1
        value += (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
    raise HeaderError("an integer of too many octets")


def _string(block: bytes, position: int, length: int) -> tuple[bytes, int]:
    """A string that is long or Huffman-coded; `length` is its first octet."""
    coded = length >= 0x80
    length &= 0x7F
    if length == 0x7F:
        length, position = _integer(block, position, length)
    end = position + length
    if end > len(block):
        raise HeaderError("a header block that ends within a field")
    text = block[position:end]
    if coded:
        try:
            text = _expand(text) if length <= 128 else decode_huffman(text)
        except HPACKError:
            raise HeaderError("an invalid Huffman code") from None
    return text, end


_expand = lru_cache(maxsize=1024)(decode_huffman)


# --- Rules of messages -------------------------------------------------------------------------

_PRINTABLE = bytes(range(0x20, 0x7F))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_FRAMING = frozenset(("te", "content-length"))
"""Fields that are checked by value and so must not be left out."""
_REQUEST_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))
_RESPONSE_PSEUDO = frozenset((":status",))
_NO_PSEUDO: frozenset[str] = frozenset()
_NAMES_MAX = 2048
_NAME_BYTES_MAX = 64
_BINARY = ""
"""Stands for every `-bin` name among keys, none of which becomes text."""
_LENGTH_DIGITS_MAX = 18


def check_request(headers: Headers) -> Request:
    """Check and sort a request's fields.

    Raises:
        MalformedError: they break RFC 9113 §8.2 or §8.3.
    """
    pseudo, fields = _sort(headers, _REQUEST_PSEUDO)
    try:
        method, scheme, path = pseudo[":method"], pseudo[":scheme"], pseudo[":path"]
    except KeyError:
        raise MalformedError("a request without a pseudo-header it needs") from None
    if not method or not scheme or not path:
        raise MalformedError("a request with an empty pseudo-header")
    pop = fields.pop
    return Request(
        method,
        scheme,
        path,
        pseudo.get(":authority") or fields.get("host", ""),
        pop("content-type", ""),
        pop("grpc-encoding", ""),
        pop("grpc-accept-encoding", ""),
        pop("grpc-timeout", None),
        _length(pop("content-length", None)),
        fields,
    )


def check_response(headers: Headers) -> Response:
    """Check and sort an answer's first fields, informational or final.

    Raises:
        MalformedError: they break RFC 9113 §8.2 or §8.3.
    """
    pseudo, fields = _sort(headers, _RESPONSE_PSEUDO)
    status = pseudo.get(":status", "")
    if len(status) != 3 or not status.isdecimal() or status < "100":
        raise MalformedError("a response without a valid status")
    pop = fields.pop
    return Response(
        int(status),
        pop("content-type", ""),
        pop("grpc-encoding", ""),
        _length(pop("content-length", None)),
        fields,
    )


def check_trailers(headers: Headers) -> None:
    """Check fields that follow a message.

    Raises:
        MalformedError: they break RFC 9113 §8.1 or §8.2.
    """
    _sort(headers, _NO_PSEUDO)


def parse_timeout(text: str) -> float:
    """Seconds of a `grpc-timeout`: one to eight digits and a unit.

    Raises:
        TimeoutFormatError: it is anything else.
    """
    digits, unit = text[:-1], text[-1:]
    scale = _UNITS_S.get(unit)
    if scale is None or not 1 <= len(digits) <= 8 or not (digits.isascii() and digits.isdecimal()):
        raise TimeoutFormatError("grpc-timeout must be 1 to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * scale


_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def _sort(headers: Headers, allowed: frozenset[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Pseudo-headers and other fields of a valid list."""
    if not headers:
        return {}, {}
    known = _known[allowed]
    try:
        keys = [known[name] for name, _ in headers]
    except KeyError:
        keys = [_learn(name, known, allowed) for name, _ in headers]
    # All values are looked at as one string, in which only the separators are not printable.
    joined = b"\r".join([value for _, value in headers])
    if (
        joined.translate(None, _PRINTABLE) == b"\r" * (len(keys) - 1)
        and b" \r" not in joined
        and b"\r " not in joined
        and joined[:1] != b" " != joined[-1:]
    ):
        texts = joined.decode("ascii").split("\r")
    else:
        keys, texts = _choose(keys, headers)
    pseudo: dict[str, str] = {}
    fields: dict[str, str] = {}
    pairs = zip(keys, texts, strict=True)
    for key, text in pairs:
        if key[:1] != ":":
            fields[key] = text
            fields.update(pairs)
            break
        if key in pseudo:
            raise MalformedError("a repeated pseudo-header")
        pseudo[key] = text
    if not allowed.isdisjoint(fields):
        raise MalformedError("a pseudo-header behind a field")
    if len(fields) + len(pseudo) != len(keys):
        _check_repeated(keys, texts)
    if fields.pop("te", "trailers") != "trailers":
        raise MalformedError("te other than trailers")
    fields.pop(_BINARY, None)
    return pseudo, fields


def _learn(name: bytes, known: dict[bytes, str], allowed: frozenset[str]) -> str:
    """The key for a name, which is remembered if it is valid."""
    key = known.get(name)
    if key is not None:
        return key
    if name[:1] == b":":
        key = name.decode("latin-1")
        if key not in allowed:
            raise MalformedError("an unknown pseudo-header, or one where none belongs")
    elif _NAME.fullmatch(name) is None:
        raise MalformedError("a field name with a character it must not have")
    elif name in _CONNECTION_SPECIFIC:
        raise MalformedError("a field that belongs to a connection")
    else:
        key = _BINARY if name.endswith(b"-bin") else name.decode("ascii")
    if len(name) <= _NAME_BYTES_MAX:
        if len(known) >= _NAMES_MAX:
            known.clear()
        known[name] = key
    return key


_known: dict[frozenset[str], dict[bytes, str]] = {
    _REQUEST_PSEUDO: {},
    _RESPONSE_PSEUDO: {},
    _NO_PSEUDO: {},
}
"""Names found valid, by the pseudo-headers that were allowed."""


def _choose(keys: list[str], headers: Headers) -> tuple[list[str], list[str]]:
    """Keys and texts of the values that are printable ASCII."""
    chosen: list[str] = []
    texts: list[str] = []
    for key, (_, value) in zip(keys, headers, strict=True):
        if b"\0" in value or b"\r" in value or b"\n" in value or value.strip(b" \t") != value:
            raise MalformedError("a field value with a character it must not have")
        if value.translate(None, _PRINTABLE):
            if key[:1] == ":" or key in _FRAMING:
                raise MalformedError("a field value with a character it must not have")
            continue
        chosen.append(key)
        texts.append(value.decode("ascii"))
    return chosen, texts


def _check_repeated(keys: list[str], texts: list[str]) -> None:
    for name in _FRAMING:
        values = {text for key, text in zip(keys, texts, strict=True) if key == name}
        if len(values) > 1:
            raise MalformedError("a field with two different values")


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > _LENGTH_DIGITS_MAX:
        raise MalformedError("an invalid content-length")
    return int(text)


# --- Writing ---------------------------------------------------------------------------------

_STATIC_INDEXES: dict[Field, bytes] = {
    field: bytes((octet,)) for octet, field in reversed(_STATIC_FIELDS.items())
}
_STATIC_NAME_INDEXES = _static_names()
_SENSITIVE = frozenset((b"authorization", b"proxy-authorization", b"cookie", b"set-cookie"))


def encode(headers: Iterable[Field]) -> bytes:
    """A block of any fields; valid at any time on any connection (after `NO_TABLE`). Credentials
    are marked as never to be indexed, also further on."""
    return b"".join(
        [
            _STATIC_INDEXES.get((name, value)) or _named(name) + _counted(value)
            for name, value in headers
        ]
    )


def _literal(name: bytes) -> bytes:
    kind = 0x10 if name in _SENSITIVE else 0x00
    index = _STATIC_NAME_INDEXES.get(name, 0)
    if not index:
        return bytes((kind,)) + _counted(name)
    if index < 0x0F:
        return bytes((kind | index,))
    return bytes((kind | 0x0F, index - 0x0F))


_named = lru_cache(maxsize=1024)(_literal)
"""The beginning of a literal field, up to its value."""


def _counted(text: bytes) -> bytes:
    """A string as it is, with its length."""
    length = len(text)
    if length < 0x7F:
        return _LENGTHS[length] + text
    head = bytearray((0x7F,))
    length -= 0x7F
    while length >= 0x80:
        head.append(0x80 | (length & 0x7F))
        length >>= 7
    head.append(length)
    return bytes(head) + text


_LENGTHS = [bytes((length,)) for length in range(0x7F)]


@lru_cache(maxsize=1024)
def request_block(path: str, authority: str, *, scheme: str) -> bytes:
    """What begins every request of ours: pseudo-headers, content type, te, user agent."""
    return encode(
        (
            (b":method", b"POST"),
            (b":scheme", scheme.encode("ascii")),
            (b":path", path.encode("ascii")),
            (b":authority", authority.encode("ascii")),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", USER_AGENT),
        )
    )


RESPONSE_BLOCK = encode(((b":status", b"200"), (b"content-type", b"application/grpc")))
"""What begins every answer of ours."""


def metadata_block(metadata: Iterable[tuple[str, str]]) -> bytes:
    """Text metadata as it follows other fields of a block. Blanks around values are dropped.

    Raises:
        ValueError: a name is not one of metadata's, or a value is not printable ASCII.
    """
    parts: list[bytes] = []
    for name, value in metadata:
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"the value of metadata {name!r} is not printable ASCII")
        text = value.strip(" ").encode("ascii")
        parts.append(_metadata_name(name))
        parts.append(_LENGTHS[len(text)] + text if len(text) < 0x7F else _counted(text))
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _metadata_name(name: str) -> bytes:
    octets = name.encode("ascii", "replace")
    if _NAME.fullmatch(octets) is None or octets in _RESERVED or name.endswith("-bin"):
        raise ValueError(f"{name!r} is not a name of text metadata")
    return _named(octets)


_RESERVED = _CONNECTION_SPECIFIC | {
    b"te",
    b"content-type",
    b"content-length",
    b"grpc-timeout",
    b"grpc-status",
    b"grpc-message",
}


def timeout_field(seconds: float) -> bytes:
    """`grpc-timeout`, rounded up to milliseconds (to seconds from 27 hours on); 0 only when
    nothing is left."""
    if not seconds > 0:
        return _timeout("0m")
    for unit, per_second in (("m", 1000.0), ("S", 1.0), ("M", 1 / 60), ("H", 1 / 3600)):
        if seconds * per_second <= 99_999_999:
            return _timeout(f"{math.ceil(seconds * per_second)}{unit}")
    return _timeout("99999999H")


def _timeout(text: str) -> bytes:
    return _TIMEOUT + _LENGTHS[len(text)] + text.encode("ascii")


_TIMEOUT = _named(b"grpc-timeout")


def trailers_block(
    code: int, message: str, details: bytes | None, metadata: Iterable[tuple[str, str]]
) -> bytes:
    """What ends a call. A message of more than 2048 bytes of UTF-8 is cut.

    Raises:
        ValueError: as `metadata_block`.
    """
    block = _STATUSES[code] if 0 <= code <= _CODE_MAX else _STATUSES[_CODE_UNKNOWN]
    if message:
        block += _MESSAGE + _counted(percent_encode(message))
    if details is not None:
        block += _DETAILS + _counted(base64.b64encode(details).rstrip(b"="))
    return block + metadata_block(metadata) if metadata else block


_STATUSES = [encode(((b"grpc-status", b"%d" % code),)) for code in range(_CODE_MAX + 1)]
_MESSAGE = _named(b"grpc-message")
_DETAILS = _named(b"grpc-status-details-bin")
_PLAIN = re.compile(r"[!-$&-~](?:[ -$&-~]*[!-$&-~])?")
_ESCAPES = [
    bytes((octet,)) if 0x20 <= octet < 0x7F and octet != 0x25 else b"%%%02X" % octet
    for octet in range(256)
]


def percent_encode(text: str) -> bytes:
    """`grpc-message` for a text: UTF-8, at most 2048 bytes of it, in which all but printable ASCII
    and blanks at the ends are escaped."""
    if len(text) <= _MESSAGE_BYTES_MAX and _PLAIN.fullmatch(text) is not None:
        return text.encode("ascii")
    octets = text[:_MESSAGE_BYTES_MAX].encode("utf-8", "replace")[:_MESSAGE_BYTES_MAX]
    whole = octets.decode("utf-8", "ignore").encode("utf-8")
    inner = whole.strip(b" ")
    if not inner:
        return b"%20" * len(whole)
    escaped = b"".join([_ESCAPES[octet] for octet in inner])
    ahead = len(whole) - len(whole.lstrip(b" "))
    behind = len(whole) - len(whole.rstrip(b" "))
    return b"%20" * ahead + escaped + b"%20" * behind


def percent_decode(value: bytes) -> str:
    """The text of a `grpc-message`; what is not an escape or not UTF-8 is kept or replaced."""
    if b"%" in value:
        value = unquote_to_bytes(value)
    return value.decode("utf-8", "replace")


_OWN = frozenset(
    (b"content-type", b"content-length", b"te", b"grpc-encoding", b"grpc-accept-encoding")
)
"""Fields of an answer of trailers alone that are not metadata."""


def parse_trailers(headers: Headers) -> Trailers:
    """How a call ended, by its trailers or by the only fields of its answer; never fails."""
    code: int | None = None
    message = ""
    details: bytes | None = None
    metadata: list[tuple[str, str]] = []
    for name, value in headers:
        if name == b"grpc-status":
            code = _CODES.get(value, _CODE_UNKNOWN)
        elif name == b"grpc-message":
            message = percent_decode(value)
        elif name == b"grpc-status-details-bin":
            details = _from_base64(value)
        elif name[:1] != b":" and name not in _OWN and not name.endswith(b"-bin"):
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable():
                metadata.append((name.decode("latin-1"), text))
    return Trailers(code, message, details, tuple(metadata))


_CODES = {b"%d" % code: code for code in range(_CODE_MAX + 1)}


def _from_base64(value: bytes) -> bytes | None:
    bare = value.rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except ValueError:
        return None
