"""Who gets a slot at once, and who waits in the queue's own task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from forebay_batcher.core.queue import (
    Capacity,
    ClassLimits,
    Limits,
    PriorityClass,
    Queue,
    Start,
)
from forebay_batcher.queue_loop import QueueLoop
from forebay_common.errors import ForebayError, Reason
from forebay_wire.waiting import Waiting
from hypothesis import given, settings
from hypothesis import strategies as st

CHAT, EMBED = "chat@1", "embed@1"
REALTIME, BATCH, _ = PriorityClass
TURNS = 8
"""Of the event loop: more than any chain of callbacks here is long."""


class Replica:
    """A queue loop at a time that stands still, and what was asked of it."""

    def __init__(self, *, slots: int = 1, queued_max: int = 5) -> None:
        limits = Limits(
            {each: ClassLimits(queued_max, 100.0, 10.0) for each in PriorityClass}, 10_000, 0.9
        )
        self.now = 100.0
        self.changes = 0
        self.queue = Queue(limits)
        self.loop = QueueLoop(self.queue, on_change=self._count, clock=lambda: self.now)
        self.set_slots(slots)
        self.held: list[Start] = []
        self.waits: list[asyncio.Task[None]] = []
        self.not_begun: list[str] = []

    def _count(self) -> None:
        self.changes += 1

    def set_slots(self, slots: int) -> None:
        self.loop.set_capacities({each: Capacity(1, slots, 0.0, "") for each in (CHAT, EMBED)})

    def ask(
        self, model_version: str = CHAT, priority: PriorityClass = REALTIME
    ) -> Start | Waiting[Start]:
        return self.loop.acquire(
            request_id="",
            model_version=model_version,
            priority=priority,
            size_bytes=1,
            deadline=None,
        )

    def arrive(self, model_version: str, priority: PriorityClass) -> None:
        """Ask as a relay does, and check that nobody is passed."""
        ahead = self.queue.queued(model_version) + self.not_begun.count(model_version)
        try:
            answer = self.ask(model_version, priority)
        except ForebayError:
            return
        if isinstance(answer, Start):
            assert ahead == 0, "it passed one that waits"
            self.held.append(answer)
        else:
            self.not_begun.append(model_version)
            self.waits.append(asyncio.create_task(self._take(answer)))

    async def _take(self, waiting: Waiting[Start]) -> None:
        with suppress(ForebayError):
            self.held.append(await waiting)

    def release(self, index: int) -> None:
        if self.held:
            self.loop.release(self.held.pop(index % len(self.held)).request.number)

    def cancel(self, index: int) -> None:
        if self.waits:
            self.waits[index % len(self.waits)].cancel()

    async def turn(self) -> None:
        await asyncio.sleep(0)
        self.not_begun.clear()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await self.turn()


@asynccontextmanager
async def running(replica: Replica) -> AsyncIterator[Replica]:
    task = asyncio.create_task(replica.loop.run())
    try:
        yield replica
    finally:
        tasks = [task, *replica.waits]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from((CHAT, EMBED)), st.sampled_from(PriorityClass)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("set_slots"), st.integers(0, 3)),
    st.tuples(st.just("turn")),
)


@given(steps=st.lists(STEPS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_nobody_passes_one_that_waits_and_could_start(steps: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        async with running(Replica()) as replica:
            slots = 1
            for name, *arguments in steps:
                if name == "set_slots":
                    slots = max(slots, int(str(arguments[0])))
                answer = getattr(replica, str(name))(*arguments)
                if answer is not None:
                    await answer
                for model_version in (CHAT, EMBED):
                    assert replica.queue.in_flight(model_version) <= slots
            replica.set_slots(100)
            await replica.settle()
            assert all(wait.done() for wait in replica.waits)
            assert replica.queue.waiting == 0
            assert replica.queue.running == len(replica.held), "no slot is lost"
            while replica.held:
                replica.release(0)
            await asyncio.wait_for(replica.loop.idle(), 1)

    asyncio.run(play())


async def test_a_free_slot_is_taken_without_the_queues_task() -> None:
    replica = Replica(slots=2)
    before = replica.changes
    starts = [replica.ask(), replica.ask(priority=BATCH)]
    assert all(isinstance(start, Start) and not start.overdue for start in starts)
    assert replica.queue.running == 2
    assert replica.changes == before + 2, "watchers are told"
    assert isinstance(replica.ask(), Waiting)


async def test_a_freed_slot_goes_to_who_waits_and_not_to_who_comes_now() -> None:
    async with running(Replica()) as replica:
        first = replica.ask()
        assert isinstance(first, Start)
        replica.arrive(CHAT, BATCH)
        # The one that waits has not begun to, and the slot is free again.
        replica.loop.release(first.request.number)
        replica.arrive(CHAT, BATCH)
        assert replica.held == []
        await replica.settle()
        assert [start.request.number for start in replica.held] == [4]
        replica.release(0)
        replica.arrive(CHAT, BATCH)
        assert replica.held == []
        await replica.settle()
        assert [start.request.number for start in replica.held] == [5]


async def test_a_wait_that_is_dropped_holds_nothing_and_delays_nobody_for_long() -> None:
    async with running(Replica()) as replica:
        first = replica.ask()
        assert isinstance(first, Start)
        dropped = replica.ask()
        assert isinstance(dropped, Waiting)
        del dropped
        replica.loop.release(first.request.number)
        await replica.settle()
        assert replica.queue.waiting == replica.queue.running == 0
        assert isinstance(replica.ask(), Start)


async def test_a_slot_given_to_a_wait_that_is_cancelled_in_the_same_turn_is_given_back() -> None:
    async with running(Replica()) as replica:
        first = replica.ask()
        assert isinstance(first, Start)
        replica.arrive(CHAT, REALTIME)
        await replica.settle()
        replica.loop.release(first.request.number)
        while replica.queue.waiting:
            await asyncio.sleep(0)
        assert replica.held == [], "it was given a slot and does not know it yet"
        replica.cancel(0)
        await replica.settle()
        assert replica.queue.running == 0
        await asyncio.wait_for(replica.loop.idle(), 1)


async def test_what_may_not_even_wait_is_refused_at_once() -> None:
    replica = Replica()
    for model_version, deadline, reason in (
        ("other@1", None, Reason.MODEL_NOT_LOADED),
        (CHAT, replica.now, Reason.DEADLINE_EXCEEDED),
    ):
        with pytest.raises(ForebayError) as caught:
            replica.loop.acquire(
                request_id="",
                model_version=model_version,
                priority=REALTIME,
                size_bytes=1,
                deadline=deadline,
            )
        assert caught.value.reason is reason
    assert replica.queue.waiting == replica.queue.running == 0
