"""Leases against a real etcd that restarts, loses data, freezes, or revokes them."""

import asyncio
import time
from typing import Any

import pytest
from forebay_common.errors import ForebayError, Reason
from forebay_common.lease import Lease
from forebay_common.store import Store

pytestmark = pytest.mark.integration


async def test_what_is_attached_is_there_until_the_lease_is_closed(
    store: Store, namespace: str
) -> None:
    key = f"{namespace}/k"
    async with Lease.open(store, 60) as lease:
        await lease.attach(key, b"1")
        entry = await store.get(key)
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"1", lease.id)
        await lease.attach(key, b"2")
        await lease.attach(f"{namespace}/other", b"3")
        assert [e.value for e in (await store.list(namespace)).entries.values()] == [b"2", b"3"]
        await lease.detach(key)
        assert list((await store.list(namespace)).entries) == [f"{namespace}/other"]
    assert (await store.list(namespace)).entries == {}


async def test_the_last_of_many_updates_stays(store: Store, namespace: str) -> None:
    key = f"{namespace}/k"
    async with Lease.open(store, 60) as lease:
        await asyncio.gather(*(lease.attach(key, str(n).encode()) for n in range(20)))
        entry = await store.get(key)
        assert entry is not None
        assert entry.value == b"19"


async def test_detaching_leaves_alone_what_another_has_put(store: Store, namespace: str) -> None:
    key = f"{namespace}/k"
    async with Lease.open(store, 60) as lease:
        await lease.attach(key, b"ours")
        await store.put(key, b"theirs")
        await lease.detach(key)
        entry = await store.get(key)
        assert entry is not None
        assert entry.value == b"theirs"


async def test_an_orphaned_lease_expires_after_its_time(
    store: Store, namespace: str, becomes: Any
) -> None:
    key = f"{namespace}/k"
    async with Lease.open(store, 1) as lease:
        await lease.attach(key, b"1")
        session = lease.session
        assert session is not None
        await lease.orphan()
        assert not session.is_valid(time.monotonic())
    assert await store.get(key) is not None
    await becomes(store, key, None)
    assert time.monotonic() >= session.expires_at


async def test_a_lease_outlives_its_ttl(store: Store, namespace: str, within: Any) -> None:
    async with Lease.open(store, 1) as lease:
        await lease.attach(f"{namespace}/k", b"1")
        session = lease.session
        assert session is not None
        opened_with = session.expires_at
        with pytest.raises(TimeoutError):
            await within(lease.lost(), 2)
        assert session.expires_at > opened_with + 1
        assert lease.session is session
        assert await store.get(f"{namespace}/k") is not None


async def test_a_lease_revoked_behind_its_back_is_replaced(
    store: Store, namespace: str, becomes: Any, within: Any
) -> None:
    keys = [f"{namespace}/{n}" for n in range(3)]
    async with Lease.open(store, 1) as lease:
        for key in keys:
            await lease.attach(key, key.encode())
        revoked, session = lease.id, lease.session
        losing = asyncio.create_task(lease.lost())
        await store.revoke_lease(revoked)
        await within(losing)
        assert session is not None
        assert not session.is_valid(time.monotonic())
        assert (await within(lease.held())).lease_id != revoked
        for key in keys:
            assert (await becomes(store, key, key.encode())).lease_id == lease.id


async def test_an_update_under_a_revoked_lease_is_not_lost(store: Store, namespace: str) -> None:
    key = f"{namespace}/k"
    async with Lease.open(store, 60) as lease:
        await lease.attach(key, b"1")
        revoked = lease.id
        await store.revoke_lease(revoked)
        await lease.attach(key, b"2")
        entry = await store.get(key)
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"2", lease.id)
        assert lease.id != revoked


async def test_a_refused_value_is_reported_and_harms_no_other(store: Store, namespace: str) -> None:
    async with Lease.open(store, 60) as lease:
        await lease.attach(f"{namespace}/large", b"1")
        with pytest.raises(ForebayError) as caught:
            await lease.attach(f"{namespace}/large", bytes(2_000_000))
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        await lease.attach(f"{namespace}/small", b"2")
        await lease.attach(f"{namespace}/large", b"3")
        values = [e.value for e in (await store.list(namespace)).entries.values()]
        assert values == [b"3", b"2"]


async def test_what_changes_while_etcd_is_away_is_carried_out_when_it_is_back(
    lab: Any, etcd_process: Any, becomes: Any
) -> None:
    process = etcd_process()
    store = lab.open(process.endpoint, timeout_s=0.5, backoff_max_s=0.2)
    async with Lease.open(store, 30) as lease:
        await lease.attach("/kept", b"1")
        await lease.attach("/updated", b"1")
        await lease.attach("/removed", b"1")
        held = lease.id
        process.kill()
        await lease.attach("/updated", b"2")
        await lease.attach("/added", b"1")
        await lease.detach("/removed")
        await asyncio.to_thread(process.start)
        await becomes(store, "/removed", None)
        await becomes(store, "/added", b"1")
        await becomes(store, "/updated", b"2")
        await becomes(store, "/kept", b"1")
        assert lease.id == held


async def test_everything_is_put_again_after_etcd_lost_its_data(
    lab: Any, etcd_process: Any, becomes: Any
) -> None:
    process = etcd_process()
    store = lab.open(process.endpoint, timeout_s=0.5, backoff_max_s=0.2)
    async with Lease.open(store, 1) as lease:
        await lease.attach("/a", b"1")
        await lease.attach("/b", b"2")
        lost = lease.id
        process.kill()
        process.wipe()
        await asyncio.to_thread(process.start)
        assert (await becomes(store, "/a", b"1")).lease_id == lease.id
        assert (await becomes(store, "/b", b"2")).lease_id == lease.id
        assert lease.id != lost


async def test_a_holder_knows_its_loss_before_the_key_can_go(
    lab: Any, etcd_process: Any, becomes: Any, within: Any
) -> None:
    process = etcd_process()
    proxy = await lab.proxy(process.endpoint)
    near = lab.open(process.endpoint)
    far = lab.open(proxy.endpoint, timeout_s=0.5, silence_s=0.5, backoff_max_s=0.2)
    async with Lease.open(far, 1) as lease:
        await lease.attach("/k", b"1")
        first = lease.session
        assert first is not None
        losing = asyncio.create_task(first.lost.wait())
        proxy.freeze()
        await becomes(near, "/k", None)
        assert losing.done()
        assert not first.is_valid(time.monotonic())
        assert lease.session is None
        proxy.thaw()
        second = await within(lease.held())
        assert second is not first
        await becomes(near, "/k", b"1")
        process.freeze()
        await within(second.lost.wait())
        assert time.monotonic() >= second.expires_at
        process.thaw()
        assert await within(lease.held()) is not second


async def test_a_lease_can_be_opened_while_etcd_is_away(
    lab: Any, etcd_process: Any, becomes: Any
) -> None:
    process = etcd_process()
    process.stop()
    store = lab.open(process.endpoint, timeout_s=0.2, backoff_max_s=0.2)
    async with Lease.open(store, 30) as lease:
        await lease.attach("/k", b"1")
        with pytest.raises(ForebayError) as caught:
            _ = lease.id
        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        await lease.lost()
        await asyncio.to_thread(process.start)
        assert (await becomes(store, "/k", b"1")).lease_id == lease.id
        process.stop()
    await lease.attach("/k", b"2")
    with pytest.raises(ForebayError):
        await lease.held()
