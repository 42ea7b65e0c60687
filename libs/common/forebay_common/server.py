"""A gRPC server with health, reflection, errors as statuses, and an orderly end.

Drain: the caller stops announcing; `drain` then tells health watchers, refuses new calls with
DRAINING, lets calls in flight finish within the grace, and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import uvloop
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from forebay_common.channel import KEEPALIVE_S, MAX_MESSAGE_BYTES
from forebay_common.errors import ForebayError, Reason, abort

_log = logging.getLogger(__name__)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SAME_WISH_S = 1.0
_YOUNG_OBJECTS = 20_000
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Decode: TypeAlias = Callable[[bytes], Any]


def _is_worth_a_log(record: logging.LogRecord) -> bool:
    # gRPC calls it an error when a message or a status finds no caller any more, unless it has
    # already seen the caller leave: which of the two comes first is chance.
    departed = record.getMessage().startswith("ExecuteBatchError raised in core")
    return not departed or _log.isEnabledFor(logging.DEBUG)


class Server:
    """A grpc.aio server. Register servicers on `grpc`, `offer` their names, then `listen`."""

    def __init__(
        self,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_concurrent_rpcs: int | None = None,
        ping_interval_s_min: float = KEEPALIVE_S / 2,
    ) -> None:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_log)
        self._gate = _Gate()
        self.grpc = grpc.aio.server(
            interceptors=(self._gate,),
            maximum_concurrent_rpcs=max_concurrent_rpcs,
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),
                (
                    "grpc.http2.min_ping_interval_without_data_ms",
                    round(ping_interval_s_min * 1000),
                ),
                ("grpc.keepalive_permit_without_calls", 1),
            ),
        )
        self._health = health.aio.HealthServicer()
        self._ready: dict[str, bool] = {}
        self._reported: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, service_name: str) -> None:
        """List a service, by its full name, in health and reflection. It starts NOT_SERVING."""
        self._ready.setdefault(service_name, False)

    def set_ready(self, service_name: str, ready: bool) -> None:
        """Say whether a service can do its work now. Being alive is not being ready."""
        if service_name not in self._ready:
            raise KeyError(service_name)
        self._ready[service_name] = ready and not self._gate.draining
        self._report()

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

    async def listen(self, address: str) -> str:
        """Bind, start, and return the address that was bound.

        Args:
            address: `host:port`, where port 0 picks a free one, or `unix:/path`.

        Raises:
            OSError: the address cannot be bound.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._ready, _HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        if address.startswith("unix:"):
            _remove_stale_socket(address)
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        self._report()
        await self.grpc.start()
        if address.startswith("unix:"):
            return address
        return f"{address.rsplit(':', 1)[0]}:{port}"

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight finish for up to `grace_s`, stop."""
        self._gate.draining = True
        for name in self._ready:
            self._ready[name] = False
        self._report()
        # The health watchers' calls never end by themselves: wait for the real ones, then stop.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.idle(), grace_s)
        if self._gate.in_flight:
            _log.warning("drain ended with %d calls in flight", self._gate.in_flight)
        await self.grpc.stop(0)


def _remove_stale_socket(address: str) -> None:
    Path(address.removeprefix("unix:")).unlink(missing_ok=True)


class _Gate(grpc.aio.ServerInterceptor):
    """Counts calls, refuses them while draining, and turns what handlers raise into statuses.

    Health, reflection and `Watch…` calls pass uncounted: a watch ends only with its server.
    """

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if method.startswith(("/grpc.health.", "/grpc.reflection.")):
            return handler
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._unary(_refuse_method, None, method))
        # What a handler takes is decoded behind the gate: an undecodable message is a refusal.
        decode = None if handler.request_streaming else handler.request_deserializer
        if handler.response_streaming:
            inner = handler.unary_stream or handler.stream_stream
            wrapped: Any = self._stream(inner, decode, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.unary_unary or handler.stream_unary
            wrapped = self._unary(inner, decode, method)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(
            wrapped,
            request_deserializer=handler.request_deserializer if decode is None else None,
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, inner: Callable[..., Awaitable[Any]], decode: _Decode | None, method: str
    ) -> Any:
        async def call(request: Any, context: _Context) -> Any:
            async with self._pass(context, method, counted=True):
                return await inner(_decoded(request, decode), context)

        return call

    def _stream(self, inner: Callable[..., Any], decode: _Decode | None, method: str) -> Any:
        counted = not method.rsplit("/", 1)[-1].startswith("Watch")

        # A coroutine that writes, not a generator: a cancelled call then unwinds the servicer at
        # once, where a generator would be left suspended until it is collected.
        async def call(request: Any, context: _Context) -> None:
            async with self._pass(context, method, counted=counted):
                answers = inner(_decoded(request, decode), context)
                if not hasattr(answers, "__aiter__"):
                    await answers
                    return
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        await context.write(answer)

        return call

    @contextlib.asynccontextmanager
    async def _pass(
        self, context: _Context, method: str, *, counted: bool
    ) -> AsyncGenerator[None, None]:
        """Let one call in, and give it its one status."""
        try:
            with self._entered(counted=counted):
                yield
            return
        except ForebayError as error:
            refusal = error
        except (grpc.aio.BaseError, asyncio.CancelledError):
            raise
        except Exception:
            _log.exception("unexpected error in %s", method)
            refusal = ForebayError(Reason.INTERNAL, "An unexpected error happened here.")
        await abort(context, refusal)

    @contextlib.contextmanager
    def _entered(self, *, counted: bool) -> Iterator[None]:
        if self.draining:
            raise ForebayError(
                Reason.DRAINING, "This process is stopping; call another.", retry_after_s=1
            )
        if not counted:
            yield
            return
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()


def _decoded(request: Any, decode: _Decode | None) -> Any:
    if decode is None:
        return request
    try:
        return decode(request)
    except DecodeError:
        raise ForebayError(Reason.INVALID_ARGUMENT, "The message cannot be decoded.") from None


async def _refuse_method(request: bytes, context: _Context) -> bytes:
    raise ForebayError(Reason.METHOD_NOT_ALLOWED, "There is no such method here.")


def settle_heap() -> None:
    """Once a service is up: keep the collector from looking at what will stay anyway.

    A full collection over the modules and tables of a service takes tens of milliseconds, in which
    every stream waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a service on uvloop until it returns.

    Args:
        main: gets an event that SIGTERM or SIGINT sets. It should drain and return; the process
            then exits with 0. A signal more than a second later ends the process at once; sooner,
            it is taken for the same wish, sent to a process and to its group.
    """

    async def entry() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        asked_s = 0.0

        def on_signal(number: signal.Signals) -> None:
            nonlocal asked_s
            if not stopping.is_set():
                _log.info("%s: draining", number.name)
                stopping.set()
                asked_s = loop.time()
            elif loop.time() - asked_s > _SAME_WISH_S:
                loop.remove_signal_handler(number)
                signal.raise_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await main(stopping)

    uvloop.run(entry())
