"""Who goes next."""

from __future__ import annotations

import dataclasses
import math

from forebay_batcher.core.queue import (
    Capacity,
    ClassLimits,
    Limits,
    PriorityClass,
    Queue,
    Request,
)
from forebay_common.errors import Reason

REALTIME, BATCH, BACKGROUND = PriorityClass
CHAT = "chat@1"


def limits(
    *,
    queued_max: int = 100,
    wait_s_max: float = 100,
    overdue_s: float = math.inf,
    overdue_batch_s: float = 10,
    queued_bytes_max: int = 10_000,
) -> Limits:
    return Limits(
        classes={
            REALTIME: ClassLimits(queued_max, wait_s_max, overdue_s),
            BATCH: ClassLimits(queued_max, wait_s_max, overdue_batch_s),
            BACKGROUND: ClassLimits(queued_max, wait_s_max, 60),
        },
        queued_bytes_max=queued_bytes_max,
        kv_cache_usage_max=0.9,
    )


def a_queue(*, slots: int = 1, **options: float) -> Queue:
    queue = Queue(limits(**options))  # type: ignore[arg-type]
    queue.set_capacities({CHAT: a_capacity(slots=slots)})
    return queue


def a_capacity(*, slots: int = 1, generation: int = 1, kv_cache_usage: float = 0.0) -> Capacity:
    return Capacity(generation, slots, kv_cache_usage, "/run/chat.sock")


def a_request(
    number: int,
    priority: PriorityClass = REALTIME,
    *,
    arrived: float = 0,
    deadline: float | None = None,
    model_version: str = CHAT,
    size_bytes: int = 10,
) -> Request:
    return Request(number, f"r{number}", model_version, priority, size_bytes, arrived, deadline)


def offer(queue: Queue, *requests: Request) -> None:
    for request in requests:
        assert queue.offer(request, request.arrived) is None


def start(queue: Queue, now: float = 0) -> list[int]:
    batch = queue.plan_batch(now)
    queue.apply(batch)
    return [each.request.number for each in batch.starts]


def start_one_by_one(queue: Queue, now: float, count: int) -> list[int]:
    started = []
    for _ in range(count):
        [number] = start(queue, now)
        queue.release(number)
        started.append(number)
    return started


def test_no_more_start_than_slots_are_free() -> None:
    queue = a_queue(slots=2)
    offer(queue, *(a_request(n) for n in range(5)))
    assert start(queue) == [0, 1]
    assert start(queue) == []
    queue.release(0)
    assert start(queue) == [2]
    assert queue.in_flight(CHAT) == 2


def test_a_higher_class_goes_first() -> None:
    queue = a_queue(slots=3)
    offer(queue, a_request(1, BACKGROUND), a_request(2, BATCH), a_request(3, REALTIME))
    assert start(queue) == [3, 2, 1]


def test_within_a_class_the_earlier_deadline_goes_first_then_arrival() -> None:
    queue = a_queue(slots=4)
    offer(
        queue,
        a_request(1),
        a_request(2, deadline=50),
        a_request(3),
        a_request(4, deadline=20),
    )
    assert start(queue) == [4, 2, 1, 3]


def test_an_overdue_request_takes_every_other_start() -> None:
    queue = a_queue(overdue_batch_s=10)
    offer(queue, *(a_request(n, BATCH) for n in (1, 2)))
    offer(queue, *(a_request(n, arrived=9) for n in (3, 4, 5)))
    assert start_one_by_one(queue, 9, 1) == [3]
    assert start_one_by_one(queue, 10, 4) == [1, 4, 2, 5]


def test_a_backlog_of_overdue_work_does_not_starve_the_highest_class() -> None:
    queue = a_queue(overdue_batch_s=1)
    offer(queue, *(a_request(n, BATCH) for n in range(10)))
    offer(queue, *(a_request(n, arrived=5) for n in range(10, 15)))
    started = start_one_by_one(queue, 5, 10)
    assert sorted(n for n in started if n >= 10) == [10, 11, 12, 13, 14]


def test_turns_of_overdue_work_carry_over_from_batch_to_batch() -> None:
    queue = a_queue(slots=3, overdue_batch_s=1)
    offer(queue, *(a_request(n, BATCH) for n in range(5)))
    offer(queue, *(a_request(n, arrived=5) for n in range(10, 15)))
    assert start(queue, 5) == [0, 10, 1]
    for number in (0, 10, 1):
        queue.release(number)
    assert start(queue, 5) == [11, 2, 12]


def test_an_expired_request_never_starts() -> None:
    queue = a_queue(slots=4)
    offer(queue, a_request(1, deadline=5), a_request(2, BATCH, deadline=5.1), a_request(3))
    batch = queue.plan_batch(5)
    assert [s.request.number for s in batch.starts] == [3, 2]
    assert [(x.request.number, x.reason) for x in batch.leaves] == [(1, Reason.DEADLINE_EXCEEDED)]


def test_a_request_that_arrives_expired_is_refused() -> None:
    queue = a_queue()
    assert queue.offer(a_request(1, arrived=3, deadline=3), 3) is Reason.DEADLINE_EXCEEDED
    assert queue.waiting == 0


def test_the_wait_of_a_class_is_bounded() -> None:
    queue = a_queue(slots=0, wait_s_max=30)
    offer(queue, a_request(1, deadline=1000), a_request(2, BATCH))
    assert queue.next_expiry() == 30
    batch = queue.plan_batch(30)
    assert {(x.request.number, x.reason) for x in batch.leaves} == {
        (1, Reason.QUEUE_FULL),
        (2, Reason.QUEUE_FULL),
    }
    queue.apply(batch)
    assert queue.next_expiry() is None


def test_a_full_class_refuses_and_leaves_the_others_room() -> None:
    queue = a_queue(slots=0, queued_max=2)
    offer(queue, a_request(1), a_request(2))
    assert queue.offer(a_request(3), 0) is Reason.QUEUE_FULL
    assert queue.offer(a_request(4, BATCH), 0) is None


def test_messages_that_wait_are_bounded_in_bytes() -> None:
    queue = a_queue(slots=0, queued_bytes_max=100)
    offer(queue, a_request(1, size_bytes=60))
    assert queue.offer(a_request(2, BATCH, size_bytes=41), 0) is Reason.QUEUE_FULL
    queue.withdraw(1)
    assert queue.offer(a_request(3, size_bytes=100), 0) is None


def test_a_withdrawn_request_is_gone_at_once() -> None:
    queue = a_queue(slots=2)
    offer(queue, a_request(1), a_request(2))
    assert queue.withdraw(1) is not None
    assert queue.withdraw(1) is None
    assert (queue.waiting, queue.depth(REALTIME), queue.queued(CHAT)) == (1, 1, 1)
    assert start(queue) == [2]


def test_prompt_tokens_wait_until_the_answer_begins_or_the_request_ends() -> None:
    queue = a_queue(slots=2)
    asked = [dataclasses.replace(a_request(n), prompt_tokens=100 * n) for n in (1, 2, 3, 4)]
    offer(queue, *asked)
    assert queue.waiting_prompt_tokens(CHAT) == 1000
    assert start(queue) == [1, 2]
    assert queue.waiting_prompt_tokens(CHAT) == 1000
    assert queue.note_answer(asked[0])
    assert not queue.note_answer(asked[0])
    assert queue.waiting_prompt_tokens(CHAT) == 900
    queue.release(1)
    queue.release(2)
    assert queue.waiting_prompt_tokens(CHAT) == 700
    queue.withdraw(3)
    assert queue.waiting_prompt_tokens(CHAT) == 400
    queue.set_capacities({})
    start(queue)
    assert queue.waiting_prompt_tokens(CHAT) == 0


def test_a_slot_is_freed_once() -> None:
    queue = a_queue(slots=2)
    offer(queue, *(a_request(n) for n in range(5)))
    start(queue)
    assert queue.release(0) is not None
    assert queue.release(0) is None
    assert start(queue) == [2]


def test_a_full_kv_cache_holds_back_while_anything_runs() -> None:
    queue = a_queue(slots=4)
    offer(queue, *(a_request(n) for n in range(3)))
    queue.set_capacities({CHAT: a_capacity(slots=4, kv_cache_usage=0.9)})
    assert start(queue) == [0], "an idle runner gets one, because the figure may be old"
    assert start(queue) == []
    queue.set_capacities({CHAT: a_capacity(slots=4, kv_cache_usage=0.5)})
    assert start(queue) == [1, 2]


def test_the_slots_of_a_restarted_runner_start_empty() -> None:
    queue = a_queue(slots=1)
    offer(queue, a_request(1), a_request(2), a_request(3))
    assert start(queue) == [1]
    queue.set_capacities({CHAT: a_capacity(slots=1, generation=2)})
    assert queue.in_flight(CHAT) == 0
    assert start(queue) == [2]
    queue.release(1)
    assert start(queue) == [], "the old runner's request does not free a slot of the new one"
    queue.release(2)
    assert start(queue) == [3]


def test_what_waits_for_a_model_that_went_away_leaves() -> None:
    queue = a_queue()
    queue.set_capacities({CHAT: a_capacity(), "embed@1": a_capacity()})
    offer(queue, a_request(1, model_version="embed@1"), a_request(2))
    queue.set_capacities({CHAT: a_capacity()})
    batch = queue.plan_batch(0)
    assert [(x.request.number, x.reason) for x in batch.leaves] == [(1, Reason.MODEL_NOT_LOADED)]
    assert [s.request.number for s in batch.starts] == [2]
    assert queue.offer(a_request(3, model_version="embed@1"), 0) is Reason.MODEL_NOT_LOADED


def test_model_versions_do_not_wait_for_each_other() -> None:
    queue = a_queue()
    queue.set_capacities({CHAT: a_capacity(), "embed@1": a_capacity()})
    offer(queue, a_request(1), a_request(2), a_request(3, BACKGROUND, model_version="embed@1"))
    assert sorted(start(queue)) == [1, 3]


def test_a_plan_changes_nothing() -> None:
    queue = a_queue(slots=2)
    offer(queue, *(a_request(n) for n in range(4)))
    assert queue.plan_batch(0) == queue.plan_batch(0)
    assert (queue.waiting, queue.running) == (4, 0)


def test_the_listing_is_the_order_of_starts() -> None:
    queue = a_queue(slots=1, overdue_batch_s=10)
    offer(queue, a_request(1, BACKGROUND), a_request(2, BATCH))
    offer(queue, *(dataclasses.replace(a_request(n), arrived=11) for n in (3, 4)))
    listed = [request.number for request in queue.listing(10, 11)]
    assert listed == [2, 3, 4, 1]
    assert [request.number for request in queue.listing(2, 11)] == [2, 3]
    assert start_one_by_one(queue, 11, 4) == listed
