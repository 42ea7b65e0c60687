"""What the router's policy answers at once, and what it holds for a request that waits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_router.config import Config
from forebay_router.core.breakers import Breakers, State, Verdict
from forebay_router.core.explain import Recent
from forebay_router.core.generate import check_generate
from forebay_router.core.marks import Marks
from forebay_router.core.place import ModelLoad, Placer, Replica
from forebay_router.core.resolve import Catalogue, Model
from forebay_router.core.tiers import Tier, Tiers
from forebay_router.gate import OpenGate
from forebay_router.metrics import Metrics
from forebay_router.policy import RouterPolicy
from forebay_router.shadow_loop import Copy
from forebay_wire.policy import Fail, Head, Method, Outcome, Progress, Resume, Retry, Route
from prometheus_client import CollectorRegistry

MODEL = "chat@1"
MESSAGE = inference.GenerateRequest(model="chat", text="Hello?").SerializeToString()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Models:
    """A catalogue that is listed, or is about to be."""

    def __init__(self, *, listed: bool) -> None:
        self.is_listed = listed

    async def ready(self) -> None:
        await asyncio.sleep(0)
        self.is_listed = True

    def current(self) -> Catalogue:
        chat = Model("chat", frozenset({"1"}), {"1": 1})
        return Catalogue({"chat": chat} if self.is_listed else {}, {})


class Replicas:
    """Replicas that appear when they are told to."""

    def __init__(self, *ids: str) -> None:
        self.placer = Placer()
        self.down = Marks()
        self.revision = 0
        self.ids: list[str] = []
        self._changed = asyncio.Event()
        for each in ids:
            self._add(each)

    def replicas(self) -> Sequence[Replica]:
        load = ModelLoad(active=True, slots=4)
        return [Replica(each, f"{each}:1", True, False, {MODEL: load}) for each in self.ids]

    async def changed(self, since_revision: int) -> None:
        await self._changed.wait()

    def mark_down(self, replica_id: str) -> None:
        self.down.mark(replica_id)

    def nudge(self) -> None:
        """Nobody waits for it here."""

    def appear(self, replica_id: str) -> None:
        self._add(replica_id)
        self.revision += 1
        self._changed.set()

    def _add(self, replica_id: str) -> None:
        self.ids.append(replica_id)
        self.placer.update(self.replicas()[-1], 0.0)


class NoneCold:
    """Every model is somewhere."""

    def is_cold(self, model_version: str) -> bool:
        return False

    def is_coming(self, model_version: str) -> bool:
        return False

    def is_awaited(self, model_version: str) -> bool:
        return False

    def hold(self, model_version: str) -> contextlib.AbstractContextManager[asyncio.Semaphore]:
        raise AssertionError("nothing is cold")

    def failure(self, model_version: str) -> ForebayError | None:
        return None

    def phase(self, model_version: str) -> str:
        return ""

    def remaining_s(self, model_version: str) -> float:
        return 1.0


class Router:
    """A policy and what is around it."""

    def __init__(
        self,
        *replica_ids: str,
        listed: bool = True,
        max_in_flight: int = 10,
        no_replica_wait_s: float = 60,
    ) -> None:
        self.registry = CollectorRegistry()
        self.fleet = Replicas(*replica_ids)
        self.recent = Recent(limit=10)
        self.breakers = Breakers()
        self.copies: list[Copy] = []
        config = Config(open=True, max_in_flight=max_in_flight, no_replica_wait_s=no_replica_wait_s)
        self.policy = RouterPolicy(
            Models(listed=listed),
            self.fleet,
            config,
            gate=OpenGate(),
            cold=NoneCold(),
            breakers=self.breakers,
            metrics=Metrics(self.registry),
            recent=self.recent,
            quota=None,
            classifiers={},
            offer_copy=self.copies.append,
            rng=random.Random(1),
            clock=lambda: 100.0,
        )

    def admitted(self, head: Head) -> Route:
        route = self.policy.admit(head, MESSAGE)
        assert isinstance(route, Route), "it was answered at once"
        return route

    async def waits(self, head: Head) -> Route:
        answer = self.policy.admit(head, MESSAGE)
        assert not isinstance(answer, Route), "it waits"
        return await answer

    def outcome(self, head: Head) -> str | None:
        record = self.recent.get(head.request_id)
        return None if record is None else record.outcome

    def in_flight(self) -> float | None:
        return self.registry.get_sample_value("forebay_router_in_flight")

    def ended(self, outcome: str, reason: str = "", model: str = MODEL) -> float | None:
        labels = {"model": model, "method": "Generate", "outcome": outcome, "reason": reason}
        return self.registry.get_sample_value("forebay_router_requests_total", labels)


def a_head(request_id: str = "r", deadline: float | None = 200.0) -> Head:
    metadata = {"forebay-tenant": "t", "traceparent": TRACEPARENT, "x-of-the-caller": "no"}
    return Head(Method.GENERATE, metadata, deadline, request_id)


def as_sent(route: Route) -> tuple[object, ...]:
    return route.target, route.metadata, route.deadline, route.message


def test_a_request_that_can_be_placed_is_answered_at_once() -> None:
    router = Router("a")
    route = router.admitted(a_head())
    assert route.target == "a:1"
    assert route.deadline == 200.0
    assert route.metadata == (
        (md.REQUEST_ID, "r"),
        (md.MODEL, MODEL),
        (md.ATTEMPT, "1"),
        (md.PROMPT_TOKENS, "2"),
        (md.CLASS, "REALTIME"),
        (md.TENANT, "t"),
        (md.TRACEPARENT, TRACEPARENT),
    )
    assert router.in_flight() == 1
    assert router.outcome(a_head()) == ""
    assert router.fleet.placer.in_flight("a") == 1
    router.policy.on_end(a_head(), route, Outcome.SUCCEEDED, None, Progress(messages=1))
    assert router.in_flight() == 0
    assert router.outcome(a_head()) == "succeeded"
    assert router.fleet.placer.in_flight("a") == 0
    assert router.ended("succeeded") == 1


async def test_a_request_that_waited_goes_where_one_goes_that_did_not() -> None:
    at_once = Router("a").admitted(a_head())
    not_listed = await Router("a", listed=False).waits(a_head())
    empty = Router()
    asyncio.get_running_loop().call_soon(empty.fleet.appear, "a")
    no_replica = await empty.waits(a_head())
    assert as_sent(at_once) == as_sent(not_listed) == as_sent(no_replica)
    empty.policy.on_end(a_head(), no_replica, Outcome.SUCCEEDED, None, Progress())
    assert empty.in_flight() == 0
    assert empty.ended("succeeded") == 1


@pytest.mark.parametrize("listed", [True, False])
async def test_a_wait_that_never_began_holds_nothing(listed: bool) -> None:
    router = Router(listed=listed)
    waiting = asyncio.create_task(router.waits(a_head()))
    waiting.cancel()
    await asyncio.wait([waiting])
    answer = router.policy.admit(a_head("dropped"), MESSAGE)
    assert not isinstance(answer, Route)
    del answer
    assert router.in_flight() == 0
    assert len(router.recent) == 0


async def test_a_cancelled_wait_is_counted_once_and_forgotten() -> None:
    router = Router()
    waiting = asyncio.create_task(router.waits(a_head()))
    while router.in_flight() == 0:
        await asyncio.sleep(0)
    assert router.outcome(a_head()) == ""
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert router.in_flight() == 0
    assert router.outcome(a_head()) == "cancelled"
    assert router.ended("cancelled") == 1


async def test_a_wait_for_a_replica_ends_with_the_reason() -> None:
    router = Router(no_replica_wait_s=0)
    with pytest.raises(ForebayError) as caught:
        await router.waits(a_head())
    assert caught.value.reason is Reason.NO_REPLICA
    assert router.in_flight() == 0
    assert router.outcome(a_head()) == "NO_REPLICA"
    assert router.ended("failed", "NO_REPLICA") == 1


@pytest.mark.parametrize(
    ("message", "deadline", "reason"),
    [
        (b"\xff", 200.0, Reason.INVALID_ARGUMENT),
        (MESSAGE, 100.0, Reason.DEADLINE_EXCEEDED),
        (
            inference.GenerateRequest(model="other", text="x").SerializeToString(),
            200.0,
            Reason.MODEL_NOT_FOUND,
        ),
    ],
)
def test_a_refusal_comes_at_once_and_is_counted(
    message: bytes, deadline: float, reason: Reason
) -> None:
    router = Router("a")
    with pytest.raises(ForebayError) as caught:
        router.policy.admit(a_head(deadline=deadline), message)
    assert caught.value.reason is reason
    assert router.in_flight() == 0
    assert router.outcome(a_head()) == reason.value
    assert router.ended("failed", reason.value, "unknown") == 1


async def test_no_more_requests_are_in_flight_than_allowed_whether_they_wait_or_not() -> None:
    router = Router("a", max_in_flight=2)
    for n in range(2):
        router.admitted(a_head(f"r{n}"))
    with pytest.raises(ForebayError) as caught:
        router.policy.admit(a_head("more"), MESSAGE)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert router.in_flight() == 2

    router = Router(max_in_flight=2)
    waiting = [asyncio.create_task(router.waits(a_head(f"r{n}"))) for n in range(3)]
    [refused] = (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]
    failure = refused.exception()
    assert isinstance(failure, ForebayError) and failure.reason is Reason.QUEUE_FULL
    assert router.in_flight() == 2
    router.fleet.appear("a")
    await asyncio.wait(waiting)
    assert router.in_flight() == 2


async def test_where_all_others_are_gone_one_that_is_proving_itself_is_better_than_none() -> None:
    router = Router("a", "b", "c")
    for replica_id in ("a", "b"):
        for _ in range(3):
            router.breakers.ended(replica_id, Verdict.FAULT, 0.0, lambda: (9, 0))
    router.breakers.advance(50.0)
    for n in range(9):
        router.admitted(a_head(f"other-{n}"))
    assert router.breakers.excluded == {"a", "b"}
    on_c = router.admitted(a_head("on c"))
    assert on_c.target == "c:1"
    lost = ForebayError(Reason.REPLICA_LOST, "Lost.")
    decision = await router.policy.on_failure(a_head("on c"), on_c, lost, Progress())
    assert isinstance(decision, Retry)
    assert decision.route.target in {"a:1", "b:1"}


async def test_a_probe_is_over_with_its_first_message() -> None:
    router = Router("a")
    for _ in range(3):
        router.breakers.ended("a", Verdict.FAULT, 0.0, lambda: (9, 0))
    router.breakers.advance(50.0)
    for _ in range(3):
        route = router.admitted(a_head())
        assert router.breakers.excluded == {"a"}
        router.policy.on_first(a_head(), route, Progress())
        assert not router.breakers.excluded
    assert router.breakers.state("a") is State.CLOSED


def test_while_a_slow_classifier_is_left_alone_length_still_decides_and_choices_count() -> None:
    router = Router("a")
    tiers = Tiers("small", "large", "slow", default=Tier.SMALL, small_tokens_most=100)
    policy = router.policy
    for _ in range(9):
        policy._time_box.took("slow", 60.0, 100.0)
    for text, tier in (("word " * 1000, Tier.LARGE), ("word", Tier.SMALL)):
        wanted = check_generate(inference.GenerateRequest(model="auto", text=text))
        assert policy._choose_tier(tiers, wanted).tier is tier
    counted = {
        (sample.labels["tier"], sample.labels["by"]): sample.value
        for family in router.registry.collect()
        for sample in family.samples
        if sample.name == "forebay_router_tier_choices_total"
    }
    assert counted == {("large", "classifier"): 1, ("small", "default"): 1}


async def test_a_continuation_that_is_refused_ends_with_what_broke_the_answer() -> None:
    router = Router("a", "b")
    first = router.admitted(a_head())
    part = inference.GenerateResponse(
        header=inference.AnswerHeader(request_id="r", model_version=MODEL),
        text_delta="Hi",
        token_ids=[1],
    )
    progress = Progress(messages=1, attempt_messages=1, delivered=[part.SerializeToString()])
    lost = ForebayError(Reason.REPLICA_LOST, "Lost.")
    decision = await router.policy.on_failure(a_head(), first, lost, progress)
    assert isinstance(decision, Resume)
    refused = ForebayError(Reason.UNSUPPORTED, "This back end goes on with no answer.")
    last = await router.policy.on_failure(a_head(), decision.route, refused, progress)
    assert last == Fail(lost)


async def test_a_retry_holds_one_place_at_a_time() -> None:
    router = Router("a", "b")
    first = router.admitted(a_head())
    lost = ForebayError(Reason.REPLICA_LOST, "Lost.")
    decision = await router.policy.on_failure(a_head(), first, lost, Progress())
    assert isinstance(decision, Retry)
    assert decision.route.target != first.target
    assert (md.ATTEMPT, "2") in decision.route.metadata
    held = [router.fleet.placer.in_flight(each) for each in ("a", "b")]
    assert sorted(held) == [0, 1]
    failed = ForebayError(Reason.INTERNAL, "Broken.")
    last = await router.policy.on_failure(a_head(), decision.route, failed, Progress())
    assert last == Fail(failed)
    router.policy.on_end(a_head(), decision.route, Outcome.FAILED, failed, Progress())
    assert router.in_flight() == 0
    assert [router.fleet.placer.in_flight(each) for each in ("a", "b")] == [0, 0]
