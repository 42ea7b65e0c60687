"""Elections over a real etcd, with candidates that are cut off, revoked and frozen."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from forebay_common.discovery import Keys
from forebay_common.election import Election, Leadership
from forebay_common.lease import Lease
from forebay_common.store import Condition, Op, Store

pytestmark = pytest.mark.integration


class Candidate:
    """A process that stands for election: its lease, and what it is while elected."""

    def __init__(self, store: Store, lease: Lease, key: str, name: str) -> None:
        self.election = Election(store, lease, key, name)
        self.lease = lease
        self.terms: asyncio.Queue[Leadership] = asyncio.Queue()
        self.resign = asyncio.Event()
        self.task = asyncio.create_task(self._stand())

    async def elected(self) -> Leadership:
        async with asyncio.timeout(20):
            return await self.terms.get()

    async def _stand(self) -> None:
        while True:
            async with self.election.campaign() as leadership:
                self.terms.put_nowait(leadership)
                lost = asyncio.create_task(leadership.lost())
                resigned = asyncio.create_task(self.resign.wait())
                try:
                    await asyncio.wait({lost, resigned}, return_when="FIRST_COMPLETED")
                finally:
                    lost.cancel()
                    resigned.cancel()
            if self.resign.is_set():
                return


@pytest.fixture
async def stand() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def stand(store: Store, key: str, name: str, *, ttl_s: float = 1) -> Candidate:
            lease = await stack.enter_async_context(Lease.open(store, ttl_s))
            candidate = Candidate(store, lease, key, name)

            async def stop() -> None:
                candidate.task.cancel()
                await asyncio.wait({candidate.task})

            stack.push_async_callback(stop)
            return candidate

        yield stand


@pytest.fixture
def key(namespace: str) -> str:
    return Keys(namespace).leader("autoscaler")


async def test_leadership_moves_when_the_leader_resigns(
    store: Store, key: str, stand: Any, within: Any
) -> None:
    first = await stand(store, key, "first")
    led = await first.elected()
    second = await stand(store, key, "second")
    assert await second.election.leader() == "first"
    assert led.is_valid(time.monotonic())
    assert second.terms.empty()
    first.resign.set()
    follows = await second.elected()
    assert follows.fence > led.fence
    await within(led.lost())
    assert not led.is_valid(time.monotonic())
    assert await first.election.leader() == "second"


async def test_leadership_moves_when_the_leader_vanishes(
    store: Store, key: str, stand: Any
) -> None:
    first = await stand(store, key, "first")
    led = await first.elected()
    second = await stand(store, key, "second")
    await first.lease.orphan()
    first.task.cancel()
    assert (await second.elected()).fence > led.fence


async def test_a_leader_whose_lease_is_revoked_has_lost(
    store: Store, key: str, stand: Any, within: Any
) -> None:
    first = await stand(store, key, "first", ttl_s=60)
    led = await first.elected()
    await store.revoke_lease(first.lease.id)
    # By its watch of the key: the next keep-alive is far off.
    await within(led.lost(), 2)


async def test_a_leader_whose_key_is_deleted_has_lost(
    store: Store, key: str, stand: Any, within: Any
) -> None:
    first = await stand(store, key, "first", ttl_s=60)
    led = await first.elected()
    await store.delete(key)
    await within(led.lost(), 2)
    assert (await first.elected()).fence > led.fence


async def test_the_key_of_a_service_with_a_longer_name_is_another(
    store: Store, namespace: str, key: str, stand: Any
) -> None:
    await store.put(f"{key}-two", b"other")
    first = await stand(store, key, "first")
    led = await first.elected()
    await store.delete(f"{key}-two")
    await store.put(namespace, b"")
    assert led.is_valid(time.monotonic())


async def test_a_key_left_from_an_answer_that_was_lost_is_replaced(
    store: Store, key: str, stand: Any, lab: Any
) -> None:
    async with Lease.open(store, 60) as lease:
        left = await store.put(key, b"me", lease_id=lease.id)
        async with asyncio.timeout(5), Election(store, lease, key, "me").campaign() as led:
            assert led.fence > left


async def test_a_leader_that_is_cut_off_steps_down_before_another_is_elected(
    lab: Any, store: Store, key: str, stand: Any, within: Any
) -> None:
    proxy = await lab.proxy()
    far = lab.open(proxy.endpoint, timeout_s=0.5, silence_s=0.5, backoff_max_s=0.2)
    cut_off = await stand(far, key, "cut-off")
    led = await cut_off.elected()
    other = await stand(store, key, "other")
    proxy.freeze()
    stepped_down_at: list[float] = []

    async def note() -> None:
        await led.lost()
        stepped_down_at.append(time.monotonic())

    noting = asyncio.create_task(note())
    follows = await other.elected()
    assert not led.is_valid(time.monotonic())
    assert stepped_down_at
    assert follows.fence > led.fence
    await noting
    # What the old leader still tries must not be carried out.
    proxy.thaw()
    late = await store.commit(if_=[led.still_led], then=[Op.put(f"{key}/order", b"")])
    assert not late.succeeded
    fresh = await store.commit(if_=[follows.still_led], then=[Op.put(f"{key}/order", b"")])
    assert fresh.succeeded
    other.resign.set()
    assert (await cut_off.elected()).fence > follows.fence


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_two_are_never_valid_at_once_while_etcd_is_away(
    lab: Any, etcd_process: Any, stand: Any, within: Any, how: str
) -> None:
    process = etcd_process()
    stores = [
        lab.open(process.endpoint, timeout_s=0.4, silence_s=0.5, backoff_max_s=0.1)
        for _ in range(2)
    ]
    candidates = [await stand(store, "/leader", str(n)) for n, store in enumerate(stores)]
    terms: list[Leadership] = []

    async def collect(candidate: Candidate) -> None:
        while True:
            term = await candidate.terms.get()
            now = time.monotonic()
            assert not any(earlier.is_valid(now) for earlier in terms)
            assert all(earlier.fence < term.fence for earlier in terms)
            terms.append(term)

    collecting = [asyncio.create_task(collect(candidate)) for candidate in candidates]
    try:
        for number in range(2):
            async with asyncio.timeout(20):
                while len(terms) <= number:
                    assert not any(task.done() for task in collecting)
                    await asyncio.sleep(0.01)
            led = terms[-1]
            if how == "frozen":
                process.freeze()
            else:
                process.kill()
            await within(led.lost())
            assert time.monotonic() - led.session.expires_at < 0.5
            await asyncio.to_thread(process.thaw if how == "frozen" else process.start)
    finally:
        for task in collecting:
            task.cancel()
        await asyncio.wait(collecting)


async def test_work_runs_only_while_its_leader_leads(
    store: Store, key: str, spawn: Any, within: Any
) -> None:
    began: asyncio.Queue[int] = asyncio.Queue()
    ended: asyncio.Queue[int] = asyncio.Queue()

    async def lead(leadership: Leadership) -> None:
        began.put_nowait(leadership.fence)
        try:
            await asyncio.Event().wait()
        finally:
            ended.put_nowait(leadership.fence)

    async with Lease.open(store, 60) as lease:
        running = spawn(Election(store, lease, key, "me").run(lead))
        first = await within(began.get())
        await store.delete(key)
        assert await within(ended.get()) == first
        second = await within(began.get())
        assert second > first
        running.cancel()
        await asyncio.wait({running})
        assert await within(ended.get()) == second
        assert await store.get(key) is None


async def test_an_error_of_the_work_ends_the_run_and_resigns(store: Store, key: str) -> None:
    async def lead(leadership: Leadership) -> None:
        raise ZeroDivisionError

    async with Lease.open(store, 60) as lease:
        with pytest.raises(ZeroDivisionError):
            await Election(store, lease, key, "me").run(lead)
        assert await store.get(key) is None


async def test_a_cancelled_campaign_leaves_nothing_behind(
    store: Store, key: str, stand: Any
) -> None:
    await (await stand(store, key, "first")).elected()
    async with Lease.open(store, 60) as lease:
        waiting = Election(store, lease, key, "second")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), waiting.campaign():
                pytest.fail("elected beside the leader")
        assert await waiting.leader() == "first"


async def test_observers_see_each_leader(store: Store, key: str, within: Any) -> None:
    async with Lease.open(store, 60) as lease:
        leaders = Election(store, lease, key, "watcher").observe()
        try:
            assert await within(anext(leaders)) is None
            for name in ("first", "second"):
                async with Election(store, lease, key, name).campaign():
                    assert await within(anext(leaders)) == name
                    refused = await store.commit(if_=[Condition.absent(key)], then=[])
                    assert not refused.succeeded
                assert await within(anext(leaders)) is None
        finally:
            await leaders.aclose()
