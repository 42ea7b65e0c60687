"""The store against a real etcd, and what it does when that is away."""

import asyncio
import socket
import time
from contextlib import aclosing
from typing import Any

import pytest
from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Condition, LeaseNotFoundError, Op, Store

pytestmark = pytest.mark.integration


async def refusal(call: Any) -> Reason:
    with pytest.raises(ForebayError) as caught:
        await call
    return caught.value.reason


@pytest.fixture
def closed_endpoint() -> Any:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_what_is_put_is_read_until_it_is_deleted(store: Store, namespace: str) -> None:
    key = f"{namespace}/é"
    assert await store.get(key) is None
    first = await store.put(key, b"1")
    second = await store.put(key, b"\0\xff")
    entry = await store.get(key)
    assert entry is not None
    assert (entry.key, entry.value, entry.lease_id) == (key, b"\0\xff", 0)
    assert (entry.create_revision, entry.mod_revision) == (first, second)
    assert await store.delete(key)
    assert not await store.delete(key)
    assert await store.get(key) is None


async def test_a_listing_holds_the_prefix_and_nothing_beside_it(
    store: Store, namespace: str
) -> None:
    for key in ("a/1", "a/2", "a", "a0", "b/1"):
        await store.put(f"{namespace}/{key}", key.encode())
    snapshot = await store.list(f"{namespace}/a/")
    assert [entry.value for entry in snapshot.entries.values()] == [b"a/1", b"a/2"]
    assert snapshot.revision >= max(e.mod_revision for e in snapshot.entries.values())


async def test_a_listing_of_many_pages_is_whole(store: Store, namespace: str) -> None:
    keys = [f"{namespace}/{number:05}" for number in range(2100)]
    for start in range(0, len(keys), 100):
        await store.commit(if_=[], then=[Op.put(key, b"") for key in keys[start : start + 100]])
    assert list((await store.list(namespace)).entries) == keys


async def test_each_condition_decides(store: Store, namespace: str) -> None:
    here, gone = f"{namespace}/here", f"{namespace}/gone"
    lease_id, _ = await store.grant_lease(60)
    created = await store.put(here, b"0", lease_id=lease_id)
    modified = await store.put(here, b"1", lease_id=lease_id)
    holding = [
        Condition.exists(here),
        Condition.absent(gone),
        Condition.create_revision(here, created),
        Condition.mod_revision(here, modified),
        Condition.value(here, b"1"),
        Condition.lease(here, lease_id),
    ]
    failing = [
        Condition.exists(gone),
        Condition.absent(here),
        Condition.create_revision(here, modified),
        Condition.mod_revision(here, created),
        Condition.value(here, b"0"),
        Condition.value(gone, b""),
        Condition.lease(here, lease_id + 1),
        Condition.lease(gone, lease_id),
    ]
    assert (await store.commit(if_=holding, then=[])).succeeded
    for condition in failing:
        assert not (await store.commit(if_=[*holding, condition], then=[])).succeeded, condition
    await store.revoke_lease(lease_id)


async def test_a_transaction_does_all_of_one_side_and_none_of_the_other(
    store: Store, namespace: str
) -> None:
    claim, warm = f"{namespace}/claim", f"{namespace}/warm"
    await store.put(warm, b"w")

    async def take(by: bytes) -> Any:
        return await store.commit(
            if_=[Condition.exists(warm), Condition.absent(claim)],
            then=[Op.put(claim, by), Op.get(warm)],
            else_=[Op.get(claim)],
        )

    results = await asyncio.gather(*(take(str(n).encode()) for n in range(10)))
    (won,) = [result for result in results if result.succeeded]
    assert won.entries[warm].value == b"w"
    held = await store.get(claim)
    assert held is not None
    assert held.mod_revision == won.revision
    assert all(r.entries == {claim: held} for r in results if not r.succeeded)


async def test_a_lost_lease_is_told_apart(store: Store, namespace: str) -> None:
    lease_id, ttl_s = await store.grant_lease(60)
    assert ttl_s == 60
    assert await store.keep_lease_alive(lease_id) == 60
    await store.put(f"{namespace}/k", b"", lease_id=lease_id)
    await store.revoke_lease(lease_id)
    await store.revoke_lease(lease_id)
    assert await store.get(f"{namespace}/k") is None
    assert await store.keep_lease_alive(lease_id) == 0
    with pytest.raises(LeaseNotFoundError):
        await store.put(f"{namespace}/k", b"", lease_id=lease_id)
    with pytest.raises(LeaseNotFoundError):
        await store.commit(if_=[], then=[Op.put(f"{namespace}/k", b"", lease_id=lease_id)])


@pytest.mark.parametrize("size", [1_700_000, 3_000_000])
async def test_a_value_that_is_too_large_is_refused(
    store: Store, namespace: str, size: int
) -> None:
    assert await refusal(store.put(f"{namespace}/k", bytes(size))) is Reason.INVALID_ARGUMENT


async def test_without_etcd_a_call_fails_within_its_time(lab: Any, closed_endpoint: str) -> None:
    for endpoints in ((closed_endpoint,), (closed_endpoint, "127.0.0.1:1")):
        store = lab.open(*endpoints, timeout_s=0.3)
        for call in (store.get("/k"), store.put("/k", b""), store.list("/"), store.grant_lease(5)):
            started = time.monotonic()
            assert await refusal(call) is Reason.STORE_UNAVAILABLE
            assert time.monotonic() - started < 1


async def test_closing_ends_calls_and_watches_and_refuses_new_ones(
    lab: Any, namespace: str, within: Any
) -> None:
    proxy = await lab.proxy()
    store = lab.open(proxy.endpoint, timeout_s=20)
    listed = asyncio.Event()

    async def watch() -> str:
        async for _ in store.watch(namespace):
            listed.set()
        return "ended"

    watching = asyncio.create_task(watch())
    await within(listed.wait())
    proxy.freeze()
    reading = asyncio.create_task(store.get(namespace))
    await asyncio.sleep(0)
    await store.close()
    assert await within(watching, 2) == "ended"
    assert await within(refusal(reading), 2) is Reason.STORE_UNAVAILABLE
    assert await refusal(store.get(namespace)) is Reason.STORE_UNAVAILABLE


async def test_a_cancelled_call_stays_cancelled(lab: Any, namespace: str) -> None:
    proxy = await lab.proxy()
    store = lab.open(proxy.endpoint, timeout_s=20)
    await store.get(namespace)
    proxy.freeze()
    for call in (store.get(namespace), store.keep_lease_alive(1), anext(store.watch(namespace))):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call


async def test_reads_move_to_a_member_that_works(
    lab: Any, closed_endpoint: str, namespace: str
) -> None:
    one, other = await lab.proxy(), await lab.proxy()
    store = lab.open(closed_endpoint, one.endpoint, other.endpoint, timeout_s=2)
    await store.put(f"{namespace}/k", b"v")
    for broken in (one, other):
        await broken.cut()
        assert await store.get(f"{namespace}/k") is not None
        await store.put(f"{namespace}/k", b"v")
        await broken.open()
        assert await store.get(f"{namespace}/k") is not None
    one.freeze()
    assert await store.get(f"{namespace}/k") is not None
    one.thaw()
    other.freeze()
    assert await store.get(f"{namespace}/k") is not None


async def test_a_watch_gives_the_listing_then_one_snapshot_per_batch(
    store: Store, namespace: str, within: Any
) -> None:
    await store.put(f"{namespace}/a", b"1")
    async with aclosing(store.watch(f"{namespace}/")) as snapshots:
        listing = await within(anext(snapshots))
        assert {k: e.value for k, e in listing.entries.items()} == {f"{namespace}/a": b"1"}
        assert listing.changed is None
        result = await store.commit(
            if_=[], then=[Op.put(f"{namespace}/b", b"2"), Op.delete(f"{namespace}/a")]
        )
        await store.put(f"{namespace}-beside", b"")
        batch = await within(anext(snapshots))
        assert {k: e.value for k, e in batch.entries.items()} == {f"{namespace}/b": b"2"}
        assert batch.revision == result.revision
        assert batch.changed == {f"{namespace}/a", f"{namespace}/b"}
        assert list(listing.entries) == [f"{namespace}/a"]
        await store.delete(f"{namespace}/b")
        assert (await within(anext(snapshots))).entries == {}


async def test_a_watch_of_large_values_is_whole(store: Store, namespace: str, within: Any) -> None:
    """One transaction of more than etcd sends in one message comes in fragments."""
    async with aclosing(store.watch(namespace)) as snapshots:
        await within(anext(snapshots))
        keys = [f"{namespace}/{number}" for number in range(8)]
        value = bytes(180_000)
        before = await store.get(namespace)
        assert before is None
        await store.commit(if_=[], then=[Op.put(key, value) for key in keys])
        snapshot = await within(anext(snapshots))
        assert list(snapshot.entries) == keys


async def test_a_watch_that_was_compacted_away_lists_again(
    lab: Any, store: Store, namespace: str, within: Any
) -> None:
    async with aclosing(store.watch(namespace)) as snapshots:
        await within(anext(snapshots))
        # The generator stands between its listing and the opening of the watch.
        await store.put(f"{namespace}/a", b"1")
        await store.put(f"{namespace}/a", b"2")
        await lab.compact(await store.put(f"{namespace}/b", b"3"))
        snapshot = await within(anext(snapshots))
        assert {e.value for e in snapshot.entries.values()} == {b"2", b"3"}
        assert snapshot.changed is None
        await store.delete(f"{namespace}/b")
        assert {e.value for e in (await within(anext(snapshots))).entries.values()} == {b"2"}


async def test_changes_compacted_during_a_disconnect_are_seen(
    lab: Any, store: Store, namespace: str, within: Any
) -> None:
    proxy = await lab.proxy()
    away = lab.open(proxy.endpoint, timeout_s=0.5)
    await store.put(f"{namespace}/a", b"1")
    async with aclosing(away.watch(namespace)) as snapshots:
        await within(anext(snapshots))
        following = asyncio.create_task(anext(snapshots))
        await store.put(f"{namespace}/b", b"2")
        assert len((await within(following)).entries) == 2
        following = asyncio.create_task(anext(snapshots))
        await proxy.cut()
        await store.delete(f"{namespace}/a")
        await lab.compact(await store.put(f"{namespace}/c", b"3"))
        await proxy.open()
        snapshot = await within(following)
        assert {e.value for e in snapshot.entries.values()} == {b"2", b"3"}


async def test_a_watch_goes_on_after_etcd_restarted_and_after_it_lost_its_data(
    lab: Any, etcd_process: Any, within: Any
) -> None:
    process = etcd_process()
    store = lab.open(process.endpoint)
    await store.put("/a", b"1")
    async with aclosing(store.watch("/")) as snapshots:
        before = await within(anext(snapshots))
        following = asyncio.create_task(anext(snapshots))
        process.kill()
        await asyncio.to_thread(process.start)
        assert (await within(following)).entries == before.entries
        await store.put("/a", b"2")
        assert (await within(anext(snapshots))).entries["/a"].value == b"2"
        following = asyncio.create_task(anext(snapshots))
        process.stop()
        process.wipe()
        await asyncio.to_thread(process.start)
        fresh = await within(following)
        assert fresh.entries == {}
        assert fresh.revision < before.revision
        await store.put("/b", b"3")
        assert (await within(anext(snapshots))).entries["/b"].value == b"3"


async def test_a_watch_notices_a_connection_that_died_without_a_word(
    lab: Any, store: Store, namespace: str, within: Any
) -> None:
    proxy = await lab.proxy()
    far = lab.open(proxy.endpoint, timeout_s=0.5, progress_interval_s=0.1, silence_s=0.4)
    async with aclosing(far.watch(namespace)) as snapshots:
        await within(anext(snapshots))
        following = asyncio.create_task(anext(snapshots))
        proxy.freeze()
        await store.put(f"{namespace}/a", b"1")
        proxy.forget()
        assert len((await within(following)).entries) == 1


async def test_a_watch_on_a_silent_member_moves_to_another(
    lab: Any, store: Store, namespace: str, within: Any
) -> None:
    one, other = await lab.proxy(), await lab.proxy()
    two = lab.open(
        one.endpoint, other.endpoint, timeout_s=0.5, progress_interval_s=0.1, silence_s=0.3
    )
    async with aclosing(two.watch(namespace)) as snapshots:
        await within(anext(snapshots))
        for number, silent in enumerate((one, other)):
            following = asyncio.create_task(anext(snapshots))
            silent.freeze()
            await store.put(f"{namespace}/{number}", b"")
            async with asyncio.timeout(10):
                while len((await following).entries) <= number:
                    following = asyncio.create_task(anext(snapshots))
            silent.thaw()


async def test_a_quiet_watch_shows_that_it_is_alive(lab: Any, namespace: str, within: Any) -> None:
    store = lab.open(progress_interval_s=0.05)
    signs: asyncio.Queue[None] = asyncio.Queue()
    async with aclosing(store.watch(namespace, on_alive=lambda: signs.put_nowait(None))) as view:
        await within(anext(view))
        quiet = asyncio.create_task(anext(view))
        for _ in range(4):
            await within(signs.get(), 2)
        assert not quiet.done()
        quiet.cancel()
        await asyncio.wait({quiet})


def test_an_endpoint_that_cannot_be_meant_is_refused() -> None:
    for endpoints in ((), ("https://etcd:2379",)):
        with pytest.raises(ValueError, match="etcd"):
            Store(endpoints)
