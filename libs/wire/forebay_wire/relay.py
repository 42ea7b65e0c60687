"""A relay on grpc.aio: streams pass as raw messages that are never decoded.

Invariant: each admitted request ends with exactly one `on_end`, and no attempt outlives its caller.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from forebay_common import metadata as md
from forebay_common.channel import ChannelPool
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.server import Server
from forebay_common.telemetry import extract

from forebay_wire.policy import (
    SERVICE,
    Fail,
    Head,
    Method,
    Outcome,
    Policy,
    Progress,
    Route,
)

_PASSED_ON = (md.USAGE, md.REPLICA, md.REQUEST_ID)


class Relay:
    """Carries requests to where its policy sends them, and their answers back."""

    def __init__(
        self, policy: Policy, channels: ChannelPool, *, trailing: md.Metadata = ()
    ) -> None:
        """`trailing` is what this hop adds to the trailing metadata of each answer."""
        self._policy = policy
        self._channels = channels
        self._trailing = trailing

    async def stream(
        self, head: Head, message: bytes, progress: Progress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Answer a request message by message. Closing the generator cancels the request.

        Args:
            head: the request.
            message: its encoded message.
            progress: the caller's own, to read usage and trailing metadata from afterwards.

        Raises:
            ForebayError: the request was refused or failed.
        """
        progress = progress if progress is not None else Progress()
        progress.started_s = time.monotonic()
        route = await self._policy.admit(head, message)
        outcome, error = Outcome.CANCELLED, None
        try:
            while True:
                error = None
                attempt = self._start(head, route, message)
                try:
                    async for part in _messages(attempt, head.method):
                        if progress.messages == 0:
                            progress.first_message_s = time.monotonic()
                        progress.messages += 1
                        progress.message_bytes += len(part)
                        yield part
                    await self._settle(attempt, progress)
                    outcome = Outcome.SUCCEEDED
                    return
                except grpc.RpcError as rpc_error:
                    error = _read_failure(rpc_error, head)
                    progress.trailing = self._trailing + _forebay_only(_trailing_of(rpc_error))
                finally:
                    attempt.cancel()
                decision = await self._policy.on_failure(head, route, error, progress)
                if isinstance(decision, Fail) or progress.messages:
                    outcome = Outcome.FAILED
                    error = decision.error if isinstance(decision, Fail) else error
                    raise error
                route = decision.route
        finally:
            self._policy.on_end(head, route, outcome, error, progress)

    async def unary(self, head: Head, message: bytes, progress: Progress | None = None) -> bytes:
        """Answer a request whose method gives one message.

        Raises:
            ForebayError: the request was refused or failed.
        """
        async with contextlib.aclosing(self.stream(head, message, progress)) as answers:
            parts = [part async for part in answers]
        assert len(parts) == 1, "a unary call gives one message"
        return parts[0]

    async def _settle(self, attempt: Any, progress: Progress) -> None:
        progress.trailing = self._trailing + _forebay_only(await attempt.trailing_metadata())
        usage = dict(progress.trailing).get(md.USAGE)
        progress.usage = md.Usage.decode(usage) if usage is not None else None

    def _start(self, head: Head, route: Route, message: bytes) -> Any:
        timeout_s = None if route.deadline is None else max(0.0, route.deadline - time.monotonic())
        method = self._channels.raw_method(
            route.target, head.method.path, streams=head.method.streams
        )
        return method(
            message if route.message is None else route.message,
            metadata=route.metadata,
            timeout=timeout_s,
        )


async def _messages(attempt: Any, method: Method) -> AsyncIterator[bytes]:
    if not method.streams:
        yield await attempt
        return
    # `read` instead of iteration: one coroutine less per message.
    while (part := await attempt.read()) is not grpc.aio.EOF:
        yield part


def _read_failure(rpc_error: grpc.RpcError, head: Head) -> ForebayError:
    error = from_rpc_error(rpc_error)
    # A hop that cancels because its own clock ran out means the deadline, whatever it says.
    expired = head.deadline is not None and time.monotonic() >= head.deadline
    if error.reason is Reason.CANCELLED and expired:
        return ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
    if error.reason is Reason.CANCELLED:
        # We did not cancel it, so the replica did: it is going away.
        return ForebayError(Reason.REPLICA_LOST, "The replica ended the call.")
    return error


def _trailing_of(rpc_error: grpc.RpcError) -> Any:
    return rpc_error.trailing_metadata() if isinstance(rpc_error, grpc.aio.AioRpcError) else ()


def _forebay_only(trailing: Any) -> md.Metadata:
    return tuple((k, v) for k, v in trailing or () if k in _PASSED_ON and isinstance(v, str))


def head_of(context: grpc.aio.ServicerContext[Any, Any], method: Method) -> Head:
    """Read a request's head from its gRPC call."""
    invocation = context.invocation_metadata() or ()
    metadata = md.texts(invocation)
    remaining_s = context.time_remaining()
    return Head(
        method=method,
        metadata=metadata,
        deadline=None if remaining_s is None else time.monotonic() + remaining_s,
        request_id=md.request_id_from(metadata.get(md.REQUEST_ID)),
        trace=extract(invocation),
    )


def serve_relay(server: Server, relay: Relay) -> None:
    """Serve InferenceService on `server` by relaying every call."""

    def answer(method: Method) -> Any:
        async def stream(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            head, progress = head_of(context, method), Progress()
            try:
                async with contextlib.aclosing(relay.stream(head, message, progress)) as answers:
                    async for part in answers:
                        await context.write(part)
            finally:
                context.set_trailing_metadata(_trailing(head, progress))

        async def unary(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            head, progress = head_of(context, method), Progress()
            try:
                return await relay.unary(head, message, progress)
            finally:
                context.set_trailing_metadata(_trailing(head, progress))

        if method.streams:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    methods = {method.value: answer(method) for method in Method}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.offer(SERVICE)


def _trailing(head: Head, progress: Progress) -> md.Metadata:
    return (
        (md.REQUEST_ID, head.request_id),
        *((key, value) for key, value in progress.trailing if key != md.REQUEST_ID),
    )
