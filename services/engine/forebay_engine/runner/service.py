"""InferenceService of a runner: contract in, back end out, and what every call has in common."""

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from enum import Enum
from typing import Any, NoReturn

import grpc
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as pb_grpc
from forebay_common import metadata
from forebay_common.errors import ForebayError, Reason
from forebay_common.prompts import generate_prompt, openai_prompt

from forebay_engine.runner import tracing
from forebay_engine.runner.backend import Backend, Call, Delta, Frame, Logprob, Mode
from forebay_engine.runner.pacing import Ticker
from forebay_engine.runner.resuming import take_up_events, take_up_text

_Context = grpc.aio.ServicerContext[Any, Any]
_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Gate(Enum):
    """Whether calls are taken; the value tells a caller why not."""

    LOADING = "The model is loading."
    OPEN = ""
    DRAINING = "The model takes no new requests here."
    SLEEPING = "The model sleeps."


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves one model version from one back end.

    Every model name is taken for the served version, because the caller may use an alias; only the
    metadata `forebay-model`, which a router has resolved, must name it exactly.
    """

    def __init__(
        self, backend: Backend, ticker: Ticker, *, model_version: str, calls_max: int
    ) -> None:
        self._backend = backend
        self._ticker = ticker
        self._model = model_version
        self._calls_max = calls_max
        self._fingerprint = ""
        self._gate = Gate.LOADING
        self.resumed: Counter[Mode] = Counter()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def set_fingerprint(self, fingerprint: str) -> None:
        """Say which engine answers, once it is known."""
        self._fingerprint = fingerprint

    def set_gate(self, gate: Gate) -> None:
        """Take new calls, or refuse them."""
        self._gate = gate

    async def idle(self) -> None:
        """Wait until no call is left."""
        await self._idle.wait()

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream an answer."""
        operation = "chat" if request.HasField("messages") else "text_completion"
        with (
            self._call(context, operation=operation, model=request.model) as call,
            self._ticker.stream(call) as stream,
        ):
            call.prompt = functools.partial(generate_prompt, request)
            header: pb.AnswerHeader | None = self._header(call)
            seam = take_up_text(request, call)
            deltas: AsyncGenerator[Delta, None] = self._backend.generate(request, call)
            if seam is not None:
                header = None
                deltas = seam.rest_of(deltas)
            async with contextlib.aclosing(deltas):
                async for text, tokens, logprobs, finish in deltas:
                    message = pb.GenerateResponse(header=header, text_delta=text, token_ids=tokens)
                    header = None
                    if logprobs:
                        message.logprobs.extend(map(_logprobs, logprobs))
                    if finish is not None:
                        message.finish_reason = _FINISH.get(finish, pb.FINISH_REASON_STOP)
                        message.usage.CopyFrom(_usage(call))
                    await context.write(message)
                    if finish is None and (tick := stream.wait()) is not None:
                        await tick

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:  # noqa: N802
        """Answer with vectors."""
        with self._call(context, operation="embeddings", model=request.model) as call:
            vectors = await self._backend.embed(request, call)
            return pb.EmbedResponse(
                header=self._header(call),
                embeddings=[pb.Embedding(values=vector) for vector in vectors],
                usage=_usage(call),
            )

    async def CallOpenAI(self, request: pb.CallOpenAIRequest, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream the ready-made bytes of an OpenAI answer."""
        operation = _OPERATIONS.get(request.path, "unknown")
        with (
            self._call(context, operation=operation, model="") as call,
            self._ticker.stream(call) as stream,
        ):
            call.prompt = functools.partial(openai_prompt, request.path, request.body)
            seam = take_up_events(request, call)
            first = seam is None

            async def send(frame: Frame) -> None:
                nonlocal first
                message = pb.CallOpenAIResponse(
                    content_type=frame.content_type if first else "", body=frame.body
                )
                first = False
                for index, tokens in frame.tokens:
                    message.tokens.add(index=index, token_ids=tokens)
                if frame.last:
                    message.usage.CopyFrom(_usage(call))
                await context.write(message)
                if not frame.last and (tick := stream.wait()) is not None:
                    await tick

            await self._backend.call_openai(
                request.path, request.body, call, send if seam is None else seam.rest_to(send)
            )

    @contextlib.contextmanager
    def _call(self, context: _Context, *, operation: str, model: str) -> Iterator[Call]:
        sent = metadata.texts(context.invocation_metadata())
        self._admit(sent.get(metadata.MODEL, self._model))
        call = Call(metadata.request_id_from(sent.get(metadata.REQUEST_ID)), time.time_ns())
        span = tracing.start_span(
            sent,
            call,
            operation=operation,
            model=model or sent.get(metadata.MODEL, self._model),
        )
        failure: str | None = None
        self._calls += 1
        self._idle.clear()
        try:
            yield call
        except ForebayError as error:
            failure = error.reason.value
            raise
        except asyncio.CancelledError:
            failure = Reason.CANCELLED.value
            raise
        except Exception:
            failure = Reason.INTERNAL.value
            raise
        finally:
            if call.resumption is not None and call.resumption.mode is not None:
                self.resumed[call.resumption.mode] += 1
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()
            context.set_trailing_metadata(((metadata.USAGE, call.usage().encode()),))
            if span is not None:
                tracing.end_span(
                    span, call, end_ns=time.time_ns(), model=self._model, failure=failure
                )

    def _admit(self, model: str) -> None:
        if self._gate is not Gate.OPEN:
            self._refuse(self._gate)
        if model != self._model:
            raise ForebayError(
                Reason.MODEL_NOT_FOUND, "This runner serves another model version.", param="model"
            )
        if self._calls >= self._calls_max:
            raise ForebayError(
                Reason.QUEUE_FULL,
                f"This runner already holds {self._calls_max} requests.",
                retry_after_s=1,
            )

    def _refuse(self, gate: Gate) -> NoReturn:
        reason = Reason.DRAINING if gate is Gate.DRAINING else Reason.MODEL_NOT_LOADED
        raise ForebayError(reason, gate.value, retry_after_s=1)

    def _header(self, call: Call) -> pb.AnswerHeader:
        return pb.AnswerHeader(
            request_id=call.request_id,
            model_version=self._model,
            system_fingerprint=self._fingerprint,
            created_unix_s=call.started_ns // 1_000_000_000,
        )


_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def _usage(call: Call) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        cached_tokens=call.cached_tokens,
    )


def _logprobs(entry: Logprob) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        top=[
            pb.CandidateLogprob(token_id=token, text=text, logprob=logprob)
            for token, text, logprob in entry.top
        ],
    )
