"""Tells another replica where an answer goes on that its first one did not finish.

The continuation is the caller's own request with a `ResumePoint`: the tokens, text and events that
were delivered, in the order they came. Messages are only decoded here, after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec
from forebay.inference.v1 import inference_service_pb2 as pb
from google.protobuf.message import DecodeError

_EVENTS = "text/event-stream"
_DATA = b"data: {"


class Unresumable(StrEnum):
    """Why an answer cannot be resumed."""

    COMPLETE = "complete"
    """Nothing is missing but the status: the last message, with the usage, was delivered."""
    NOT_STREAMED = "not_streamed"
    """Its one document is delivered whole or not at all."""
    NO_TOKENS = "no_tokens"
    """Text was delivered, but not the tokens that it is made of."""
    TOO_LARGE = "too_large"
    """The continuation would exceed what a runner takes as one message."""
    UNREADABLE = "unreadable"
    """A message that was delivered is none of the contract's."""


Continuation: TypeAlias = bytes | Unresumable


def continue_generate(
    message: bytes, delivered: Sequence[bytes], *, most_bytes: int
) -> Continuation:
    """Return the encoded GenerateRequest that goes on with an answer, or why there is none.

    Where nothing but progress was delivered, that is the message itself.

    Args:
        message: the encoded request. One that has a resume point itself is taken up after it.
        delivered: the encoded GenerateResponse messages that its caller got, in order.
        most_bytes: a longer continuation is not made.
    """
    try:
        request = pb.GenerateRequest.FromString(message)
        parts = [pb.GenerateResponse.FromString(part) for part in delivered]
    except DecodeError:
        return Unresumable.UNREADABLE
    parts = [part for part in parts if not part.HasField("progress")]
    if not parts:
        return message
    if any(part.finish_reason or part.HasField("usage") for part in parts):
        return Unresumable.COMPLETE
    point = request.resume
    if parts[0].HasField("header"):
        point.header.CopyFrom(parts[0].header)
    point.text += "".join([part.text_delta for part in parts])
    tokens = point.tokens[0] if point.tokens else point.tokens.add()
    for part in parts:
        tokens.token_ids.extend(part.token_ids)
    if point.text and not tokens.token_ids:
        return Unresumable.NO_TOKENS
    return _encoded(request, most_bytes)


def continue_openai(message: bytes, delivered: Sequence[bytes], *, most_bytes: int) -> Continuation:
    """Return the encoded CallOpenAIRequest that goes on with an answer, or why there is none.

    Arguments as of `continue_generate`, with CallOpenAIResponse messages.
    """
    try:
        request = pb.CallOpenAIRequest.FromString(message)
        parts = [pb.CallOpenAIResponse.FromString(part) for part in delivered]
    except DecodeError:
        return Unresumable.UNREADABLE
    parts = [part for part in parts if not part.HasField("progress")]
    if not parts:
        return message
    if any(part.HasField("usage") for part in parts):
        return Unresumable.COMPLETE
    point = request.resume
    if not point.events and not parts[0].content_type.startswith(_EVENTS):
        return Unresumable.NOT_STREAMED
    point.events += b"".join([part.body for part in parts])
    grown = {choice.index: choice for choice in point.tokens}
    for part in parts:
        for more in part.tokens:
            choice = grown.get(more.index)
            if choice is None:
                choice = grown[more.index] = point.tokens.add(index=more.index)
            choice.token_ids.extend(more.token_ids)
    if not point.header.request_id and not _read_head(point):
        return Unresumable.UNREADABLE
    return _encoded(request, most_bytes)


def delivered_usage(delivered: Sequence[bytes], *, is_openai: bool) -> pb.Usage:
    """Return the usage that the last message of a `COMPLETE` answer holds."""
    kind = pb.CallOpenAIResponse if is_openai else pb.GenerateResponse
    usage: pb.Usage = kind.FromString(delivered[-1]).usage
    return usage


class _Event(msgspec.Struct, gc=False):
    """What every event of an answer begins with."""

    id: str
    created: int


_decode_event = msgspec.json.Decoder(_Event).decode


def _read_head(point: pb.ResumePoint) -> bool:
    """Take the answer's id and time of creation from its first event."""
    events = point.events
    at = events.find(_DATA)
    if at < 0:
        return False
    try:
        event = _decode_event(events[at + len(_DATA) - 1 : events.find(b"\n", at)])
    except msgspec.DecodeError:
        return False
    point.header.request_id = event.id
    point.header.created_unix_s = event.created
    return True


def _encoded(request: pb.GenerateRequest | pb.CallOpenAIRequest, most_bytes: int) -> Continuation:
    if request.ByteSize() > most_bytes:
        return Unresumable.TOO_LARGE
    return request.SerializeToString()
