"""The synchronous client: gRPC's own blocking stubs, so it works in threads and plain scripts."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.channel import MAX_MESSAGE_BYTES

from forebay_client.aio import DEFAULT_TIMEOUT_S
from forebay_client.answers import (
    Answer,
    Assembly,
    Delta,
    Embeddings,
    Model,
    embeddings_of,
    models_of,
)
from forebay_client.errors import from_call
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


class AnswerStream:
    """An answer while it is made: iterate for its deltas, then read `answer`.

    Leaving the context or `cancel()`, which any thread may call, stops the engine.
    """

    def __init__(self, call: Any, request_id: str, address: str) -> None:
        self.request_id = request_id
        """The request's id, known before the first delta."""
        self._call = call
        self._address = address
        self._assembly = Assembly(request_id)
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole answer, once the deltas are through.

        Raises:
            RuntimeError: the stream has not ended.
        """
        if self._answer is None:
            raise RuntimeError("the answer is complete only after its last delta")
        return self._answer

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Delta:
        if self._answer is not None:
            raise StopIteration
        try:
            for message in self._call:
                delta = self._assembly.add(message)
                if delta is not None:
                    return delta
            trailing = self._call.trailing_metadata()
        except grpc.RpcError as error:
            raise from_call(error, self._address) from None
        self._answer = self._assembly.finish(trailing)
        raise StopIteration

    def collect(self) -> Answer:
        """Wait for the end and return the whole answer."""
        for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stop the engine and end the stream; iterating raises Cancelled from here on."""
        self._call.cancel()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """Calls the router, or any other hop, from any number of threads.

    Nothing is retried: what fails raises, and `ForebayError.status.retryable` says whether trying
    again makes sense.

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
        self._channel = grpc.insecure_channel(
            address,
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
                ("grpc.enable_http_proxy", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.max_pings_without_data", 0),
            ),
        )
        self._inference = inference_rpc.InferenceServiceStub(self._channel)

    def stream(
        self, model: str, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AnswerStream:
        """Start an answer.

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
        started = self._inference.Generate(
            generate_request(model, prompt, options),
            metadata=call.metadata,
            timeout=call.timeout_s,
        )
        return AnswerStream(started, call.request_id, self.address)

    def generate(self, model: str, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """The whole answer; arguments as `stream`.

        Raises:
            ForebayError: see `forebay_client.errors`.
        """
        with self.stream(model, prompt, **options) as answer:
            return answer.collect()

    def stream_chat(
        self, model: str, messages: Conversation, **options: Unpack[GenerateOptions]
    ) -> AnswerStream:
        """As `stream`, for a question or a conversation, through the model's chat template."""
        return self.stream(model, conversation(messages), **options)

    def chat(
        self, model: str, messages: Conversation, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """As `generate`, for a question or a conversation, through the model's chat template."""
        return self.generate(model, conversation(messages), **options)

    def embed(
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
        try:
            message, ended = self._inference.Embed.with_call(
                embed_request(model, inputs), metadata=call.metadata, timeout=call.timeout_s
            )
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        return embeddings_of(message, ended.trailing_metadata(), call.request_id)

    def models(self, *, timeout_s: float = 10.0) -> tuple[Model, ...]:
        """What the router at this address knows, models by name.

        Raises:
            Unsupported: the address is another hop's.
            ForebayError: see `forebay_client.errors`.
        """
        try:
            answer = router_rpc.RouterServiceStub(self._channel).ListRoutes(
                router_pb.ListRoutesRequest(), metadata=self._key, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        return models_of(answer.catalogue)

    def close(self) -> None:
        """End the connection and cancel what is in flight."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
