"""Reads CallOpenAIResponse messages in place, without making an object of each.

The usual message is `body` (field 2), maybe behind `content_type` (field 1) and before `tokens` and
`usage`. Field numbers only ever grow in what our runners send; anything else is left to protobuf.
"""

from __future__ import annotations

from struct import Struct

from forebay.inference.v1 import inference_service_pb2 as inference

_BODY = 0x12
# A message's prefix, its first field's tag, and up to two octets of that field's length.
_USUAL = Struct(">BIBBB")
_usual = _USUAL.unpack_from


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
