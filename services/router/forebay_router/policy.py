"""Drives the relay: check, resolve, place, and try elsewhere after a failure.

A request holds its place in the ledger from the moment it is sent until its attempt has ended, and
has exactly one `router` span, one count and one record, however it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import time
from collections.abc import Callable

from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import context_of, inject, trace_id_of, tracer
from forebay_wire.policy import Decision, Fail, Head, Method, Outcome, Progress, Retry, Route
from google.protobuf.message import DecodeError
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from forebay_router.config import Config
from forebay_router.core.explain import Attempt, Recent, Record, most_telling
from forebay_router.core.generate import check_embed, check_generate
from forebay_router.core.openai import check_openai
from forebay_router.core.place import Placement, Replica, View, place
from forebay_router.core.refusal import RefusedError
from forebay_router.core.resolve import Resolution, resolve
from forebay_router.core.retry import Failure, Verdict, judge
from forebay_router.core.wanted import MAX_MODEL_CHARS, Wanted
from forebay_router.metrics import UNKNOWN_MODEL, Metrics
from forebay_router.ports import CatalogueSource, ReplicaSource

_LABEL = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """One admitted request."""

    head: Head
    span: Span
    record: Record
    started_s: float
    deadline: float = 0.0
    model_version: str = ""
    passed_on: md.Metadata = ()
    held: str | None = None
    """The replica whose place it holds."""
    tried: set[str] = dataclasses.field(default_factory=set)


class RouterPolicy:
    """The router's policy for its relay."""

    def __init__(
        self,
        catalogue: CatalogueSource,
        fleet: ReplicaSource,
        metrics: Metrics,
        recent: Recent,
        config: Config,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._metrics = metrics
        self._recent = recent
        self._config = config
        self._rng = rng
        self._clock = clock
        self._in_flight = 0

    async def admit(self, head: Head, message: bytes) -> Route:
        """See `forebay_wire.policy.Policy`."""
        flight = self._begin(head)
        try:
            return await self._let_in(flight, message)
        except BaseException as failure:
            cancelled = isinstance(failure, asyncio.CancelledError)
            error = None if cancelled else _as_error(failure)
            outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED
            self._end(flight, outcome, error, Progress())
            if isinstance(failure, RefusedError) and error is not None:
                raise error from None
            raise

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """See `forebay_wire.policy.Policy`."""
        flight: _Flight = route.context
        lost = flight.held
        self._end_attempt(flight, error.reason.value, progress)
        if error.reason is Reason.REPLICA_LOST and lost is not None:
            self._fleet.mark_down(lost)
        failure = Failure(
            reason=error.reason.value,
            replica_fault=error.status.replica_fault,
            messages=progress.messages,
            attempts=len(flight.record.attempts),
        )
        verdict = judge(failure, max_attempts=self._config.max_attempts)
        if not verdict.retries:
            return Fail(_for_caller(error))
        placement = await self._place(flight, waits=verdict is Verdict.RETRY_WAITING)
        if placement.chosen is None:
            return Fail(_for_caller(error))
        self._metrics.retries.labels(error.reason.value).inc()
        return Retry(self._route(flight, placement.chosen, placement))

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """See `forebay_wire.policy.Policy`."""
        flight: _Flight = route.context
        self._end_attempt(flight, _word(outcome, error), progress)
        self._end(flight, outcome, error, progress)

    async def _let_in(self, flight: _Flight, message: bytes) -> Route:
        if self._in_flight > self._config.max_in_flight:
            raise ForebayError(Reason.QUEUE_FULL, "The router is full.", retry_after_s=1)
        flight.deadline = self._deadline_of(flight.head, flight.started_s)
        wanted = _check(flight.head, message)
        flight.record.requested_model = wanted.model
        flight.span.set_attribute("gen_ai.operation.name", wanted.operation)
        flight.passed_on = _passed_on(flight.head, wanted)
        flight.model_version = (await self._resolve(flight, wanted)).model_version
        flight.record.model_version = flight.model_version
        placement = await self._place(flight, waits=True)
        if placement.chosen is None:
            raise self._no_replica(flight)
        return self._route(flight, placement.chosen, placement)

    def _begin(self, head: Head) -> _Flight:
        self._in_flight += 1
        self._metrics.in_flight.inc()
        span = tracer().start_span(
            "router",
            context=head.trace,
            kind=SpanKind.SERVER,
            attributes={"forebay.request_id": head.request_id},
        )
        record = Record(head.request_id, trace_id_of(head.metadata, span))
        self._recent.add(record)
        return _Flight(head, span, record, started_s=self._clock())

    def _deadline_of(self, head: Head, now: float) -> float:
        asked = now + self._config.default_timeout_s if head.deadline is None else head.deadline
        if asked <= now:
            raise ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
        return min(asked, now + self._config.max_timeout_s)

    def _wait_until(self, flight: _Flight) -> float:
        return min(flight.deadline, self._clock() + self._config.no_replica_wait_s)

    async def _resolve(self, flight: _Flight, wanted: Wanted) -> Resolution:
        if not self._catalogue.is_listed:
            # Nothing may be called unknown before the catalogue was read once.
            try:
                async with asyncio.timeout(self._wait_until(flight) - self._clock()):
                    await self._catalogue.ready()
            except TimeoutError:
                raise ForebayError(
                    Reason.STORE_UNAVAILABLE, "The models are not known yet.", retry_after_s=1
                ) from None
        head = flight.head
        sticky_key = head.metadata.get(md.SESSION) or head.request_id
        return resolve(self._catalogue.current(), wanted.model, sticky_key=sticky_key)

    async def _place(self, flight: _Flight, *, waits: bool) -> Placement:
        until = self._wait_until(flight)
        span = tracer().start_span("place", context=context_of(flight.span))
        try:
            while True:
                revision = self._fleet.revision
                view = View(
                    flight.model_version, self._fleet.ledger, self._fleet.down, flight.tried
                )
                placement = place(self._fleet.replicas(), view, draw=self._rng)
                remaining_s = until - self._clock()
                if placement.chosen is not None or not waits or remaining_s <= 0:
                    break
                try:
                    async with asyncio.timeout(remaining_s):
                        await self._fleet.changed(revision)
                except TimeoutError:
                    continue
            span.set_attribute("forebay.candidates", len(placement.candidates))
            if placement.chosen is not None:
                span.set_attribute("forebay.replica", placement.chosen.replica_id)
        finally:
            span.end()
        return placement

    def _no_replica(self, flight: _Flight) -> ForebayError:
        if self._clock() >= flight.deadline:
            return ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
        return ForebayError(
            Reason.NO_REPLICA, "No replica of the model can take requests now.", retry_after_s=1
        )

    def _route(self, flight: _Flight, replica: Replica, placement: Placement) -> Route:
        flight.held = replica.replica_id
        flight.tried.add(replica.replica_id)
        self._fleet.ledger.begin(replica.replica_id, flight.model_version)
        kept = most_telling(placement.candidates, limit=self._config.explain_candidates)
        flight.record.attempts.append(Attempt(replica.replica_id, kept, self._clock()))
        return Route(
            target=replica.address,
            metadata=(
                (md.REQUEST_ID, flight.head.request_id),
                (md.MODEL, flight.model_version),
                (md.ATTEMPT, str(len(flight.record.attempts))),
                *flight.passed_on,
                *inject(context_of(flight.span)),
            ),
            deadline=flight.deadline,
            context=flight,
        )

    def _end_attempt(self, flight: _Flight, word: str, progress: Progress) -> None:
        if flight.held is None:
            return
        self._fleet.ledger.end(flight.held, flight.model_version)
        flight.held = None
        attempt = flight.record.attempts[-1]
        attempt.outcome = word
        if progress.first_message_s is not None:
            attempt.first_message_ms = (progress.first_message_s - attempt.started_s) * 1000
        self._metrics.attempts.labels(word).inc()

    def _end(
        self, flight: _Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
    ) -> None:
        self._in_flight -= 1
        self._metrics.in_flight.dec()
        flight.record.outcome = _word(outcome, error)
        self._count(flight, outcome, error, progress)
        span, record = flight.span, flight.record
        if span.is_recording():
            span.set_attribute("gen_ai.request.model", record.requested_model)
            span.set_attribute("forebay.model_version", record.model_version)
            span.set_attribute("forebay.attempts", len(record.attempts))
            span.set_attribute("forebay.outcome", record.outcome)
            if record.attempts:
                span.set_attribute("forebay.replica", record.attempts[-1].replica_id)
            if progress.usage is not None:
                span.set_attribute("gen_ai.usage.input_tokens", progress.usage.prompt_tokens)
                span.set_attribute("gen_ai.usage.output_tokens", progress.usage.completion_tokens)
            if error is not None:
                span.set_attribute("error.type", error.reason.value)
                span.set_status(Status(StatusCode.ERROR, error.message))
        span.end()

    def _count(
        self, flight: _Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
    ) -> None:
        # Names that callers make up must not become labels.
        model = flight.model_version or UNKNOWN_MODEL
        method = flight.head.method.value
        reason = error.reason.value if error is not None else ""
        self._metrics.requests.labels(model, method, outcome.value, reason).inc()
        now = self._clock()
        self._metrics.request_seconds.labels(model, method).observe(now - flight.started_s)
        if progress.first_message_s is not None:
            first_s = progress.first_message_s - flight.started_s
            self._metrics.first_message_seconds.labels(model, method).observe(first_s)
        if progress.usage is not None:
            usage = progress.usage
            self._metrics.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
            self._metrics.tokens.labels(model, "cached").inc(usage.cached_tokens)
            self._metrics.tokens.labels(model, "completion").inc(usage.completion_tokens)


def _check(head: Head, message: bytes) -> Wanted:
    try:
        if head.method is Method.GENERATE:
            wanted = check_generate(inference.GenerateRequest.FromString(message))
        elif head.method is Method.EMBED:
            wanted = check_embed(inference.EmbedRequest.FromString(message))
        else:
            request = inference.CallOpenAIRequest.FromString(message)
            wanted = check_openai(request.path, request.body)
    except DecodeError:
        raise ForebayError(Reason.INVALID_ARGUMENT, "The message cannot be decoded.") from None
    named = head.metadata.get(md.MODEL)
    if named is None:
        return wanted
    if not 1 <= len(named) <= MAX_MODEL_CHARS:
        problem = f"'{md.MODEL}' must have 1 to {MAX_MODEL_CHARS} characters."
        raise ForebayError(Reason.INVALID_ARGUMENT, problem, param=md.MODEL)
    return dataclasses.replace(wanted, model=named)


def _passed_on(head: Head, wanted: Wanted) -> md.Metadata:
    """The metadata of the caller that the next hop gets, checked."""
    priority_class = head.metadata.get(md.CLASS, md.CLASSES[0])
    if priority_class not in md.CLASSES:
        message = f"'{md.CLASS}' must be one of {', '.join(md.CLASSES)}."
        raise ForebayError(Reason.INVALID_ARGUMENT, message, param=md.CLASS)
    passed_on = [(md.CLASS, priority_class), (md.PROMPT_TOKENS, str(wanted.prompt_tokens))]
    for key in (md.TENANT, md.SESSION):
        value = head.metadata.get(key)
        if value is None:
            continue
        if not _LABEL.fullmatch(value):
            message = f"'{key}' must have 1 to 256 printable ASCII characters."
            raise ForebayError(Reason.INVALID_ARGUMENT, message, param=key)
        passed_on.append((key, value))
    return tuple(passed_on)


def _as_error(failure: BaseException) -> ForebayError:
    if isinstance(failure, ForebayError):
        return failure
    if isinstance(failure, RefusedError):
        return ForebayError(Reason(failure.reason), failure.message, param=failure.param)
    return ForebayError(Reason.INTERNAL, "An unexpected error happened here.")


def _for_caller(error: ForebayError) -> ForebayError:
    """What a caller of the router is told when no replica is left to try."""
    if error.reason in (Reason.DRAINING, Reason.MODEL_NOT_LOADED):
        # True of the replica, but the caller does not choose among replicas.
        return ForebayError(
            Reason.NO_REPLICA, "No replica of the model can take requests now.", retry_after_s=1
        )
    return error


def _word(outcome: Outcome, error: ForebayError | None) -> str:
    return error.reason.value if error is not None else outcome.value
