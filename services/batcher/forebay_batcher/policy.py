"""The batcher's side of the relay: name the model, wait for a slot, go to its runner.

A request that fails is not tried again here: the router knows other replicas, this hop only one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import passed_on, start_span
from forebay_wire.policy import Decision, Fail, Head, Method, Outcome, Policy, Progress, Route
from forebay_wire.waiting import Waiting
from google.protobuf.message import DecodeError
from opentelemetry.trace import Span, StatusCode

from forebay_batcher import metrics
from forebay_batcher.core.models import Model
from forebay_batcher.core.queue import PriorityClass, Start
from forebay_batcher.engine_loop import EngineLoop, target_of
from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Replica

_CLASSES = {priority.name: priority for priority in PriorityClass}
_TOKEN_DIGITS_MAX = 9
_PASSED_ON = (md.TENANT, md.SESSION, md.ATTEMPT, md.PROMPT_TOKENS)


class BatcherPolicy(Policy):
    """Decides for the batcher's relay."""

    def __init__(
        self, *, replica: Replica, queue: QueueLoop, engine: EngineLoop, run_s_max: float
    ) -> None:
        self._replica = replica
        self._queue = queue
        self._engine = engine
        self._run_s_max = run_s_max

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        """Take a slot of the model's runner, or wait for one.

        Raises:
            ForebayError: INVALID_ARGUMENT, MODEL_NOT_FOUND, MODEL_NOT_LOADED, NO_REPLICA, DRAINING,
                QUEUE_FULL, or DEADLINE_EXCEEDED; the last two and MODEL_NOT_LOADED also from the
                wait.
        """
        try:
            self._replica.standing.check_open()
            priority = _class_of(head)
            pinned = head.metadata.get(md.MODEL)
            wanted = pinned or _model_in(head.method, message)
            model = self._replica.engine.resolve(wanted, pinned=bool(pinned))
            return self._acquire(head, len(message), model, priority)
        except ForebayError as error:
            metrics.REFUSALS(error.reason.value).inc()
            raise

    def on_first(self, head: Head, route: Route, progress: Progress) -> None:
        """Note that the engine has read the prompt."""
        self._queue.note_answer(route.context)

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """Always fails, with a look first at whether the runner is still there."""
        if error.reason is Reason.REPLICA_LOST:
            start: Start = route.context
            await self._engine.check_runner(start.request.model_version, start.capacity)
        return Fail(error)

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """Give the slot back."""
        start: Start = route.context
        self._queue.release(start.request.number)

    def _acquire(
        self, head: Head, size_bytes: int, model: Model, priority: PriorityClass
    ) -> Route | Awaitable[Route]:
        span = start_span("queue", head.metadata)
        if span is not None:
            span.set_attributes(
                {
                    "forebay.class": priority.name,
                    "forebay.queue_depth": self._queue.queue.waiting,
                    "forebay.model_version": model.model_version,
                    "forebay.request_id": head.request_id,
                }
            )
        try:
            answer = self._queue.acquire(
                request_id=head.request_id,
                model_version=model.model_version,
                priority=priority,
                size_bytes=size_bytes,
                deadline=head.deadline,
                prompt_tokens=_prompt_tokens(head.metadata.get(md.PROMPT_TOKENS)),
            )
        except ForebayError as error:
            _end_span(span, error)
            raise
        if not isinstance(answer, Start):
            return Waiting(lambda: self._route_later(head, answer, span))
        _end_span(span, None)
        return self._route(head, answer, span)

    async def _route_later(self, head: Head, waiting: Awaitable[Start], span: Span | None) -> Route:
        if span is not None:
            # Those that came in the same turn of the event loop have their places by now.
            span.set_attribute("forebay.queue_depth", self._queue.queue.waiting)
        try:
            start = await waiting
        except ForebayError as error:
            _end_span(span, error)
            metrics.REFUSALS(error.reason.value).inc()
            raise
        except asyncio.CancelledError:
            _end_span(span, None)
            raise
        _end_span(span, None)
        return self._route(head, start, span)

    def _route(self, head: Head, start: Start, span: Span | None) -> Route:
        ends_at = time.monotonic() + self._run_s_max
        metadata = head.metadata
        return Route(
            target=target_of(start.capacity.target),
            metadata=(
                (md.REQUEST_ID, head.request_id),
                (md.MODEL, start.request.model_version),
                (md.CLASS, start.request.priority.word),
                *[(key, metadata[key]) for key in _PASSED_ON if key in metadata],
                *passed_on(metadata, span),
            ),
            deadline=ends_at if head.deadline is None else min(ends_at, head.deadline),
            context=start,
        )


def _end_span(span: Span | None, error: ForebayError | None) -> None:
    if span is None:
        return
    if error is not None:
        span.set_status(StatusCode.ERROR, error.reason.value)
    span.end()


def _prompt_tokens(told: str | None) -> int:
    """An earlier hop's estimate; 0 where there is none, or none that can be."""
    if told is None or len(told) > _TOKEN_DIGITS_MAX or not told.isdecimal():
        return 0
    return int(told)


def _class_of(head: Head) -> PriorityClass:
    given = head.metadata.get(md.CLASS)
    if given is None:
        return PriorityClass.REALTIME
    priority = _CLASSES.get(given)
    if priority is None:
        raise ForebayError(
            Reason.INVALID_ARGUMENT,
            f"{md.CLASS} must be one of {', '.join(_CLASSES)}.",
            param=md.CLASS,
        )
    return priority


def _model_in(method: Method, message: bytes) -> str:
    """The model that a message names, for callers that send no metadata."""
    try:
        if method is Method.GENERATE:
            return pb.GenerateRequest.FromString(message).model
        if method is Method.EMBED:
            return pb.EmbedRequest.FromString(message).model
        body = json.loads(pb.CallOpenAIRequest.FromString(message).body)
    except DecodeError:
        raise ForebayError(Reason.INVALID_ARGUMENT, "The message cannot be decoded.") from None
    except (ValueError, RecursionError):
        raise ForebayError(
            Reason.INVALID_ARGUMENT, "body must be a JSON document.", param="body"
        ) from None
    model = body.get("model", "") if isinstance(body, dict) else None
    if not isinstance(model, str):
        raise ForebayError(
            Reason.INVALID_ARGUMENT,
            "body must be a JSON object whose model is a string.",
            param="model",
        )
    return model
