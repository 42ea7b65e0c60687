"""The queue's invariants under any sequence of events."""

from __future__ import annotations

import copy
from collections import Counter

from forebay_batcher.core.queue import (
    Capacity,
    ClassLimits,
    Leave,
    Limits,
    PriorityClass,
    Queue,
    Request,
    Start,
)
from forebay_common.errors import Reason
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

MODELS = ("chat@1", "embed@1")
OVERDUE_S = {
    PriorityClass.REALTIME: 5.0,
    PriorityClass.BATCH: 10.0,
    PriorityClass.BACKGROUND: 30.0,
}
LIMITS = Limits(
    classes={each: ClassLimits(6, 40.0, overdue_s) for each, overdue_s in OVERDUE_S.items()},
    queued_bytes_max=150,
    kv_cache_usage_max=0.9,
)


class QueueRules(RuleBasedStateMachine):
    """Anything may happen in any order; time never goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(LIMITS)
        self.now = 0.0
        self.number = 0
        self.capacities: dict[str, Capacity] = {}
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Start] = {}
        self.ends: Counter[int] = Counter()
        self.admitted: set[int] = set()
        self.unread: dict[int, int] = {}
        """Prompt tokens of requests that wait, or run without an answer."""

    @initialize()
    def load(self) -> None:
        self.set_capacity(MODELS[0], 2, 1, 0.0)

    @rule(
        model=st.sampled_from(MODELS),
        slots=st.integers(0, 4),
        generation=st.integers(1, 3),
        usage=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    )
    def set_capacity(self, model: str, slots: int, generation: int, usage: float) -> None:
        self.capacities[model] = Capacity(generation, slots, usage, "")
        self.queue.set_capacities(self.capacities)

    @rule(model=st.sampled_from(MODELS))
    def lose_runner(self, model: str) -> None:
        self.capacities.pop(model, None)
        self.queue.set_capacities(self.capacities)

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        model=st.sampled_from(MODELS),
        priority=st.sampled_from(PriorityClass),
        patience_s=st.none() | st.floats(-1, 50),
        size=st.integers(0, 30),
        tokens=st.integers(0, 1000),
    )
    def arrive(
        self,
        *,
        model: str,
        priority: PriorityClass,
        patience_s: float | None,
        size: int,
        tokens: int,
    ) -> None:
        self.number += 1
        deadline = None if patience_s is None else self.now + patience_s
        request = Request(self.number, "", model, priority, size, self.now, deadline, tokens)
        if self.queue.offer(request, self.now) is None:
            self.waiting[self.number] = request
            self.admitted.add(self.number)
            self.unread[self.number] = tokens

    @rule(
        model=st.sampled_from(MODELS),
        priority=st.sampled_from(PriorityClass),
        waited_s=st.just(0.0) | st.floats(0, 50),
        patience_s=st.none() | st.floats(-1, 50),
        size=st.integers(0, 30),
        tokens=st.integers(0, 1000),
    )
    def arrive_where_a_slot_may_be_free(
        self,
        *,
        model: str,
        priority: PriorityClass,
        waited_s: float,
        patience_s: float | None,
        size: int,
        tokens: int,
    ) -> None:
        self.number += 1
        deadline = None if patience_s is None else self.now + patience_s
        arrived = self.now - waited_s
        request = Request(self.number, "", model, priority, size, arrived, deadline, tokens)
        by_plan = copy.deepcopy(self.queue)
        before_it = self.queue.queued(model)
        answer = self.queue.start_at_once(request, self.now)
        refusal = by_plan.offer(request, self.now)
        if refusal is not None:
            assert answer is refusal
            return
        batch = by_plan.plan_batch(self.now)
        planned = [start for start in batch.starts if start.request.model_version == model]
        if isinstance(answer, Start):
            assert before_it == 0, "nobody is passed"
            assert planned == [answer]
            self.admitted.add(self.number)
            self.ends[self.number] += 1
            self.running[self.number] = answer
            self.unread[self.number] = tokens
        else:
            assert answer is None
            assert before_it or not planned, "what could start at once does"

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.number))
        waited = self.queue.withdraw(number)
        assert (waited is not None) == (number in self.waiting)
        if waited is not None:
            self.end(number)
            del self.unread[number]

    @rule(data=st.data())
    def begin_answer(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.number))
        if number in self.running:
            told = self.queue.note_answer(self.running[number].request)
            assert told == bool(self.unread.pop(number, 0))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.number))
        assert (self.queue.release(number) is not None) == (number in self.running)
        if self.running.pop(number, None) is not None:
            self.unread.pop(number, None)

    @rule()
    def step(self) -> None:
        batch = self.queue.plan_batch(self.now)
        assert batch == self.queue.plan_batch(self.now), "a plan changes nothing"
        self.queue.apply(batch)
        for leave in batch.leaves:
            self.check_leave(leave)
            self.end(leave.request.number)
            del self.unread[leave.request.number]
        for start in batch.starts:
            self.check_start(start)
            self.end(start.request.number)
            self.running[start.request.number] = start
        assert not self.queue.plan_batch(self.now).leaves

    def check_leave(self, leave: Leave) -> None:
        request = leave.request
        match leave.reason:
            case Reason.DEADLINE_EXCEEDED:
                assert request.deadline is not None and request.deadline <= self.now
            case Reason.QUEUE_FULL:
                assert self.now >= request.arrived + 40.0
            case reason:
                assert reason is Reason.MODEL_NOT_LOADED
                assert request.model_version not in self.capacities

    def check_start(self, start: Start) -> None:
        request = start.request
        assert request.deadline is None or request.deadline > self.now
        assert start.capacity == self.capacities[request.model_version]

    def end(self, number: int) -> None:
        del self.waiting[number]
        self.ends[number] += 1

    @invariant()
    def never_more_in_flight_than_slots(self) -> None:
        for model, capacity in self.capacities.items():
            running = sum(
                start.request.model_version == model
                and start.capacity.generation == capacity.generation
                for start in self.running.values()
            )
            assert self.queue.in_flight(model) == running
            # Slots may shrink under what runs, but nothing starts beyond them.
            batch = self.queue.plan_batch(self.now)
            starts = sum(start.request.model_version == model for start in batch.starts)
            assert starts == 0 or running + starts <= capacity.slots

    @invariant()
    def every_admitted_request_ends_exactly_once(self) -> None:
        assert set(self.ends) == self.admitted - self.waiting.keys()
        assert all(count == 1 for count in self.ends.values())

    @invariant()
    def the_counts_are_right(self) -> None:
        queue = self.queue
        assert queue.waiting == len(self.waiting)
        assert queue.running == len(self.running)
        assert queue.queued_bytes == sum(r.size_bytes for r in self.waiting.values()) <= 150
        for priority in PriorityClass:
            depth = sum(r.priority is priority for r in self.waiting.values())
            assert queue.depth(priority) == depth <= 6
        for model in MODELS:
            assert queue.queued(model) == sum(
                r.model_version == model for r in self.waiting.values()
            )
            requests = [*self.waiting.values(), *(start.request for start in self.running.values())]
            assert queue.waiting_prompt_tokens(model) == sum(
                self.unread.get(request.number, 0)
                for request in requests
                if request.model_version == model
            )


TestQueueRules = QueueRules.TestCase
TestQueueRules.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(PriorityClass), st.floats(0, 60)), min_size=1, max_size=25
    ),
    flood=st.sampled_from(PriorityClass),
)
@settings(deadline=None)
def test_a_saturating_class_starves_nobody(
    arrivals: list[tuple[PriorityClass, float]], flood: PriorityClass
) -> None:
    """One slot, one start a second, and a class that always has another request waiting: at most
    2·k + 1 starts go before an overdue request, where k others are overdue longer."""
    limits = Limits(
        classes={each: ClassLimits(1000, 10_000.0, s) for each, s in OVERDUE_S.items()},
        queued_bytes_max=1,
        kv_cache_usage_max=1.0,
    )
    queue = Queue(limits)
    queue.set_capacities({MODELS[0]: Capacity(1, 1, 0.0, "")})
    coming = [
        Request(number, "", MODELS[0], priority, 0, at, None)
        for number, (priority, at) in enumerate(sorted(arrivals, key=lambda each: each[1]))
    ]
    waiting: dict[int, Request] = {}
    left = {request.number for request in coming}
    passed: dict[int, int] = {}
    bound: dict[int, int] = {}
    now = 0.0
    while left:
        arrived = [request for request in coming if request.arrived <= now]
        coming = coming[len(arrived) :]
        arrived.append(Request(1000 + int(now), "", MODELS[0], flood, 0, now, None))
        for request in arrived:
            assert queue.offer(request, now) is None
            waiting[request.number] = request
        overdue = sorted(each for each in map(due, waiting.values()) if each[0] <= now)
        for k, (_, number) in enumerate(overdue):
            bound.setdefault(number, 2 * k + 1)
        batch = queue.plan_batch(now)
        queue.apply(batch)
        [start] = batch.starts
        number = start.request.number
        queue.release(number)
        assert passed.get(number, 0) <= bound.get(number, 0), f"{number} starved"
        del waiting[number]
        left.discard(number)
        for _, other in overdue:
            passed[other] = passed.get(other, 0) + 1
            assert other not in waiting or passed[other] <= bound[other], f"{other} starves"
        now += 1


def due(request: Request) -> tuple[float, int]:
    return request.arrived + OVERDUE_S[request.priority], request.number
