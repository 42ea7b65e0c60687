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
from collections.abc import Awaitable, Callable

from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import passed_on, start_child, start_span, trace_id_of
from forebay_wire.policy import (
    Decision,
    Fail,
    Head,
    Method,
    Outcome,
    Policy,
    Progress,
    Retry,
    Route,
)
from forebay_wire.waiting import Waiting
from google.protobuf.message import DecodeError
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from forebay_router.config import Config
from forebay_router.core.explain import Attempt, Recent, Record, most_telling
from forebay_router.core.generate import check_embed, check_generate
from forebay_router.core.openai import check_openai
from forebay_router.core.place import Placement, Replica, View, place
from forebay_router.core.refusal import RefusedError
from forebay_router.core.resolve import Resolver
from forebay_router.core.retry import Failure, Verdict, judge
from forebay_router.core.wanted import MAX_MODEL_CHARS, Wanted
from forebay_router.metrics import UNKNOWN_MODEL, Metrics
from forebay_router.ports import CatalogueSource, ReplicaSource

# To look a member up in its class takes longer than a comparison.
_GENERATE, _EMBED = Method.GENERATE, Method.EMBED
_SERVER = SpanKind.SERVER
_LABELS = (md.TENANT, md.SESSION)
_LABEL = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """One request."""

    head: Head
    span: Span | None
    trace: md.Metadata
    """The trace context for the next hop."""
    record: Record
    started_s: float
    place_span: Span | None = None
    deadline: float = 0.0
    passed_on: md.Metadata = ()
    """What else of the caller's the next hop gets."""
    held: str | None = None
    """The replica whose place it holds."""
    tried: tuple[str, ...] = ()


class RouterPolicy(Policy):
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
        self._resolver = Resolver()
        self._fleet = fleet
        self._ledger = fleet.ledger
        self._down = fleet.down
        self._metrics = metrics
        self._recent = recent
        self._config = config
        self._rng = rng
        self._clock = clock
        self._in_flight: set[_Flight] = set()
        metrics.watch_requests(lambda: len(self._in_flight))

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        """See `forebay_wire.policy.Policy`. A request waits for the first catalogue, or for a
        replica to appear."""
        flight = self._begin(head)
        try:
            self._check_room()
            flight.deadline = self._deadline_of(head, flight.started_s)
            wanted = _check(head, message)
            flight.record.requested_model = wanted.model
            flight.passed_on = _passed_on(head, wanted)
            if flight.span is not None:
                flight.span.set_attribute("gen_ai.operation.name", wanted.operation)
            if not self._catalogue.is_listed:
                return Waiting(lambda: self._admit_later(flight, wanted))
            self._resolve(flight, wanted)
            flight.place_span = start_child("place", flight.span)
            placement = self._place(flight)
            if placement.chosen is None:
                return Waiting(lambda: self._admit_later(flight, wanted))
            self._enter(flight)
            return self._route(flight, placement.chosen, placement)
        except Exception as failure:
            raise self._refuse(flight, failure) from None

    async def _admit_later(self, flight: _Flight, wanted: Wanted) -> Route:
        try:
            self._check_room()
            self._enter(flight)
            if not flight.record.model_version:
                await self._listed(flight)
                self._resolve(flight, wanted)
                flight.place_span = start_child("place", flight.span)
            placement = await self._place_waiting(flight)
            if placement.chosen is None:
                self._end_place(flight, placement)
                raise self._no_replica(flight)
            return self._route(flight, placement.chosen, placement)
        except asyncio.CancelledError:
            self._end(flight, Outcome.CANCELLED, None, Progress())
            raise
        except Exception as failure:
            raise self._refuse(flight, failure) from None

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
        flight.place_span = start_child("place", flight.span)
        if verdict is Verdict.RETRY_WAITING:
            placement = await self._place_waiting(flight)
        else:
            placement = self._place(flight)
        if placement.chosen is None:
            self._end_place(flight, placement)
            return Fail(_for_caller(error))
        self._metrics.count_retry(error.reason.value)
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

    def _begin(self, head: Head) -> _Flight:
        span = start_span("router", head.metadata, kind=_SERVER)
        if span is not None:
            span.set_attribute("forebay.request_id", head.request_id)
        trace = passed_on(head.metadata, span)
        record = Record(head.request_id, trace_id_of(trace))
        return _Flight(head, span, trace, record, self._clock())

    def _enter(self, flight: _Flight) -> None:
        self._in_flight.add(flight)
        self._recent.add(flight.record)

    def _refuse(self, flight: _Flight, failure: Exception) -> Exception:
        """Count a request out that is not let in, and say what to raise."""
        if flight not in self._in_flight:
            self._recent.add(flight.record)
        error = _as_error(failure)
        self._end(flight, Outcome.FAILED, error, Progress())
        return error if isinstance(failure, RefusedError) else failure

    def _check_room(self) -> None:
        if len(self._in_flight) >= self._config.max_in_flight:
            raise ForebayError(Reason.QUEUE_FULL, "The router is full.", retry_after_s=1)

    def _deadline_of(self, head: Head, now: float) -> float:
        config = self._config
        asked = now + config.default_timeout_s if head.deadline is None else head.deadline
        if asked <= now:
            raise ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
        return min(asked, now + config.max_timeout_s)

    def _wait_until(self, flight: _Flight) -> float:
        return min(flight.deadline, self._clock() + self._config.no_replica_wait_s)

    async def _listed(self, flight: _Flight) -> None:
        """Nothing may be called unknown before the catalogue was read once."""
        try:
            async with asyncio.timeout(self._wait_until(flight) - self._clock()):
                await self._catalogue.ready()
        except TimeoutError:
            raise ForebayError(
                Reason.STORE_UNAVAILABLE, "The models are not known yet.", retry_after_s=1
            ) from None

    def _resolve(self, flight: _Flight, wanted: Wanted) -> None:
        head = flight.head
        sticky_key = head.metadata.get(md.SESSION) or head.request_id
        flight.record.model_version = self._resolver.model_version(
            self._catalogue.current(), wanted.model, sticky_key=sticky_key
        )

    def _place(self, flight: _Flight) -> Placement:
        view = View(flight.record.model_version, self._ledger, self._down, flight.tried)
        return place(self._fleet.replicas(), view, draw=self._rng)

    async def _place_waiting(self, flight: _Flight) -> Placement:
        until = self._wait_until(flight)
        while True:
            revision = self._fleet.revision
            placement = self._place(flight)
            remaining_s = until - self._clock()
            if placement.chosen is not None or remaining_s <= 0:
                return placement
            try:
                async with asyncio.timeout(remaining_s):
                    await self._fleet.changed(revision)
            except TimeoutError:
                continue

    def _end_place(self, flight: _Flight, placement: Placement | None) -> None:
        span, flight.place_span = flight.place_span, None
        if span is None:
            return
        if placement is not None:
            span.set_attribute("forebay.candidates", len(placement.weighed))
            if placement.chosen is not None:
                span.set_attribute("forebay.replica", placement.chosen.replica_id)
        span.end()

    def _no_replica(self, flight: _Flight) -> ForebayError:
        if self._clock() >= flight.deadline:
            return ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
        return ForebayError(
            Reason.NO_REPLICA, "No replica of the model can take requests now.", retry_after_s=1
        )

    def _route(self, flight: _Flight, replica: Replica, placement: Placement) -> Route:
        self._end_place(flight, placement)
        head, record, replica_id = flight.head, flight.record, replica.replica_id
        flight.held = replica_id
        flight.tried += (replica_id,)
        self._ledger.begin(replica_id, record.model_version)
        kept = most_telling(placement.weighed, limit=self._config.explain_candidates)
        record.attempts.append(Attempt(replica_id, kept, self._clock()))
        return Route(
            target=replica.address,
            metadata=(
                (md.REQUEST_ID, head.request_id),
                (md.MODEL, record.model_version),
                (md.ATTEMPT, str(len(record.attempts))),
                *flight.passed_on,
                *flight.trace,
            ),
            deadline=flight.deadline,
            context=flight,
        )

    def _end_attempt(self, flight: _Flight, word: str, progress: Progress) -> None:
        if flight.held is None:
            return
        record = flight.record
        self._ledger.end(flight.held, record.model_version)
        flight.held = None
        attempt = record.attempts[-1]
        attempt.outcome = word
        attempt.first_message_s = progress.first_message_s
        self._metrics.count_attempt(word)

    def _end(
        self, flight: _Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
    ) -> None:
        self._in_flight.discard(flight)
        flight.record.outcome = _word(outcome, error)
        self._count(flight, outcome, error, progress)
        self._end_place(flight, None)
        if flight.span is not None:
            _end_span(flight.span, flight.record, error, progress)

    def _count(
        self, flight: _Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
    ) -> None:
        first_s = progress.first_message_s
        self._metrics.count_request(
            # Names that callers make up must not become labels.
            model=flight.record.model_version or UNKNOWN_MODEL,
            method=flight.head.method,
            outcome=outcome,
            reason=error.reason.value if error is not None else "",
            request_s=self._clock() - flight.started_s,
            first_message_s=first_s - flight.started_s if first_s is not None else None,
            usage=progress.usage,
        )


def _check(head: Head, message: bytes) -> Wanted:
    try:
        if head.method is _GENERATE:
            wanted = check_generate(inference.GenerateRequest.FromString(message))
        elif head.method is _EMBED:
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
    return Wanted(named, wanted.operation, wanted.prompt_tokens)


def _passed_on(head: Head, wanted: Wanted) -> md.Metadata:
    """The metadata of the caller that the next hop gets, checked."""
    given = head.metadata
    priority_class = given.get(md.CLASS, md.CLASSES[0])
    if priority_class not in md.CLASSES:
        message = f"'{md.CLASS}' must be one of {', '.join(md.CLASSES)}."
        raise ForebayError(Reason.INVALID_ARGUMENT, message, param=md.CLASS)
    passed_on: md.Metadata = (
        (md.CLASS, priority_class),
        (md.PROMPT_TOKENS, str(wanted.prompt_tokens)),
    )
    for key in _LABELS:
        if key not in given:
            continue
        if not _LABEL.fullmatch(given[key]):
            message = f"'{key}' must have 1 to 256 printable ASCII characters."
            raise ForebayError(Reason.INVALID_ARGUMENT, message, param=key)
        passed_on += ((key, given[key]),)
    return passed_on


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
    return error.reason.value if error is not None else outcome


def _end_span(span: Span, record: Record, error: ForebayError | None, progress: Progress) -> None:
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
