"""A gRPC server: relays, and grpcio's own generated servicers, on one port, with health,
reflection and an orderly end.

Each call ends with exactly one status. A fault of one call, one message or one peer stays its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, to_trailers
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from forebay_wire.core.frames import ErrorCode
from forebay_wire.core.headers import (
    RESPONSE_BLOCK,
    Headers,
    MalformedError,
    Request,
    TimeoutFormatError,
    check_request,
    check_trailers,
    encode,
    metadata_block,
    trailers_block,
)
from forebay_wire.core.limits import Limits
from forebay_wire.core.messages import (
    CorruptError,
    MessageError,
    MessageReader,
    TooLargeError,
    UnsupportedError,
    decompress,
    frame,
)
from forebay_wire.core.stream import Budget, Stream
from forebay_wire.policy import Head, Method
from forebay_wire.relay import Call, Relay
from forebay_wire.transport import Wire, Wires

_log = logging.getLogger(__name__)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_METHODS = {method.path: method for method in Method}
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")
# How much of a handler's answer waits before `write` does.
_WRITE_AHEAD_BYTES = 32 << 10
_REQUESTS_AHEAD = 16
_ACCEPTED_ENCODINGS = "identity,deflate,gzip"
_SLOW = "The answer was not read in time."


class Server:
    """One server. Register servicers on `grpc`, `offer` their names, then `listen`."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Must be made while the event loop runs.

        Args:
            limits: bounds.
            tls: makes the port speak TLS; see `forebay_wire.tls`.
            rng: spreads the ages at which connections are asked to go.
        """
        self.limits = limits or Limits()
        self._handlers = _Handlers()
        self.authorize: Authorize | None = None
        """Asked before a method that is not relayed is answered; raises ForebayError to refuse."""
        self.draining = False
        self.in_flight = 0
        self.held = Budget(self.limits.held_bytes)
        self.requested = Budget(self.limits.request_bytes)
        self.loop = asyncio.get_running_loop()
        self.slow_readers_cut = 0
        self._tls = tls
        self._rng = rng or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._relay: Relay | None = None
        self._wires = Wires(self.limits)
        self._health = health.aio.HealthServicer()
        self._ready: dict[str, bool] = {}
        self._reported: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._socket: asyncio.Server | None = None

    @property
    def grpc(self) -> Any:
        """What `add_…_to_server` of a generated servicer takes."""
        return self._handlers

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._wires.all)

    @property
    def streams(self) -> int:
        """Open streams."""
        return sum(len(wire.connection.streams) for wire in self._wires.all)

    @property
    def resets(self) -> int:
        """Streams that clients have reset."""
        return self._wires.resets

    def serve(self, relay: Relay) -> None:
        """Answer InferenceService by relaying."""
        self._relay = relay
        self.offer(_METHODS_SERVICE)

    def offer(self, service_name: str) -> None:
        """List a service, by its full name, in health and reflection. It starts NOT_SERVING."""
        self._ready.setdefault(service_name, False)

    def set_ready(self, service_name: str, ready: bool) -> None:
        """Say whether a service can do its work now. Being alive is not being ready."""
        if service_name not in self._ready:
            raise KeyError(service_name)
        self._ready[service_name] = ready and not self.draining
        self._report()

    async def listen(self, address: str, *, reuse_port: bool = False) -> str:
        """Bind, start, and return the address that was bound.

        Args:
            address: `host:port`, where port 0 picks a free one, or `unix:/path`.
            reuse_port: let other processes bind the same port and share its connections.

        Raises:
            OSError: the address cannot be bound.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._ready, _HEALTH, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(names), self.grpc
        )
        self._report()
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            _remove_stale_socket(path)
            self._socket = await self.loop.create_unix_server(
                self._make_wire, path, ssl=self._tls, backlog=1024
            )
            return address
        host, _, port = address.rpartition(":")
        self._socket = await self.loop.create_server(
            self._make_wire,
            host.strip("[]"),
            int(port),
            ssl=self._tls,
            backlog=1024,
            reuse_port=reuse_port or None,
        )
        return f"{host}:{self._socket.sockets[0].getsockname()[1]}"

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight finish for up to `grace_s`, stop."""
        self.draining = True
        for name in self._ready:
            self._ready[name] = False
        self._report()
        for wire in list(self._wires.all):
            wire.retire(grace_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        if self.in_flight:
            _log.warning("drain ended with %d calls in flight", self.in_flight)
        await self.stop()

    async def stop(self) -> None:
        """Cut what is left, and stop."""
        self.draining = True
        if self._socket is not None:
            self._socket.close()
        for wire in list(self._wires.all):
            for stream in list(wire.connection.streams.values()):
                self.cut(stream, Reason.DRAINING)
            # Some clients never answer the end of a TLS session, but close at this.
            wire.connection.go_away(gracefully=False)
            wire.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wires.empty(), 1.0)
        self._wires.abort()
        await self._wires.empty()

    def enter(self) -> None:
        """A counted call begins."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A counted call has ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def cut(self, stream: Stream, reason: Reason) -> None:
        """End a stream whose reader is too slow, or that a drain cannot wait for."""
        receiver = stream.receiver
        if reason is Reason.SLOW_READER:
            self.slow_readers_cut += 1
        error = ForebayError(reason, _SLOW) if reason is Reason.SLOW_READER else _draining()
        if isinstance(receiver, (_RelayedCall, _HandledCall)):
            receiver.cut(error)
        else:
            # Its answer has begun: only an answer can wait for its reader.
            stream.cut(_status_block(error, begun=stream.pending_bytes > 0))

    def _make_wire(self) -> Wire:
        age_s = self.limits.connection_age_s
        return Wire(
            self._wires,
            is_client=False,
            budget=self.held,
            on_request=self._on_request,
            on_cut=self.cut,
            on_waiting=_trickle,
            age_s=age_s * self._rng.uniform(0.9, 1.1) if age_s > 0 else None,
        )

    def _on_request(self, stream: Stream, headers: Headers, ended: bool, oversized: bool) -> None:
        if oversized:
            limit = self.limits.header_bytes
            _refuse(stream, ForebayError(Reason.HEADERS_TOO_LARGE, _header_text(limit)))
            return
        try:
            request = check_request(headers)
        except MalformedError:
            stream.connection.blame(stream, ErrorCode.PROTOCOL_ERROR)
            return
        if request.method != "POST" or not request.content_type.startswith("application/grpc"):
            # No gRPC: HTTP's own words for it (gRPC over HTTP/2, "Responses").
            status = b"405" if request.method != "POST" else b"415"
            stream.send_trailers(encode(((b":status", status), (b"allow", b"POST"))))
            return
        try:
            timeout_s = request.timeout_s
        except TimeoutFormatError:
            message = "'grpc-timeout' must be 1 to 8 digits and one of H, M, S, m, u, n."
            _refuse(stream, ForebayError(Reason.INVALID_ARGUMENT, message, param="grpc-timeout"))
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.draining and not request.path.startswith(_UNCOUNTED):
            _refuse(stream, _draining())
            return
        method = _METHODS.get(request.path)
        if method is not None and self._relay is not None:
            _RelayedCall(self, self._relay, stream, request, method=method, deadline=deadline)
            return
        if self.authorize is not None:
            try:
                self.authorize(request.path, request.fields)
            except ForebayError as error:
                _refuse(stream, error)
                return
        handler = self._handlers.find(request.path)
        if handler is None:
            text = "There is no such method here."
            _refuse(stream, ForebayError(Reason.METHOD_NOT_ALLOWED, text))
            return
        call = _HandledCall(self, stream, request, handler=handler, deadline=deadline)
        if ended:
            call.on_end()

    def _report(self) -> None:
        states = {name: _SERVING if ready else _NOT_SERVING for name, ready in self._ready.items()}
        states[""] = _SERVING if all(self._ready.values()) else _NOT_SERVING
        for name, state in states.items():
            if self._reported.get(name) == state:
                continue
            self._reported[name] = state
            task = asyncio.ensure_future(self._health.set(name, state))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


Authorize = Callable[[str, dict[str, str]], None]
"""Gets a method's path and the text metadata of a call."""

_METHODS_SERVICE = Method.GENERATE.path.split("/")[1]


class _Handlers:
    """What grpcio's generated `add_…_to_server` registers."""

    def __init__(self) -> None:
        self._by_path: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Nothing is left to do: the same methods are registered by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Register the methods of a service."""
        for name, handler in handlers.items():
            self._by_path[f"/{service}/{name}"] = handler

    def find(self, path: str) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method."""
        return self._by_path.get(path)


class _RelayedCall:
    """A call that is relayed: receives the request, and is the relay's caller."""

    __slots__ = (
        "_budgeted",
        "_call",
        "_deadline",
        "_ended",
        "_has_begun",
        "_head",
        "_message",
        "_method",
        "_reader",
        "_relay",
        "_request",
        "_server",
        "_stream",
        "forward",
    )

    def __init__(
        self,
        server: Server,
        relay: Relay,
        stream: Stream,
        request: Request,
        *,
        method: Method,
        deadline: float | None,
    ) -> None:
        self._server = server
        self._relay = relay
        self._stream = stream
        self._request = request
        self._method = method
        self._deadline = deadline
        self._reader = MessageReader(server.limits.message_bytes)
        self._message: tuple[bool, bytes] | None = None
        self._call: Call | None = None
        self._head: Head | None = None
        self._budgeted = 0
        self._has_begun = False
        self._ended = False
        self.forward = stream.send
        stream.receiver = self
        stream.on_data = self.on_data
        server.enter()
        if stream.ended_there:
            self.on_end()

    # --- What the stream tells -----------------------------------------------------------------

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """A part of the request."""
        size = end - start
        self._budgeted += size
        budget = self._server.requested
        budget.left_bytes -= size
        if budget.left_bytes < 0:
            self._refuse(
                ForebayError(
                    Reason.QUEUE_FULL, "Too much is being sent here at once.", retry_after_s=1.0
                )
            )
            return
        try:
            messages = self._reader.feed(data, start, end)
        except TooLargeError:
            self._refuse(_too_large(self._server.limits))
            return
        except MessageError:
            self._refuse(_undecodable())
            return
        if not messages:
            return
        if len(messages) > 1 or self._message is not None:
            self._refuse(_not_one_message())
            return
        self._message = messages[0]

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """A request's trailers, which gRPC does not have; they only end it."""
        try:
            check_trailers(headers)
        except MalformedError:
            self._stream.reset(ErrorCode.PROTOCOL_ERROR)
            self._leave()
            return
        self.on_end()

    def on_end(self) -> None:
        """The request is whole."""
        if self._ended:
            return
        if self._message is None or not self._reader.at_boundary:
            self._refuse(_not_one_message())
            return
        request = self._request
        is_compressed, message = self._message
        self._message = None
        compressed = None
        if is_compressed:
            compressed = message
            try:
                message = decompress(message, request.encoding, self._server.limits.message_bytes)
            except TooLargeError:
                self._refuse(_too_large(self._server.limits))
                return
            except UnsupportedError:
                self._refuse(
                    ForebayError(Reason.UNSUPPORTED, "This compression is not offered here."),
                    _UNKNOWN_ENCODING,
                )
                return
            except CorruptError:
                self._refuse(_undecodable())
                return
        metadata = request.fields
        head = Head(
            method=self._method,
            metadata=metadata,
            deadline=self._deadline,
            request_id=md.request_id_from(metadata.get(md.REQUEST_ID)),
        )
        accepted = request.accept_encoding
        if metadata.get(md.PROGRESS) == "1" and self._method.streams:
            head.tell = self._tell_progress
            # What is told is not compressed, and an answer is compressed in one way.
            accepted = ""
        self._head = head
        self._call = self._relay.call(
            head,
            message,
            self,
            compressed=compressed,
            encoding=request.encoding,
            accept_encoding=accepted,
        )

    def on_reset(self, code: ErrorCode) -> None:
        """The client left."""
        if self._call is not None:
            self._call.cancel()
        self._leave()

    def on_blocked(self) -> None:
        """The client does not read fast enough."""
        if self._call is not None:
            self._call.hold()

    def on_drained(self) -> None:
        """The client has caught up."""
        if self._call is not None:
            self._call.resume()

    def trickle(self) -> None:
        """The client may have taken some of what waits for it."""
        if self._call is not None:
            self._call.trickle(self._stream.pending_bytes)

    # --- What the relay tells ------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """See `relay.Caller`."""
        if self._has_begun:
            return
        self._has_begun = True
        block = RESPONSE_BLOCK
        if call.encoding:
            block += metadata_block((("grpc-encoding", call.encoding),))
        self._stream.send_headers(block)

    def _tell_progress(self, model_version: str, phase: str, waited_s: float) -> None:
        if self._ended:
            return
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(RESPONSE_BLOCK)
        progress = pb.Progress(
            model_version=model_version, phase=phase, waited_ms=round(1000 * waited_s)
        )
        kind = pb.GenerateResponse if self._method is Method.GENERATE else pb.CallOpenAIResponse
        data = frame(kind(progress=progress).SerializeToString())
        self._stream.send(data, 0, len(data))

    def finish(self, trailing: md.Metadata) -> None:
        """See `relay.Caller`."""
        self._stream.send_trailers(trailers_block(0, "", None, self._trailing(trailing)))
        self._leave()

    def fail(self, error: ForebayError, trailing: md.Metadata) -> None:
        """See `relay.Caller`."""
        code, message, details = to_trailers(error)
        block = trailers_block(code, message, details, self._trailing(trailing))
        self._stream.send_trailers(block if self._has_begun else RESPONSE_BLOCK + block)
        self._leave()

    def cut(self, error: ForebayError) -> None:
        """End it now, whatever it waits for."""
        if self._call is not None:
            self._call.cancel()
        code, message, details = to_trailers(error)
        block = trailers_block(code, message, details, self._trailing(()))
        self._stream.cut(block if self._has_begun else RESPONSE_BLOCK + block)
        self._leave()

    def _refuse(self, error: ForebayError, more: bytes = b"") -> None:
        if not self._ended:
            _refuse(self._stream, error, more)
            self._leave()

    def _trailing(self, trailing: md.Metadata) -> md.Metadata:
        head = self._head
        if head is None:
            return trailing
        return (
            (md.REQUEST_ID, head.request_id),
            *((key, value) for key, value in trailing if key != md.REQUEST_ID),
        )

    def _leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._server.requested.left_bytes += self._budgeted
            self._server.leave()
            # What refers to one another would wait for the collector.
            self._call = None
            if self._head is not None:
                self._head.tell = None
            self._stream.receiver = _ENDED


class _Ended:
    """Receives for a stream whose call has ended, while the last of it waits to be sent."""

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """Nothing to do."""

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Nothing to do."""

    def on_reset(self, code: ErrorCode) -> None:
        """Nothing to do."""

    def on_blocked(self) -> None:
        """Nothing to do."""

    def on_drained(self) -> None:
        """Nothing to do."""


_ENDED = _Ended()


class _HandledCall:
    """A call that a servicer answers: receives the request, and is the servicer's context."""

    def __init__(
        self,
        server: Server,
        stream: Stream,
        request: Request,
        *,
        handler: grpc.RpcMethodHandler[Any, Any],
        deadline: float | None,
    ) -> None:
        self._server = server
        self._stream = stream
        self._request = request
        self._handler = handler
        self._deadline_s = deadline
        self._reader = MessageReader(server.limits.message_bytes)
        self._messages: deque[bytes] = deque()
        self._request_ended = False
        self._news = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._has_begun = False
        self._ended = False
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._initial: tuple[tuple[str, str], ...] = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._budgeted = 0
        self._was_cancelled = False
        name = request.path.rsplit("/", 1)[-1]
        self._is_counted = not (
            request.path.startswith(_UNCOUNTED)
            or (name.startswith("Watch") and handler.response_streaming)
        )
        stream.receiver = self
        stream.on_data = self.on_data
        if self._is_counted:
            server.enter()
        if deadline is not None:
            self._timer = server.loop.call_later(
                max(0.0, deadline - time.monotonic()), self._expire
            )
        if handler.request_streaming:
            self._start()

    # --- What the stream tells -----------------------------------------------------------------

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """A part of the request."""
        size = end - start
        self._budgeted += size
        budget = self._server.requested
        budget.left_bytes -= size
        if budget.left_bytes < 0:
            self._end_with(
                ForebayError(
                    Reason.QUEUE_FULL, "Too much is being sent here at once.", retry_after_s=1.0
                )
            )
            return
        limits = self._server.limits
        try:
            for is_compressed, message in self._reader.feed(data, start, end):
                encoding = self._request.encoding if is_compressed else ""
                self._messages.append(decompress(message, encoding, limits.message_bytes))
        except TooLargeError:
            self._end_with(_too_large(limits))
            return
        except UnsupportedError:
            self._end_with(
                ForebayError(Reason.UNSUPPORTED, "This compression is not offered here."),
                _UNKNOWN_ENCODING,
            )
            return
        except MessageError:
            self._end_with(_undecodable())
            return
        if len(self._messages) >= _REQUESTS_AHEAD:
            self._stream.hold()
        self._news.set()

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """Trailers of the request: they only end it."""
        self.on_end()

    def on_end(self) -> None:
        """The request is whole."""
        self._request_ended = True
        self._news.set()
        if self._ended or self._handler.request_streaming:
            return
        if len(self._messages) != 1 or not self._reader.at_boundary:
            self._end_with(_not_one_message())
            return
        self._start()

    def on_reset(self, code: ErrorCode) -> None:
        """The client left."""
        self._was_cancelled = True
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def on_blocked(self) -> None:
        """The client does not read fast enough."""
        if self._stream.pending_bytes > _WRITE_AHEAD_BYTES:
            self._drained.clear()

    def on_drained(self) -> None:
        """The client has caught up."""
        self._drained.set()

    def cut(self, error: ForebayError) -> None:
        """End it now, whatever it does."""
        if not self._ended:
            block = _status_block(error, begun=self._has_begun)
            self._leave()
            self._stream.cut(block)
        if self._task is not None:
            self._task.cancel()

    # --- What servicers use of grpc.aio.ServicerContext ------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller's metadata."""
        return tuple(self._request.fields.items())

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def set_trailing_metadata(self, trailing: Iterable[tuple[str, str | bytes]]) -> None:
        """Sent with the status. Values are text, or bytes for names that end in `-bin`."""
        self._trailing = tuple(trailing)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What was set."""
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Open the answer with metadata."""
        self._initial = tuple(metadata)
        self._begin()

    async def write(self, response: Any) -> None:
        """Send a message; waits while the client does not read."""
        if self._ended:
            raise asyncio.CancelledError
        serialize = self._handler.response_serializer
        message: bytes = response if serialize is None else serialize(response)
        self._begin()
        self._stream.send(framed := frame(message), 0, len(framed))
        if self._stream.pending_bytes > _WRITE_AHEAD_BYTES:
            self._drained.clear()
            await self._drained.wait()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call with a status; does not return."""
        if trailing := tuple(trailing_metadata):
            self._trailing = trailing
        number: int = code.value[0]
        packed = next((v for k, v in self._trailing if k == "grpc-status-details-bin"), None)
        self._finish(number, details, packed if isinstance(packed, bytes) else None)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        """Not told: addresses stay out of answers and logs."""
        return "unknown"

    def cancelled(self) -> bool:
        """Whether the client left."""
        return self._was_cancelled

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called when the call has ended."""
        if self._ended:
            callback(self)
        else:
            self._callbacks.append(callback)

    # --- The course of a call ------------------------------------------------------------------

    def _start(self) -> None:
        self._task = self._server.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._answer()
        except ForebayError as error:
            self._end_with(error)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if not self._ended:
                self._end_with(ForebayError(Reason.CANCELLED, "The call was cancelled."))
        except Exception:
            _log.exception("unexpected error in %s", self._request.path)
            self._end_with(ForebayError(Reason.INTERNAL, "An unexpected error happened here."))
        else:
            self._finish(0, "", None)

    async def _answer(self) -> None:
        handler = self._handler
        if handler.request_streaming:
            request: Any = self._requests()
        else:
            request = self._decode(self._messages.popleft())
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            answers: Any = behaviour(request, self)  # type: ignore[misc,arg-type]
            if inspect.isawaitable(answers):
                await answers
                return
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await self.write(answer)
            return
        single = handler.stream_unary or handler.unary_unary
        answer = await single(request, self)  # type: ignore[misc,arg-type]
        if not self._ended:
            await self.write(answer)

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            while self._messages:
                yield self._decode(self._messages.popleft())
            self._stream.resume()
            if self._request_ended:
                return
            self._news.clear()
            await self._news.wait()

    def _decode(self, message: bytes) -> Any:
        deserialize = self._handler.request_deserializer
        if deserialize is None:
            return message
        try:
            return deserialize(message)
        except DecodeError:
            raise _undecodable() from None

    def _begin(self) -> None:
        if not self._has_begun and not self._ended:
            self._has_begun = True
            block = RESPONSE_BLOCK
            self._stream.send_headers(
                block + metadata_block(self._initial) if self._initial else block
            )

    def _end_with(self, error: ForebayError, more: bytes = b"") -> None:
        code, message, details = to_trailers(error)
        self._finish(code, message, details, more)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _finish(self, code: int, message: str, details: bytes | None, more: bytes = b"") -> None:
        if self._ended:
            return
        texts = [(k, v) for k, v in self._trailing if isinstance(v, str) and not k.endswith("-bin")]
        try:
            block = trailers_block(code, message, details, texts) + more
        except ValueError:
            _log.exception("invalid trailing metadata in %s", self._request.path)
            block = trailers_block(code, message, details, ())
        if not self._has_begun:
            block = RESPONSE_BLOCK + block
        self._stream.send_trailers(block)
        self._leave()

    def _expire(self) -> None:
        self._timer = None
        self._end_with(ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed."))

    def _leave(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._drained.set()
        self._news.set()
        self._request_ended = True
        self._server.requested.left_bytes += self._budgeted
        if self._timer is not None:
            self._timer.cancel()
        if self._is_counted:
            self._server.leave()
        for callback in self._callbacks:
            callback(self)
        # What refers to one another would wait for the collector.
        self._callbacks.clear()
        self._stream.receiver = _ENDED


_UNKNOWN_ENCODING = metadata_block((("grpc-accept-encoding", _ACCEPTED_ENCODINGS),))


def _trickle(stream: Stream) -> None:
    receiver = stream.receiver
    if isinstance(receiver, _RelayedCall):
        receiver.trickle()


def _remove_stale_socket(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _refuse(stream: Stream, error: ForebayError, more: bytes = b"") -> None:
    """Answer with a status alone; what is still to come of the request is not wanted."""
    stream.send_trailers(_status_block(error) + more)


def _status_block(error: ForebayError, *, begun: bool = False) -> bytes:
    block = trailers_block(*to_trailers(error), ())
    return block if begun else RESPONSE_BLOCK + block


def _draining() -> ForebayError:
    return ForebayError(
        Reason.DRAINING, "This process is stopping; call another.", retry_after_s=1.0
    )


def _too_large(limits: Limits) -> ForebayError:
    text = f"The message is larger than the {limits.message_bytes} bytes allowed."
    return ForebayError(Reason.BODY_TOO_LARGE, text)


def _undecodable() -> ForebayError:
    return ForebayError(Reason.INVALID_ARGUMENT, "The message cannot be decoded.")


def _not_one_message() -> ForebayError:
    return ForebayError(Reason.INVALID_ARGUMENT, "The call must carry exactly one message.")


def _header_text(limit: int) -> str:
    return f"The metadata is larger than the {limit} bytes allowed."
