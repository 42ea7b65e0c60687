"""One HTTP request and the one way to answer it, whatever the version of HTTP underneath."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeAlias

from forebay_common.errors import ForebayError, Reason
from forebay_common.metadata import Metadata

from forebay_wire.core.http1 import JSON, RequestHead


class Listener(Protocol):
    """Whoever answers an exchange step by step, and must hear of its client."""

    def left(self) -> None:
        """The client is gone; the exchange takes nothing any more."""

    def hold(self) -> None:
        """The client does not read as fast as it is written to: send little more."""

    def resume(self) -> None:
        """The client has caught up."""


class Exchange(Protocol):
    """A request with its body, to be answered exactly once.

    An answer is either whole (`answer`, `fail`) or in parts: `begin`, any number of `write`, then
    `end` or `fail`. Once the client is gone, all of them do nothing.
    """

    head: RequestHead
    body: bytes
    request_id: str
    listener: Listener | None
    headers: Metadata
    """Sent with the answer, whatever it becomes."""

    def answer(
        self,
        body: bytes,
        content_type: str = JSON,
        *,
        status: int = 200,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Send a whole answer."""

    def begin(self, content_type: str) -> None:
        """Promise an answer in parts. Its head goes out with the first part."""

    def write(self, part: bytes) -> None:
        """Send a part of the answer, which is not empty."""

    def end(self) -> None:
        """End an answer in parts."""

    def fail(self, error: ForebayError) -> None:
        """End with an error: as the answer, or as the last event of one that has begun."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a protocol over HTTP writes an error."""

    document: Callable[[ForebayError], bytes]
    """The JSON of an answer that is an error."""
    event: Callable[[ForebayError], bytes]
    """The last event of an answer that failed after it had begun."""


def _openai_document(error: ForebayError) -> bytes:
    return json.dumps(error.openai_body()).encode()


def _openai_event(error: ForebayError) -> bytes:
    return b"data: %b\n\n" % _openai_document(error)


OPENAI_ERRORS = ErrorShape(_openai_document, _openai_event)


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """What is served under a method and a path."""

    answer: Callable[[Exchange], Awaitable[None] | None]
    """Answers, now or later, or returns an awaitable that does. A ForebayError that it raises
    becomes the answer; any other exception is logged and becomes INTERNAL."""
    is_work: bool = False
    """Refused with DRAINING while the process ends, and waited for until then."""
    errors: ErrorShape = OPENAI_ERRORS


Find: TypeAlias = Callable[[str, str], Endpoint]
"""Gives the endpoint for a method and a path, or raises ForebayError."""


class NotAllowedError(ForebayError):
    """A path is not served under this method."""

    def __init__(self, allowed: str) -> None:
        """`allowed` lists the methods that are served."""
        super().__init__(Reason.METHOD_NOT_ALLOWED, f"This path takes {allowed} only.")
        self.allowed = allowed


def answer_json(exchange: Exchange, document: Any, *, status: int = 200) -> None:
    """Answer with a JSON document."""
    exchange.answer(json.dumps(document).encode(), status=status)


def error_headers(error: ForebayError) -> list[tuple[str, str]]:
    """The headers that go with an error's answer."""
    headers = []
    retry_after = error.retry_after_header()
    if retry_after is not None:
        headers.append(("Retry-After", retry_after))
    headers += error.answer
    if isinstance(error, NotAllowedError):
        headers.append(("Allow", error.allowed))
    return headers
