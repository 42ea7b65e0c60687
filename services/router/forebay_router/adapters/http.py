"""An HTTP/1.1 server whose every answer has OpenAI's shape, also where the request was no HTTP.

Drain: new requests are refused with DRAINING while those in flight end; what is left after the
grace is cut, and a stream that is cut says so in its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason

_log = logging.getLogger(__name__)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# After the grace, what was cut has this long to write its last event.
_LAST_WORDS_S = 1.0
# How much of a refused body is read, so that the client sees the refusal instead of a reset.
_LINGER_S = 2.0
SSE = "text/event-stream"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a client may make large or slow."""

    body_bytes: int
    header_bytes: int
    headers: int
    body_read_s: float
    slow_reader_s: float
    idle_s: float


class Call:
    """One request, and the one way to answer it."""

    def __init__(self, request: web.BaseRequest, limits: Limits) -> None:
        self.request = request
        self.request_id = md.request_id_from(request.headers.get(md.REQUEST_ID))
        self._limits = limits
        self._response: web.StreamResponse | None = None

    async def read_body(self) -> bytes:
        """The whole body.

        Raises:
            ForebayError: it is too large, too slow, or not as its headers say.
        """
        limit = self._limits.body_bytes
        too_large = ForebayError(
            Reason.BODY_TOO_LARGE, f"The body is larger than the {limit} bytes allowed."
        )
        length = self.request.content_length
        if length is not None and length > limit:
            raise too_large
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await self.request.writer.write(_CONTINUE)
            # Not part of the answer: an error may still be sent instead of one.
            self.request.writer.output_size = 0
        try:
            async with asyncio.timeout(self._limits.body_read_s):
                return await self.request.read()
        except TimeoutError:
            message = "The body did not arrive in time."
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except web.RequestPayloadError:
            message = "The body is not as its headers say."
        raise ForebayError(Reason.INVALID_ARGUMENT, message)

    def json(self, document: Any, *, status: int = 200) -> web.StreamResponse:
        """A JSON answer."""
        return self.whole(json.dumps(document).encode(), "application/json", status=status)

    def whole(self, body: bytes, content_type: str, *, status: int = 200) -> web.StreamResponse:
        """An answer of ready-made bytes."""
        headers = {**self._headers(), "Content-Type": content_type}
        return web.Response(body=body, status=status, headers=headers)

    def refuse(self, error: ForebayError, *, allow: str | None = None) -> web.StreamResponse:
        """The answer to a request that was refused or failed, with its `Allow` header."""
        headers = self._headers()
        if allow is not None:
            headers["Allow"] = allow
        return _error_response(error, headers)

    async def fail(self, error: ForebayError) -> web.StreamResponse:
        """End with an error: as the answer, or as the last event of one that has begun."""
        if self._response is None:
            return self.refuse(error)
        await self.write(f"data: {json.dumps(error.openai_body())}\n\n".encode())
        return await self.end_stream()

    async def begin_stream(self, content_type: str) -> None:
        """Send the answer's head."""
        response = web.StreamResponse(
            headers={
                **self._headers(),
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(self.request)
        self._response = response

    async def write(self, part: bytes) -> None:
        """Send a part of the answer.

        Raises:
            ConnectionError: the client is gone, or left a full buffer unread for too long.
        """
        assert self._response is not None, "the head comes first"
        try:
            async with asyncio.timeout(self._limits.slow_reader_s):
                await self._response.write(part)
        except TimeoutError:
            raise ConnectionError("the client does not read") from None

    async def end_stream(self) -> web.StreamResponse:
        """End the answer."""
        assert self._response is not None, "the head comes first"
        await self._response.write_eof()
        return self._response

    def hang_up(self) -> web.StreamResponse:
        """Close the connection under a client that is gone or does not read."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return self._response or web.Response(status=499)

    def _headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.request_id, "Server": "forebay"}


Answer = Callable[[Call], Awaitable[web.StreamResponse]]
Find = Callable[[str, str], Answer]


class HttpServer:
    """Serves what `find` gives for a method and a path."""

    def __init__(self, find: Find, limits: Limits) -> None:
        """`find` raises ForebayError where nothing is served."""
        self._find = find
        self._limits = limits
        self._server = _Server(self._serve, limits)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_LAST_WORDS_S)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._cutting = False

    @property
    def draining(self) -> bool:
        """Whether requests are refused because the process ends."""
        return self._draining

    async def listen(self, address: str) -> str:
        """Bind, start, and return the address that was bound.

        Raises:
            OSError: the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        await self._runner.setup()
        await web.TCPSite(self._runner, host.strip("[]"), int(port), backlog=1024).start()
        bound_port = self._runner.addresses[0][1]
        return f"{host}:{bound_port}"

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let what is in flight end for up to `grace_s`, stop."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._cutting = True
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _LAST_WORDS_S)
        await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def work(self) -> AsyncGenerator[None, None]:
        """Wraps what a drain waits for.

        Raises:
            ForebayError: DRAINING, at the beginning or when the grace has passed.
        """
        if self._draining:
            raise _draining()
        task = asyncio.current_task()
        assert task is not None, "work is done in a task"
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            task.uncancel()
            raise _draining() from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(request, self._limits)
        try:
            try:
                return await self._find(request.method, request.path)(call)
            except ForebayError as refusal:
                return await call.fail(refusal)
            except ConnectionError:
                raise
            except Exception:
                _log.exception("unexpected error in %s", request.method)
                return await call.fail(_unexpected())
        except ConnectionError:
            return call.hang_up()


class _Server(web.Server):
    def __init__(
        self,
        serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: Limits,
    ) -> None:
        super().__init__(serve, request_factory=self._make, handler_cancellation=True)
        self._limits = limits

    def __call__(self) -> RequestHandler:
        return _Protocol(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is how it is turned off
            keepalive_timeout=self._limits.idle_s,
            max_line_size=self._limits.header_bytes,
            max_field_size=self._limits.header_bytes,
            max_headers=self._limits.headers,
            lingering_time=_LINGER_S,
        )

    def _make(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=self._limits.body_bytes
        )


class _Protocol(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed as a request, and close the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if status >= 500:
            _log.error("unexpected error in an HTTP exchange", exc_info=exc)
            error = _unexpected()
        else:
            error = ForebayError(Reason.INVALID_ARGUMENT, self._what_is_wrong(exc))
        headers = {"X-Request-Id": md.request_id_from(None), "Server": "forebay"}
        response = _error_response(error, headers)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what went wrong here; what is left of a body that was refused is the client's."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _what_is_wrong(self, exc: BaseException | None) -> str:
        if isinstance(exc, LineTooLong):
            return "A header or the URL is too long."
        # aiohttp has no type for it; other messages of its own may repeat the client's bytes.
        if isinstance(exc, BadHttpMessage) and exc.message == "Too many headers received":
            return f"There are more than {self.max_headers} headers."
        return "This is not a valid HTTP request."


def _error_response(error: ForebayError, headers: Mapping[str, str]) -> web.Response:
    retry_after = error.retry_after_header()
    return web.Response(
        body=json.dumps(error.openai_body()).encode(),
        status=error.status.http,
        headers={
            **headers,
            "Content-Type": "application/json",
            **({"Retry-After": retry_after} if retry_after is not None else {}),
        },
    )


def _unexpected() -> ForebayError:
    return ForebayError(Reason.INTERNAL, "An unexpected error happened here.")


def _draining() -> ForebayError:
    return ForebayError(Reason.DRAINING, "This process is stopping; call another.", retry_after_s=1)
