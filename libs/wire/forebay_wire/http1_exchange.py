"""One request of an HTTP/1.1 connection, and how its answer is written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Protocol

from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason

from forebay_wire.core import http1 as core
from forebay_wire.core.cors import Cors
from forebay_wire.exchange import OPENAI_ERRORS, Endpoint, Listener, error_headers

_log = logging.getLogger(__name__)


class Work(Protocol):
    """What an exchange needs of its server."""

    limits: core.HttpLimits
    writer: core.Writer
    cors: Cors | None
    kept_bytes: int
    """Of all bodies whose requests are not answered."""

    @property
    def draining(self) -> bool:
        """Whether the process ends."""

    def date(self) -> bytes:
        """The time for a `Date` header, with the end of the head behind it."""

    def began_work(self, exchange: Http1Exchange) -> None:
        """An endpoint that a drain waits for has taken up an exchange."""

    def ended_work(self, exchange: Http1Exchange) -> None:
        """That exchange is answered, or its client is gone."""


class Carrier(Protocol):
    """What an exchange needs of its connection."""

    @property
    def front(self) -> Work:
        """The server."""

    def ends_with(self, exchange: Http1Exchange) -> bool:
        """Whether the connection ends with this exchange's answer."""

    def write(self, data: bytes) -> None:
        """Send bytes of the current exchange's answer."""

    def flush_later(self) -> None:
        """Take what the current exchange has unsent before the loop waits again."""

    def answered(self) -> None:
        """The current exchange's answer is written."""


class Http1Exchange:
    """See `forebay_wire.exchange.Exchange`."""

    __slots__ = (
        "_connection",
        "_first",
        "_is_chunked",
        "_unsent",
        "body",
        "closes",
        "endpoint",
        "has_begun",
        "head",
        "headers",
        "is_answered",
        "is_asked",
        "is_complete",
        "is_started",
        "kept_bytes",
        "listener",
        "parts",
        "refusal",
        "request_id",
        "size",
        "task",
    )

    def __init__(self, connection: Carrier, head: core.RequestHead | None) -> None:
        """`head` is None for what could not be read as a request."""
        self._connection = connection
        self._first = b""
        """The head of an answer in parts, until it is sent."""
        self._unsent: list[bytes] = []
        self._is_chunked = True
        self.head: core.RequestHead = head if head is not None else _NO_HEAD
        self.request_id = md.request_id_from(self.head.text(b"x-request-id"))
        self.body = b""
        self.parts: list[bytes] = []
        self.size = 0
        """Of the body so far, in bytes."""
        self.kept_bytes = 0
        """Of them, those that count as kept."""
        self.listener: Listener | None = None
        self.endpoint: Endpoint | None = None
        self.refusal: ForebayError | None = None
        self.task: asyncio.Task[None] | None = None
        self.closes = False
        """The connection ends with this answer."""
        self.is_asked = False
        """The client was told to send the body."""
        self.is_complete = False
        """The whole request is read."""
        self.headers: md.Metadata = ()
        self.is_started = False
        self.has_begun = False
        self.is_answered = False

    def answer(
        self,
        body: bytes,
        content_type: str = core.JSON,
        *,
        status: int = 200,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        """See `Exchange`."""
        if self.is_answered:
            return
        if self.headers:
            headers = (*self.headers, *headers)
        connection, front = self._connection, self._connection.front
        if front.cors is not None:
            headers = (*front.cors.answer(self.head), *headers)
        self.closes = connection.ends_with(self)
        option = "close" if self.closes else "keep-alive" if self.head.is_http_1_0 else ""
        head = front.writer.whole(
            status,
            content_type,
            len(body),
            date=front.date(),
            request_id=self.request_id,
            connection=option,
            extra=headers,
        )
        if self.head.method == "HEAD":
            connection.write(head)
        else:
            connection.write(head)
            connection.write(body)
        self._finish()

    def begin(self, content_type: str) -> None:
        """See `Exchange`."""
        if self.is_answered:
            return
        front, headers = self._connection.front, self.headers
        if front.cors is not None:
            headers = (*front.cors.answer(self.head), *headers)
        self.has_begun = True
        self._is_chunked = not self.head.is_http_1_0
        self.closes = self._connection.ends_with(self) or not self._is_chunked
        self._first = front.writer.stream(
            content_type,
            date=front.date(),
            request_id=self.request_id,
            chunked=self._is_chunked,
            closes=self.closes,
            extra=headers,
        )

    def write(self, part: bytes) -> None:
        """See `Exchange`."""
        if self.is_answered:
            return
        unsent = self._unsent
        if not unsent:
            self._connection.flush_later()
        unsent.append(part)

    def take_unsent(self) -> bytes:
        """What was written since this was asked last, as it goes over the wire."""
        unsent = self._unsent
        if not unsent:
            return b""
        part = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if not self._is_chunked:
            chunk = part
        elif len(part) < core.CHUNKS_AT_HAND:
            chunk = b"".join((core.CHUNK_HEADS[len(part)], part, b"\r\n"))
        else:
            chunk = b"%x\r\n%b\r\n" % (len(part), part)
        if self._first:
            chunk, self._first = self._first + chunk, b""
        return chunk

    def end(self) -> None:
        """See `Exchange`."""
        if self.is_answered:
            return
        last = core.LAST_CHUNK if self._is_chunked else b""
        self._connection.write(self.take_unsent() + self._first + last)
        self._finish()

    def fail(self, error: ForebayError) -> None:
        """See `Exchange`."""
        shape = OPENAI_ERRORS if self.endpoint is None else self.endpoint.errors
        if self.has_begun:
            self.write(shape.event(error))
            self.end()
            return
        self.answer(shape.document(error), status=error.status.http, headers=error_headers(error))

    def cut(self, error: ForebayError) -> None:
        """Take the work away from whoever does it, and end with an error."""
        self._let_go()
        self.fail(error)

    def release(self) -> None:
        """Give the body's room back."""
        self.parts = []
        self.body = b""
        self._connection.front.kept_bytes -= self.kept_bytes
        self.kept_bytes = 0

    def abandon(self) -> None:
        """The client is gone."""
        self.release()
        if self.is_answered:
            return
        self.is_answered = True
        self._let_go()
        self._end_work()

    def _let_go(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.left()
        if self.task is not None:
            self.task.cancel()

    def _finish(self) -> None:
        self.is_answered = True
        self.listener = None
        self.release()
        self._end_work()
        self._connection.answered()

    def _end_work(self) -> None:
        if self.endpoint is not None and self.endpoint.is_work:
            self._connection.front.ended_work(self)

    def start(self) -> None:
        """Answer by the endpoint, or with the refusal."""
        self.is_started = True
        if self.refusal is not None:
            self.fail(self.refusal)
            return
        try:
            assert self.endpoint is not None, "what is not refused is served"
            front = self._connection.front
            self._assemble(front.limits)
            if self.endpoint.is_work:
                if front.draining:
                    raise draining()
                front.began_work(self)
            later = self.endpoint.answer(self)
            if later is not None:
                self.task = asyncio.ensure_future(_finish(later))
                self.task.add_done_callback(self._task_ended)
        except Exception as error:
            self._fail_with(error)

    def _assemble(self, limits: core.HttpLimits) -> None:
        parts = self.parts
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.parts = []
        encoding = self.head.headers.get(b"content-encoding")
        if encoding is not None:
            self.body = core.decode_body(self.body, encoding, limits)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        if not isinstance(error, ForebayError):
            _log.error("unexpected error in an HTTP exchange", exc_info=error)
            error = ForebayError(Reason.INTERNAL, "An unexpected error happened here.")
        self.fail(error)


async def _finish(later: Awaitable[None]) -> None:
    await later


def draining() -> ForebayError:
    """The refusal of a process that ends."""
    return ForebayError(Reason.DRAINING, "This process is stopping; call another.", retry_after_s=1)


_NO_HEAD = core.RequestHead("", "", {}, 0, is_http_1_0=False, keeps_alive=False, expects=False)
