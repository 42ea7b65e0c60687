"""Turns a relayed CallOpenAI answer into an HTTP one, without ever building or reading JSON.

The first message's content type decides: server-sent events go out as they come, all of one turn's
in one write; anything else is kept until it is whole, so that a late failure still has its status.
"""

from __future__ import annotations

import logging
from struct import Struct
from typing import Protocol

from forebay_common.errors import ForebayError, Reason
from forebay_common.metadata import Metadata
from google.protobuf.message import DecodeError

from forebay_wire.core.http1 import JSON
from forebay_wire.core.messages import PREFIX_BYTES, MessageError, MessageReader
from forebay_wire.core.openai_answer import bodies_of, body_of, first_of, sole_body
from forebay_wire.exchange import Exchange
from forebay_wire.policy import Head

_log = logging.getLogger(__name__)
_SSE = "text/event-stream"
EVENTS = "text/event-stream; charset=utf-8"
_unpack = Struct(">BI").unpack_from


class Call(Protocol):
    """What is needed of `forebay_wire.relay.Call`."""

    @property
    def answer(self) -> Metadata:
        """Headers of the answer."""

    def cancel(self) -> None:
        """The client left."""

    def hold(self) -> None:
        """The client takes no more now."""

    def resume(self) -> None:
        """The client takes more again."""


class Relays(Protocol):
    """What is needed of `forebay_wire.relay.Relay`."""

    def call(self, head: Head, message: bytes, caller: OpenAICaller) -> Call:
        """Start a request; the caller hears of it later, never before this returns."""


def relay_openai(
    relay: Relays, exchange: Exchange, head: Head, message: bytes, *, answer_bytes: int
) -> None:
    """Answer an exchange with what a relay gives.

    Args:
        relay: where the request goes.
        exchange: who asked.
        head: the request.
        message: its encoded CallOpenAIRequest.
        answer_bytes: largest answer that is kept until it is whole.
    """
    # The message holds it.
    exchange.body = b""
    caller = OpenAICaller(exchange, answer_bytes)
    head.tell = caller.tell
    caller.call = relay.call(head, message, caller)
    exchange.listener = caller


class OpenAICaller:
    """The relay's caller, and the exchange's listener, of one request."""

    __slots__ = (
        "_content_type",
        "_exchange",
        "_has_begun",
        "_is_told",
        "_is_usual",
        "_kept",
        "_kept_bytes",
        "_limit",
        "_reader",
        "_streams",
        "call",
    )

    call: Call
    """Set by whoever made the call; gone when it has ended, so that the two are freed at once."""

    def __init__(self, exchange: Exchange, answer_bytes: int) -> None:
        self._exchange = exchange
        self._limit = answer_bytes
        self._reader: MessageReader | None = None
        self._is_usual = False
        """It streams, and no part of a message waits in the reader."""
        self._has_begun = False
        self._is_told = False
        """The client has been told what it waits for."""
        self._streams = False
        self._content_type = JSON
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def begin(self, call: Call) -> None:
        """The head goes out with the first event."""
        self._exchange.headers = call.answer

    def tell(self, model_version: str, phase: str, waited_s: float) -> None:
        """Tell a client that reads a stream what it waits for, in a comment, which readers of
        events skip. The answer has begun by it: a failure is its last event then."""
        if self._has_begun:
            return
        if not self._is_told:
            self._is_told = True
            self._exchange.begin(EVENTS)
        line = f": forebay waiting model={model_version} phase={phase} waited_s={waited_s:.1f}\n\n"
        self._exchange.write(line.encode("utf-8", "replace"))

    def forward(self, data: bytes, start: int, end: int) -> None:
        """Pass on what `data[start:end]` completes."""
        if self._is_usual:
            body = sole_body(data, start, end)
            if body is not None:
                if body:
                    self._exchange.write(body)
                return
        try:
            if not self._has_begun and self._reader is None:
                start = self._take_first(data, start, end)
            if self._is_usual:
                bodies, start = bodies_of(data, start, end)
                if bodies:
                    self._exchange.write(b"".join(bodies))
            if start < end:
                self._take(data, start, end)
        except (MessageError, DecodeError):
            self._give_up()

    def finish(self, trailing: Metadata) -> None:
        """End the answer."""
        if self._reader is not None and not self._reader.at_boundary:
            self._fail_here("The replica's answer is cut short.")
        elif not self._has_begun:
            self._fail_here("The replica gave no answer.")
        elif self._streams:
            self._exchange.end()
        else:
            self._exchange.answer(b"".join(self._kept), self._content_type)
        del self.call

    def fail(self, error: ForebayError, trailing: Metadata) -> None:
        """End the answer with an error: as the answer, or as its last event."""
        self._exchange.fail(error)
        del self.call

    def left(self) -> None:
        """See `forebay_wire.exchange.Listener`."""
        self.call.cancel()
        del self.call

    def hold(self) -> None:
        """See `forebay_wire.exchange.Listener`."""
        self.call.hold()

    def resume(self) -> None:
        """See `forebay_wire.exchange.Listener`."""
        self.call.resume()

    def _take_first(self, data: bytes, start: int, end: int) -> int:
        """Take the first message, if it is whole; answers where the rest starts."""
        if end - start < PREFIX_BYTES:
            return start
        flag, length = _unpack(data, start)
        stop: int = start + PREFIX_BYTES + length
        if flag or stop > end:
            return start
        self._keep(self._body_of(False, data[start + PREFIX_BYTES : stop]))
        self._is_usual = self._streams
        return stop

    def _take(self, data: bytes, start: int, end: int) -> None:
        """The general way: messages that are cut anywhere, several at once, and the first one."""
        if self._reader is None:
            self._reader = MessageReader(self._limit)
        parts = [self._body_of(*message) for message in self._reader.feed(data, start, end)]
        self._is_usual = self._streams and self._reader.at_boundary
        self._keep(b"".join(parts))

    def _keep(self, part: bytes) -> None:
        """Write a part of the answer, or keep it until all is there."""
        if not part:
            return
        if self._streams:
            self._exchange.write(part)
            return
        self._kept_bytes += len(part)
        if self._kept_bytes > self._limit:
            self._give_up()
        else:
            self._kept.append(part)

    def _body_of(self, is_compressed: bool, message: bytes) -> bytes:
        if is_compressed:
            # We asked for no compression.
            raise MessageError("a compressed message")
        if self._has_begun:
            return body_of(message, 0, len(message))
        self._has_begun = True
        content_type, body = first_of(message, 0, len(message))
        self._content_type = content_type or JSON
        self._streams = content_type.startswith(_SSE)
        if self._streams and not self._is_told:
            self._exchange.begin(content_type)
        return body

    def _give_up(self) -> None:
        _log.error("a replica's answer could not be read or is too large")
        self.call.cancel()
        self._fail_here("The replica's answer cannot be passed on.")
        del self.call

    def _fail_here(self, message: str) -> None:
        self._exchange.fail(ForebayError(Reason.INTERNAL, message))
