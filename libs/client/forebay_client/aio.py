"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.channel import MAX_MESSAGE_BYTES, connect
from forebay_common.errors import Reason

from forebay_client.answers import (
    Answer,
    Assembly,
    Delta,
    Embeddings,
    Model,
    embeddings_of,
    models_of,
)
from forebay_client.errors import Cancelled, from_call
from forebay_client.requests import (
    CallOptions,
    Conversation,
    GenerateOptions,
    Prompt,
    call_of,
    conversation,
    embed_request,
    generate_request,
    key_metadata,
)

DEFAULT_TIMEOUT_S = 300.0


class AsyncAnswerStream:
    """An answer while it is made: iterate for its deltas, then read `answer`.

    Leaving the context, cancelling the task that iterates, or `cancel()` stops the engine.
    """

    def __init__(self, call: Any, request_id: str, address: str) -> None:
        self.request_id = request_id
        """The request's id, known before the first delta."""
        self._call = call
        self._address = address
        self._assembly = Assembly(request_id)
        self._answer: Answer | None = None
        self._cancelled = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the deltas are through.

        Raises:
            RuntimeError: the stream has not ended.
        """
        if self._answer is None:
            raise RuntimeError("the answer is complete only after its last delta")
        return self._answer

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> Delta:
        if self._answer is not None:
            raise StopAsyncIteration
        while True:
            try:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    trailing = await self._call.trailing_metadata()
            except grpc.RpcError as error:
                raise from_call(error, self._address) from None
            except asyncio.CancelledError:
                if self._cancelled:
                    raise Cancelled(Reason.CANCELLED, "The call was cancelled.") from None
                self.cancel()
                raise
            if message is grpc.aio.EOF:
                self._answer = self._assembly.finish(trailing)
                raise StopAsyncIteration
            delta = self._assembly.add(message)
            if delta is not None:
                return delta

    async def collect(self) -> Answer:
        """Wait for the end and return the whole answer."""
        async for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stop the engine and end the stream; iterating raises Cancelled from here on."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncClient:
    """Calls the router, or any other hop, from one event loop.

    Nothing is retried: what fails raises, and `ForebayError.status.retryable` says whether trying
    again makes sense. One client serves any number of concurrent calls over one connection.

    Args:
        address: `host:port`, or `unix:/path` of a hop on this host.
        api_key: the caller's key; None where the router is open.
        timeout_s: deadline of calls that give none, in seconds; None: no deadline.
        max_message_bytes: largest message either way.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._key = key_metadata(api_key)
        self._max_message_bytes = max_message_bytes
        self._opened: grpc.aio.Channel | None = None

    def stream(
        self, model: str, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncAnswerStream:
        """Start an answer. Must be called inside the event loop.

        Args:
            model: model, alias, or `name@version`.
            prompt: text or token ids as they are, or `Message`s for the model's chat template.
            options: see `GenerateOptions`.

        Raises:
            InvalidRequest: the request cannot be sent. Everything else is raised by the stream.
        """
        call = call_of(
            options, model=model, default_timeout_s=self._timeout_s, credentials=self._key
        )
        started = inference_rpc.InferenceServiceStub(self._channel).Generate(
            generate_request(model, prompt, options),
            metadata=call.metadata,
            timeout=call.timeout_s,
        )
        return AsyncAnswerStream(started, call.request_id, self.address)

    async def generate(
        self, model: str, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The whole answer; arguments as `stream`.

        Raises:
            ForebayError: see `forebay_client.errors`.
        """
        async with self.stream(model, prompt, **options) as answer:
            return await answer.collect()

    def stream_chat(
        self, model: str, messages: Conversation, **options: Unpack[GenerateOptions]
    ) -> AsyncAnswerStream:
        """As `stream`, for a question or a conversation, through the model's chat template."""
        return self.stream(model, conversation(messages), **options)

    async def chat(
        self, model: str, messages: Conversation, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """As `generate`, for a question or a conversation, through the model's chat template."""
        return await self.generate(model, conversation(messages), **options)

    async def embed(
        self,
        model: str,
        inputs: str | Sequence[str | Sequence[int]],
        **options: Unpack[CallOptions],
    ) -> Embeddings:
        """One vector per input, in order.

        Args:
            model: model, alias, or `name@version` that embeds.
            inputs: 1 to 2048 texts or token-id lists; a single text counts as one.
            options: see `CallOptions`.

        Raises:
            ForebayError: see `forebay_client.errors`.
        """
        call = call_of(
            options, model=model, default_timeout_s=self._timeout_s, credentials=self._key
        )
        started = inference_rpc.InferenceServiceStub(self._channel).Embed(
            embed_request(model, inputs), metadata=call.metadata, timeout=call.timeout_s
        )
        try:
            message = await started
            trailing = await started.trailing_metadata()
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        return embeddings_of(message, trailing, call.request_id)

    async def models(self, *, timeout_s: float = 10.0) -> tuple[Model, ...]:
        """What the router at this address knows, models by name.

        Raises:
            Unsupported: the address is another hop's.
            ForebayError: see `forebay_client.errors`.
        """
        try:
            answer = await router_rpc.RouterServiceStub(self._channel).ListRoutes(
                router_pb.ListRoutesRequest(), metadata=self._key, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        return models_of(answer.catalogue)

    async def close(self) -> None:
        """End the connection and cancel what is in flight."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    @property
    def _channel(self) -> grpc.aio.Channel:
        # Opened on first use: a channel belongs to the event loop it is made in.
        if self._opened is None:
            self._opened = connect(self.address, max_message_bytes=self._max_message_bytes)
        return self._opened

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
