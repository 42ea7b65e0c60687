"""Drives the relay: check, resolve, place, and go on elsewhere after a failure.

A request holds its place on a replica from the moment it is sent until its attempt has ended, and
has exactly one `router` span, one count and one record, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import passed_on, start_child, start_span, trace_id_of
from forebay_wire.policy import (
    Decision,
    Fail,
    Finish,
    Head,
    Method,
    Outcome,
    Policy,
    Progress,
    Resume,
    Retry,
    Route,
)
from forebay_wire.waiting import Waiting
from google.protobuf.message import DecodeError
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from forebay_router.adapters.quota import Hold, Quota
from forebay_router.config import Config
from forebay_router.core.access import Scope, Tenant
from forebay_router.core.breakers import Breakers, State, Verdict
from forebay_router.core.budgets import AttemptBudget
from forebay_router.core.explain import Attempt, Recent, Record, Wait, most_telling
from forebay_router.core.generate import check_embed, check_generate
from forebay_router.core.meter import Meter
from forebay_router.core.openai import check_openai
from forebay_router.core.output_guess import OutputGuess, estimate, used_tokens
from forebay_router.core.place import Ask, Exclusions, Placement, Replica
from forebay_router.core.quarantine import CONDEMNED, Quarantine
from forebay_router.core.refusal import RefusedError
from forebay_router.core.resolve import Resolver, Via
from forebay_router.core.resume import (
    Unresumable,
    continue_generate,
    continue_openai,
    delivered_usage,
)
from forebay_router.core.retry import PUSHBACKS, RETRIES, Failure, Most, is_budgeted, judge
from forebay_router.core.retry import Verdict as Next
from forebay_router.core.shadow import SUCCEEDED, Answered, tokens_of
from forebay_router.core.tiers import (
    Choice,
    Classifier,
    Tiers,
    TimeBox,
    choose,
    choose_by_length,
    choose_default,
)
from forebay_router.core.wanted import MAX_MODEL_CHARS, Wanted, digest_of
from forebay_router.flight import Flight, Try
from forebay_router.gate import Gate
from forebay_router.metrics import UNKNOWN_MODEL, Metrics
from forebay_router.ports import CatalogueSource, ColdModels, ReplicaSource
from forebay_router.shadow_loop import Copy

# To look a member up in its class takes longer than a comparison.
_GENERATE, _EMBED, _CALL_OPENAI = Method.GENERATE, Method.EMBED, Method.CALL_OPENAI
_SERVER = SpanKind.SERVER
_WELL, _FAULT, _NOTHING = Verdict.WELL, Verdict.FAULT, Verdict.NOTHING
_INFERENCE = Scope.INFERENCE
_LABEL = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")
_TOLD_EVERY_S = 1.0
_OF_CONTINUATIONS = {Reason.UNSUPPORTED, Reason.INVALID_ARGUMENT, Reason.BODY_TOO_LARGE}
_NEVER_RAN = {*PUSHBACKS, "INVALID_ARGUMENT"}


class RouterPolicy(Policy):
    """The router's policy for its relay."""

    def __init__(
        self,
        catalogue: CatalogueSource,
        fleet: ReplicaSource,
        config: Config,
        *,
        gate: Gate,
        cold: ColdModels,
        breakers: Breakers,
        metrics: Metrics,
        recent: Recent,
        quota: Quota | None,
        classifiers: Mapping[str, Classifier],
        offer_copy: Callable[[Copy], None],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._resolver = Resolver()
        self._fleet = fleet
        self._placer = fleet.placer
        self._down = fleet.down
        self._gate = gate
        self._cold = cold
        self._breakers = breakers
        self._metrics = metrics
        self._recent = recent
        self._quota = quota
        self._classifiers = classifiers
        self._offer = offer_copy
        self._time_box = TimeBox(
            limit_s=config.tier_time_ms / 1000,
            overruns=config.tier_overruns,
            pause_s=config.tier_pause_s,
        )
        self._guess = OutputGuess(default=config.quota_default_output_tokens)
        self._config = config
        self._rng = rng
        self._clock = clock
        self._most = Most(config.max_attempts, config.max_resumes)
        self._retries = AttemptBudget(share=config.retry_share, per_s=config.retries_per_s)
        self._hedges = AttemptBudget(share=config.hedge_share, per_s=0.0)
        self._hedge_s = config.hedge_after_ms / 1000 or None
        self._first_s = config.first_message_timeout_s or None
        self._silence_s = config.silence_timeout_s or None
        self._kept_bytes = config.max_resume_bytes if config.max_resumes else 0
        self._most_message_bytes = config.max_body_bytes + config.max_resume_bytes
        self._quarantine = Quarantine(most=config.max_suspects, kept_s=config.quarantine_s)
        self._digest_key = secrets.token_bytes(16)
        self._in_flight: set[Flight] = set()
        metrics.watch_requests(lambda: len(self._in_flight))

    # --- Admission -----------------------------------------------------------------------------

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        """See `forebay_wire.policy.Policy`. A request waits for the first catalogue, for a replica
        to appear, or for its model to be loaded."""
        flight = self._begin(head, message)
        try:
            self._check_room()
            identity = self._gate.identify(head.metadata)
            if _INFERENCE not in identity.scopes:
                identity.require(_INFERENCE)
            flight.deadline = self._deadline_of(head, flight.started_s)
            flight.wanted = wanted = _check(head, message)
            self._note(flight, wanted, identity.tenant)
            if flight.span is not None:
                flight.span.set_attribute("gen_ai.operation.name", wanted.operation)
            if not self._catalogue.is_listed:
                return Waiting(lambda: self._admit_later(flight))
            self._resolve(flight)
            flight.place_span = start_child("place", flight.span)
            placement = self._place(flight, flight.tried)
            if placement.chosen is None or self._cold.is_awaited(flight.record.model_version):
                return Waiting(lambda: self._admit_later(flight))
            if identity.tenant.is_limited and not self._reserve_here(flight):
                return Waiting(lambda: self._admit_later(flight))
            self._enter(flight)
            return self._route(flight, placement.chosen, placement)
        except Exception as failure:
            raise self._refuse(flight, failure) from None

    def _note(self, flight: Flight, wanted: Wanted, tenant: Tenant) -> None:
        """What the tenant may ask, it asks in its own name."""
        flight.tenant = tenant
        head, record = flight.head, flight.record
        record.requested_model = wanted.model
        record.prompt_tokens = wanted.prompt_tokens
        record.priority_class = priority_class = _class_of(head)
        if tenant.may_ask is not None or tenant.priority_classes:
            tenant.check(wanted.model, priority_class)
        named = head.metadata.get(md.TENANT) if self._gate.is_open else tenant.name
        record.tenant = named or tenant.name
        flight.passed_on = (
            (md.CLASS, priority_class),
            *_label(md.TENANT, named),
            *_label(md.SESSION, head.metadata.get(md.SESSION)),
        )

    async def _admit_later(self, flight: Flight) -> Route:
        try:
            self._check_room()
            self._enter(flight)
            if not flight.record.model_version:
                await self._listed(flight)
                self._resolve(flight)
                flight.place_span = start_child("place", flight.span)
            if flight.tenant is not None and flight.tenant.is_limited:
                await self._reserve(flight)
            placement = await self._place_waiting(flight, "replica")
            if placement.chosen is None:
                self._end_place(flight, placement)
                raise self._no_replica(flight)
            return self._route(flight, placement.chosen, placement)
        except asyncio.CancelledError:
            self._end(flight, Outcome.CANCELLED, None, Progress())
            raise
        except Exception as failure:
            raise self._refuse(flight, failure) from None

    def _begin(self, head: Head, message: bytes) -> Flight:
        span = start_span("router", head.metadata, kind=_SERVER)
        if span is not None:
            span.set_attribute("forebay.request_id", head.request_id)
        trace = passed_on(head.metadata, span)
        began_s = self._clock()
        record = Record(head.request_id, trace_id_of(trace), began_s=began_s)
        return Flight(head, message, span, trace, record, began_s)

    def _enter(self, flight: Flight) -> None:
        self._in_flight.add(flight)
        self._recent.add(flight.record)
        self._retries.pay_in()
        if self._hedge_s is not None:
            self._hedges.pay_in()

    def _refuse(self, flight: Flight, failure: Exception) -> Exception:
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

    async def _listed(self, flight: Flight) -> None:
        """Nothing may be called unknown before the catalogue was read once."""
        began_s = self._clock()
        until = min(flight.deadline, began_s + self._config.no_replica_wait_s)
        try:
            async with asyncio.timeout(until - began_s):
                await self._catalogue.ready()
            flight.record.waits.append(Wait("catalogue", self._clock() - began_s))
        except TimeoutError:
            raise ForebayError(
                Reason.STORE_UNAVAILABLE, "The models are not known yet.", retry_after_s=1
            ) from None

    def _resolve(self, flight: Flight) -> None:
        head, wanted = flight.head, flight.wanted
        assert wanted is not None, "a request is checked first"
        sticky_key = head.metadata.get(md.SESSION) or head.request_id
        catalogue, name, record = self._catalogue.current(), wanted.model, flight.record
        tiers = catalogue.tiers.get(name) if catalogue.tiers else None
        if tiers is not None and name not in catalogue.models:
            choice = self._choose_tier(tiers, wanted)
            name, record.tier_reason = choice.target, f"{choice.tier}: {choice.reason}"
        record.model_version, via = self._resolver.resolve(catalogue, name, sticky_key=sticky_key)
        record.via = Via.TIER if tiers is not None else via
        if catalogue.shadows:
            shadow = catalogue.shadows.get(record.model_version.partition("@")[0])
            if shadow is not None and shadow.model_version != record.model_version:
                flight.shadow = shadow.model_version if shadow.takes(record.request_id) else ""
        if self._quarantine.has_suspects:
            self._look_up(flight)

    def _choose_tier(self, tiers: Tiers, wanted: Wanted) -> Choice:
        """Choose between a small and a large model; whatever fails, the default one."""
        name, now = tiers.classifier, self._clock()
        choice = choose_by_length(tiers, wanted.prompt_tokens)
        if choice is None and not self._time_box.is_open(name, now):
            choice = choose_default(tiers, f"{name} was too slow lately")
        elif choice is None:
            choice = choose(tiers, wanted, self._classifiers)
            took_s = self._clock() - now
            if self._time_box.took(name, took_s, now):
                choice = choose_default(tiers, f"{name} took {1000 * took_s:.0f} ms")
        self._metrics.count_tier(name, choice)
        return choice

    # --- Limits --------------------------------------------------------------------------------

    def _reserve_here(self, flight: Flight) -> bool:
        """Take what a request may use out of its tenant's limits, where they are kept here.

        Returns:
            Whether they are.
        """
        quota, tenant, wanted = self._quota, flight.tenant, flight.wanted
        assert quota is not None and tenant is not None and wanted is not None, "it is limited"
        account, meters = quota.meters_for(tenant, wanted.model)
        if not meters:
            return True
        if not quota.decides(account):
            return False
        hold = quota.reserve(account, meters, self._estimate(wanted, meters))
        assert isinstance(hold, Hold), "it decides"
        flight.hold = hold
        return True

    async def _reserve(self, flight: Flight) -> None:
        """Take what a request may use out of its tenant's limits, wherever they are kept."""
        quota, tenant, wanted = self._quota, flight.tenant, flight.wanted
        assert quota is not None and tenant is not None and wanted is not None, "it is limited"
        account, meters = quota.meters_for(tenant, wanted.model)
        if not meters:
            return
        got = quota.reserve(account, meters, self._estimate(wanted, meters))
        if isinstance(got, Hold):
            flight.hold = got
            return
        began_s = self._clock()
        try:
            flight.hold = await got
        finally:
            flight.record.waits.append(Wait("quota", self._clock() - began_s))

    def _estimate(self, wanted: Wanted, meters: Sequence[Meter]) -> int:
        guess = self._guess.expected(wanted.model) if wanted.max_tokens is None else 0
        return estimate(wanted.prompt_tokens, wanted.answers, wanted.max_tokens, guess, meters)

    def _settle(self, flight: Flight, hold: Hold, progress: Progress, *, is_whole: bool) -> None:
        """Give back what a request did not use."""
        quota, wanted, usage = self._quota, flight.wanted, progress.usage
        assert quota is not None and wanted is not None, "it was reserved"
        if not flight.attempts:
            quota.release(hold)
        elif usage is None and not progress.messages and not self._ran(flight):
            quota.settle(hold, 0)
        else:
            quota.settle(hold, used_tokens(usage, wanted.prompt_tokens, progress.messages))
        if is_whole and usage is not None and wanted.max_tokens is None:
            self._guess.learn(wanted.model, usage.completion_tokens // max(1, wanted.answers))

    @staticmethod
    def _ran(flight: Flight) -> bool:
        """Whether any replica may have worked for it, though it said nothing."""
        return any(attempt.outcome not in _NEVER_RAN for attempt in flight.record.attempts)

    # --- Placement -----------------------------------------------------------------------------

    def _place(self, flight: Flight, tried: Container[str]) -> Placement:
        now = self._clock()
        self._breakers.advance(now)
        ask = flight.ask
        if ask is None:
            wanted = flight.wanted
            assert wanted is not None, "a request is checked first"
            ask = flight.ask = Ask(
                flight.record.model_version,
                wanted.prompt_tokens,
                wanted.prompt.prefix_bytes,
                flight.record.priority_class,
                # Of an answer that comes whole, the first message is the last.
                wanted.streams or wanted.max_tokens == 0,
            )
        ejected = self._breakers.excluded
        occupied = self._quarantine.occupied if flight.digest is not None else ()
        exclusions = Exclusions(self._down, ejected, tried, occupied)
        placement = self._placer.choose(ask, now, self._rng, exclusions)
        if placement.chosen is None and ejected:
            # One that was not well is better than none: the others may have gone meanwhile.
            desperate = Exclusions(self._down, (), tried, occupied)
            placement = self._placer.choose(ask, now, self._rng, desperate)
        return placement

    async def _place_waiting(self, flight: Flight, what: str) -> Placement:
        """Wait for a replica: a little where one is missing, to the deadline where a model is being
        loaded. Note what for."""
        began_s = self._clock()
        wait = Wait(what, 0.0)
        try:
            return await self._await_place(flight, began_s, wait)
        finally:
            wait.waited_s = self._clock() - began_s
            flight.record.waits.append(wait)

    async def _await_place(self, flight: Flight, began_s: float, wait: Wait) -> Placement:
        version = flight.record.model_version
        until = min(flight.deadline, began_s + self._config.no_replica_wait_s)
        tried: Container[str] = flight.tried
        with contextlib.ExitStack() as held:
            gate: asyncio.Semaphore | None = None
            if self._cold.is_awaited(version):
                # Nobody overtakes those that came before.
                gate = held.enter_context(self._cold.hold(version))
            while True:
                revision = self._fleet.revision
                placement = self._place(flight, tried)
                if placement.chosen is not None:
                    if gate is None or await self._pass(flight, gate, until):
                        return placement if gate is None else self._place(flight, tried)
                    return Placement(None, placement.candidates)
                if gate is None and self._config.load_on_demand and self._cold.is_cold(version):
                    gate = held.enter_context(self._cold.hold(version))
                if gate is not None or self._cold.is_coming(version):
                    until = min(flight.deadline, began_s + self._config.cold_wait_s)
                    wait.what, wait.detail = "model", self._cold.phase(version)
                    if (error := self._cold.failure(version)) is not None:
                        raise error
                    self._tell(flight, began_s)
                now = self._clock()
                if now >= until:
                    return placement
                try:
                    async with asyncio.timeout(min(until - now, _TOLD_EVERY_S)):
                        await self._fleet.changed(revision)
                except TimeoutError:
                    pass
                else:
                    # Whoever failed before may be another by now.
                    tried = ()

    async def _pass(self, flight: Flight, gate: asyncio.Semaphore, until: float) -> bool:
        """Take a turn among those that waited for the same model."""
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await gate.acquire()
        except TimeoutError:
            return False
        flight.gate = gate
        return True

    def _open_gate(self, flight: Flight) -> None:
        gate, flight.gate = flight.gate, None
        if gate is not None:
            gate.release()

    def _tell(self, flight: Flight, since_s: float) -> None:
        tell, wanted = flight.head.tell, flight.wanted
        if tell is not None and wanted is not None and wanted.streams and not flight.continuation:
            version = flight.record.model_version
            tell(version, self._cold.phase(version), self._clock() - since_s)

    def _end_place(self, flight: Flight, placement: Placement | None) -> None:
        span, flight.place_span = flight.place_span, None
        if span is None:
            return
        if placement is not None:
            span.set_attribute("forebay.candidates", len(placement.candidates))
            if placement.chosen is not None:
                span.set_attribute("forebay.replica", placement.chosen.replica_id)
        span.end()

    def _no_replica(self, flight: Flight) -> ForebayError:
        if self._clock() >= flight.deadline:
            return ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")
        version = flight.record.model_version
        is_coming = self._cold.is_coming(version)
        return ForebayError(
            Reason.NO_REPLICA,
            "The model is still being loaded."
            if is_coming
            else "No replica of the model can take requests now.",
            retry_after_s=self._cold.remaining_s(version) if is_coming else 1,
        )

    def _route(
        self, flight: Flight, replica: Replica, placement: Placement, kind: str = "first"
    ) -> Route:
        self._end_place(flight, placement)
        head, record, replica_id = flight.head, flight.record, replica.replica_id
        wanted = flight.wanted
        assert wanted is not None, "a request is checked first"
        now = self._clock()
        assert flight.ask is not None, "a request was placed"
        ticket = self._placer.begin(flight.ask, placement, now)
        is_probe = self._breakers.sent(replica_id)
        if flight.digest is not None:
            self._quarantine.enter(replica_id, flight.digest)
        flight.tried += (replica_id,)
        kept = most_telling(placement.candidates, limit=self._config.explain_candidates)
        attempt = Attempt(
            replica_id,
            kept,
            now,
            kind=kind,
            predicted_ms=placement.predicted_ms,
            placeable=placement.placeable,
        )
        record.attempts.append(attempt)
        this = Try(flight, replica_id, attempt, ticket, is_probe)
        flight.tries.append(this)
        if kind == "resume":
            flight.resumes += 1
        else:
            flight.attempts += 1
        return Route(
            target=replica.address,
            metadata=(
                (md.REQUEST_ID, head.request_id),
                (md.MODEL, record.model_version),
                (md.ATTEMPT, str(len(record.attempts))),
                # What is cached there waits for nobody, nor does anybody wait for it.
                (md.PROMPT_TOKENS, str(max(1, wanted.prompt_tokens - placement.cached_tokens))),
                *flight.passed_on,
                *flight.trace,
            ),
            deadline=flight.deadline,
            message=flight.continuation,
            context=this,
            kept_bytes=self._kept_bytes if wanted.is_resumable else 0,
            first_message_s=self._first_s,
            silence_s=self._silence_s,
            hedge_s=self._hedge_s,
            tells_delivered=bool(flight.shadow),
            answer=flight.hold.answer if flight.hold is not None else (),
        )

    # --- What becomes of attempts --------------------------------------------------------------

    def on_first(self, head: Head, route: Route, progress: Progress) -> None:
        """See `forebay_wire.policy.Policy`."""
        this: Try = route.context
        this.attempt.first_message_s = now = self._clock()
        self._placer.first(this.ticket, now)
        flight = this.flight
        if this.is_probe:
            self._judge(this, _WELL, now)
        if flight.gate is not None:
            self._open_gate(flight)
        if flight.digest is not None:
            self._release_suspect(this)
            self._quarantine.clear(flight.digest)
            flight.digest = None

    def hedge(self, head: Head, route: Route, progress: Progress) -> Route | None:
        """See `forebay_wire.policy.Policy`."""
        this: Try = route.context
        flight = this.flight
        if flight.digest is not None or not self._hedges.take(self._clock()):
            return None
        placement = self._place(flight, flight.tried)
        if placement.chosen is None:
            return None
        self._metrics.count_hedge()
        return self._route(flight, placement.chosen, placement, "hedge")

    def on_dropped(self, head: Head, route: Route, error: ForebayError | None) -> None:
        """See `forebay_wire.policy.Policy`."""
        this: Try = route.context
        self._end_try(this, error.reason.value if error is not None else "dropped", error)

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        """See `forebay_wire.policy.Policy`."""
        this: Try = route.context
        flight = this.flight
        self._end_try(this, error.reason.value, error)
        if error.reason is Reason.REPLICA_LOST and not progress.attempt_messages:
            self._suspect(flight, progress, this.replica_id)
        failure = Failure(
            reason=error.reason.value,
            replica_fault=error.status.replica_fault,
            messages=progress.messages,
            is_resumable=progress.delivered is not None,
            attempts=flight.attempts,
            resumes=flight.resumes,
        )
        if flight.broken_by is not None and error.reason in _OF_CONTINUATIONS:
            # The caller's request was right before: what went wrong is that a replica was lost.
            error = flight.broken_by
        following = judge(failure, self._most)
        if following is Next.RESUME:
            return await self._resume(flight, error, progress)
        if following not in RETRIES or self._is_condemned(flight):
            return Fail(self._final(flight, error))
        if is_budgeted(error.reason.value) and not self._retries.take(self._clock()):
            return Fail(_for_caller(error))
        placement = await self._place_again(flight, waits=following is Next.RETRY_WAITING)
        if placement is None or placement.chosen is None:
            return Fail(_for_caller(error))
        self._metrics.count_retry(error.reason.value)
        return Retry(self._route(flight, placement.chosen, placement, "retry"))

    async def _resume(self, flight: Flight, error: ForebayError, progress: Progress) -> Decision:
        assert progress.delivered is not None, "judged resumable"
        is_openai = flight.head.method is _CALL_OPENAI
        continued = continue_openai if is_openai else continue_generate
        continuation = continued(
            flight.message, progress.delivered, most_bytes=self._most_message_bytes
        )
        if continuation is Unresumable.COMPLETE:
            self._metrics.count_resume(continuation)
            usage = delivered_usage(progress.delivered, is_openai=is_openai)
            told = md.Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
            return Finish(((md.USAGE, told.encode()),))
        if isinstance(continuation, Unresumable):
            self._metrics.count_resume(continuation)
            return Fail(error)
        if self._is_condemned(flight):
            return Fail(self._final(flight, error))
        flight.continuation, flight.broken_by = continuation, error
        placement = await self._place_again(flight, waits=True)
        if placement is None or placement.chosen is None:
            self._metrics.count_resume("no_replica")
            return Fail(error)
        self._metrics.count_resume("resumed")
        return Resume(self._route(flight, placement.chosen, placement, "resume"))

    async def _place_again(self, flight: Flight, *, waits: bool) -> Placement | None:
        flight.place_span = start_child("place", flight.span)
        try:
            placement = (
                await self._place_waiting(flight, "retry")
                if waits
                else self._place(flight, flight.tried)
            )
        except ForebayError:
            self._end_place(flight, None)
            return None
        if placement.chosen is None:
            self._end_place(flight, placement)
        return placement

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        """See `forebay_wire.policy.Policy`."""
        this: Try = route.context
        flight = this.flight
        word = _word(outcome, error)
        for running in tuple(flight.tries):
            self._end_try(running, word, error, is_well=outcome is Outcome.SUCCEEDED)
        self._end(flight, outcome, error, progress)

    def _end_try(
        self, this: Try, word: str, error: ForebayError | None, *, is_well: bool = False
    ) -> None:
        flight = this.flight
        if this not in flight.tries:
            return
        flight.tries.remove(this)
        replica_id, now = this.replica_id, self._clock()
        self._placer.end(this.ticket, now, succeeded=is_well)
        this.attempt.outcome = word
        self._metrics.count_attempt(word)
        if flight.digest is not None:
            self._release_suspect(this)
        verdict = _WELL if is_well else _NOTHING
        if error is not None:
            if error.reason is Reason.REPLICA_LOST:
                verdict = self._breakers.lost(replica_id, this.attempt.started_s, now)
                self._fleet.mark_down(replica_id)
            elif error.status.replica_fault:
                verdict = _FAULT
        self._judge(this, verdict, now)

    def _judge(self, this: Try, verdict: Verdict, now: float) -> None:
        """Tell the breaker what an attempt says of its replica."""
        replica_id, version = this.replica_id, this.flight.record.model_version
        is_probe, this.is_probe = this.is_probe, False
        state = self._breakers.ended(
            replica_id, verdict, now, lambda: self._peers(version), is_probe=is_probe
        )
        if state is not None:
            if state is State.CLOSED:
                self._placer.returned(replica_id, now)
            self._metrics.count_breaker(state)
        if state is not None or is_probe:
            self._fleet.nudge()

    def _peers(self, version: str) -> tuple[int, int]:
        """Replicas that serve a model version, and how many of them breakers exclude."""
        ids = [
            replica.replica_id
            for replica in self._fleet.replicas()
            if replica.takes_traffic and not replica.draining and version in replica.models
        ]
        return len(ids), sum(each in self._breakers.excluded for each in ids)

    # --- Suspects ------------------------------------------------------------------------------

    def _digest_of(self, flight: Flight) -> bytes:
        version = flight.record.model_version
        return digest_of(flight.message, version, key=self._digest_key)

    def _look_up(self, flight: Flight) -> None:
        """Refuse what has ended runners before, and let suspects go alone."""
        digest = self._digest_of(flight)
        deaths = self._quarantine.deaths(digest, self._clock())
        if deaths >= CONDEMNED:
            raise _condemned()
        if deaths:
            flight.digest = digest

    def _suspect(self, flight: Flight, progress: Progress, replica_id: str) -> None:
        # Only a batcher that lives can tell that its runner died.
        if not any(key == md.REPLICA for key, _ in progress.trailing):
            return
        digest = flight.digest or self._digest_of(flight)
        death = replica_id, self._breakers.lost_at(replica_id)
        self._quarantine.suspect(digest, self._clock(), death)
        flight.digest = digest

    def _is_condemned(self, flight: Flight) -> bool:
        digest = flight.digest
        return digest is not None and self._quarantine.deaths(digest, self._clock()) >= CONDEMNED

    def _final(self, flight: Flight, error: ForebayError) -> ForebayError:
        return _condemned() if self._is_condemned(flight) else _for_caller(error)

    def _release_suspect(self, this: Try) -> None:
        digest = this.flight.digest
        if digest is not None and self._quarantine.leave(this.replica_id, digest):
            self._fleet.nudge()

    # --- The end -------------------------------------------------------------------------------

    def _end(
        self, flight: Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
    ) -> None:
        self._in_flight.discard(flight)
        if flight.gate is not None:
            self._open_gate(flight)
        hold, flight.hold = flight.hold, None
        if hold is not None:
            self._settle(flight, hold, progress, is_whole=outcome is Outcome.SUCCEEDED)
        if flight.shadow and flight.attempts and outcome is not Outcome.CANCELLED:
            self._offer_copy(flight, error, progress)
        flight.record.outcome = _word(outcome, error)
        flight.record.ended_s = self._clock()
        self._count(flight, outcome, error, progress)
        self._end_place(flight, None)
        if flight.span is not None:
            _end_span(flight.span, flight.record, error, progress)

    def _offer_copy(self, flight: Flight, error: ForebayError | None, progress: Progress) -> None:
        """Have the version that is tried answer the same."""
        method, usage, first_s = flight.head.method, progress.usage, progress.first_message_s
        primary = Answered(
            SUCCEEDED if error is None else error.reason.value,
            self._clock() - flight.started_s,
            first_s - flight.started_s if first_s is not None else None,
            usage.completion_tokens if usage is not None else None,
            tokens_of(progress.delivered, is_openai=method is _CALL_OPENAI),
        )
        self._offer(
            Copy(
                flight.shadow,
                method,
                flight.message,
                flight.record.request_id,
                flight.record.prompt_tokens,
                primary,
            )
        )

    def _count(
        self, flight: Flight, outcome: Outcome, error: ForebayError | None, progress: Progress
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
    wanted.model = named
    return wanted


def _class_of(head: Head) -> str:
    priority_class = head.metadata.get(md.CLASS)
    if priority_class is None:
        return md.CLASSES[0]
    if priority_class not in md.CLASSES:
        message = f"'{md.CLASS}' must be one of {', '.join(md.CLASSES)}."
        raise ForebayError(Reason.INVALID_ARGUMENT, message, param=md.CLASS)
    return priority_class


def _label(key: str, value: str | None) -> md.Metadata:
    """Metadata of the caller that goes on, checked."""
    if value is None:
        return ()
    if not _LABEL.fullmatch(value):
        message = f"'{key}' must have 1 to 256 printable ASCII characters."
        raise ForebayError(Reason.INVALID_ARGUMENT, message, param=key)
    return ((key, value),)


def _as_error(failure: BaseException) -> ForebayError:
    if isinstance(failure, ForebayError):
        return failure
    if isinstance(failure, RefusedError):
        return ForebayError(Reason(failure.reason), failure.message, param=failure.param)
    return ForebayError(Reason.INTERNAL, "An unexpected error happened here.")


def _condemned() -> ForebayError:
    return ForebayError(
        Reason.QUARANTINED,
        "The request has ended the runners it was given to, and is not tried again.",
    )


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
