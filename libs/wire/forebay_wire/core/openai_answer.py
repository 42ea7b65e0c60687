"""Reads CallOpenAIResponse messages in place, without making an object of each.

The usual message is `body` (field 2), maybe behind `content_type` (field 1) and before `tokens` and
`usage`. Field numbers only ever grow in what our runners send; anything else is left to protobuf.
"""

from __future__ import annotations

from struct import Struct

from forebay.inference.v1 import inference_service_pb2 as inference

from forebay_wire.core.messages import PREFIX_BYTES

_BODY = 0x12
# A message's prefix, its first field's tag, and up to two octets of that field's length.
_USUAL = Struct(">BIBBB")
_usual = _USUAL.unpack_from
_prefix = Struct(">BI").unpack_from


def sole_body(data: bytes, start: int, end: int) -> bytes | None:
    """The `body` of the one message that fills `data[start:end]`, prefix included.

    This is the token path: None says only that the payload is less usual than that.
    """
    if end - start < _USUAL.size:
        return None
    compressed, length, tag, low, high = _usual(data, start)
    if compressed or tag != _BODY or start + 5 + length != end:
        return None
    if low < 0x80:
        at = start + 7
        stop = at + low
    elif high < 0x80:
        # Two octets of length reach to 16 KiB, which a streamed part hardly ever exceeds.
        at = start + 8
        stop = at + low - 0x80 + (high << 7)
    else:
        return None
    # Behind the body come `tokens` and `usage`; a second body would replace the first.
    if stop == end or (stop < end and data[stop] > _BODY):
        return data[at:stop]
    return None


def bodies_of(data: bytes, start: int, end: int) -> tuple[list[bytes], int]:
    """The bodies of the whole messages at the beginning of `data[start:end]`, and where the rest,
    which is cut or compressed, starts. Empty bodies are left out.

    Raises:
        google.protobuf.message.DecodeError: one is no message.
    """
    bodies: list[bytes] = []
    while end - start >= PREFIX_BYTES:
        body = None
        if end - start >= _USUAL.size:
            compressed, length, tag, low, high = _usual(data, start)
            stop = start + PREFIX_BYTES + length
            if compressed or stop > end:
                break
            if tag == _BODY:
                at, size = (start + 7, low) if low < 0x80 else (start + 8, low - 0x80 + (high << 7))
                behind = at + size
                is_short = low < 0x80 or high < 0x80
                if is_short and (behind == stop or (behind < stop and data[behind] > _BODY)):
                    body = data[at:behind]
        else:
            compressed, length = _prefix(data, start)
            stop = start + PREFIX_BYTES + length
            if compressed or stop > end:
                break
        if body is None:
            body = body_of(data, start + PREFIX_BYTES, stop)
        if body:
            bodies.append(body)
        start = stop
    return bodies, start


def body_of(data: bytes, start: int, end: int) -> bytes:
    """The `body` of the message in `data[start:end]`.

    Raises:
        google.protobuf.message.DecodeError: it is no message.
    """
    if end - start > 2 and data[start] == _BODY:
        length = data[start + 1]
        at = start + 2
        if length >= 0x80:
            if data[at] >= 0x80:
                return _parse(data, start, end).body
            length += (data[at] << 7) - 0x80
            at += 1
        stop = at + length
        if stop == end or (stop < end and data[stop] > _BODY):
            return data[at:stop]
    return _parse(data, start, end).body


def first_of(data: bytes, start: int, end: int) -> tuple[str, bytes]:
    """`content_type` and `body` of the message in `data[start:end]`.

    Raises:
        google.protobuf.message.DecodeError: it is no message.
    """
    message = _parse(data, start, end)
    return message.content_type, message.body


def _parse(data: bytes, start: int, end: int) -> inference.CallOpenAIResponse:
    return inference.CallOpenAIResponse.FromString(data[start:end])
