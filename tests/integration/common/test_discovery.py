"""Views over a real etcd."""

import asyncio
import logging
import math
import time
from typing import Any

import pytest
from forebay_common.discovery import Instance, Keys, View
from forebay_common.store import Op, Store

pytestmark = pytest.mark.integration


def number(key: str, value: bytes) -> int:
    return int(value)


async def holds(view: View[Any], entries: Any) -> None:
    async with asyncio.timeout(20):
        while dict(view.entries) != entries:
            await view.changed(view.revision)


async def test_a_view_follows_its_prefix(store: Store, namespace: str, spawn: Any) -> None:
    a, b = f"{namespace}/a", f"{namespace}/b"
    await store.put(a, b"1")
    view = View(store, f"{namespace}/", number)
    assert (dict(view.entries), view.revision) == ({}, 0)
    assert view.age_s(time.monotonic()) == math.inf
    spawn(view.run())
    async with asyncio.timeout(5):
        await view.ready()
    first = view.entries
    assert first == {a: 1}
    assert view.age_s(time.monotonic()) < 5
    await store.commit(if_=[], then=[Op.put(a, b"2"), Op.put(b, b"3")])
    await holds(view, {a: 2, b: 3})
    await store.delete(a)
    await holds(view, {b: 3})
    assert first == {a: 1}


async def test_changed_waits_for_another_revision(store: Store, namespace: str, spawn: Any) -> None:
    view = View(store, f"{namespace}/", number)
    spawn(view.run())
    async with asyncio.timeout(5):
        await view.ready()
        seen = view.revision
        waiting = [asyncio.create_task(view.changed(seen)) for _ in range(3)]
        written = await store.put(f"{namespace}/a", b"1")
        assert await asyncio.gather(*waiting) == [written] * 3
        assert await view.changed(seen) == written


async def test_what_cannot_be_decoded_is_left_out_and_logged_once(
    store: Store, namespace: str, spawn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"{namespace}/{name}" for name in "abc"]
    for key, value in zip(keys, (b"1", b"x", b"\xff"), strict=True):
        await store.put(key, value)
    view = View(store, f"{namespace}/", number)
    with caplog.at_level(logging.WARNING, "forebay_common.discovery"):
        spawn(view.run())
        await holds(view, {keys[0]: 1})
        await store.put(keys[0], b"2")
        await holds(view, {keys[0]: 2})
        await store.put(keys[1], b"3")
        await holds(view, {keys[0]: 2, keys[1]: 3})
        await store.put(keys[0], b"y")
        await holds(view, {keys[1]: 3})
    named = [record.getMessage().split()[0] for record in caplog.records]
    assert sorted(named) == keys


async def test_only_what_changed_is_decoded(store: Store, namespace: str, spawn: Any) -> None:
    decoded: list[str] = []

    def decode(key: str, value: bytes) -> object:
        decoded.append(key)
        return object()

    for name in "abc":
        await store.put(f"{namespace}/{name}", b"")
    view = View(store, f"{namespace}/", decode)
    spawn(view.run())
    async with asyncio.timeout(5):
        await view.ready()
        before, seen = view.entries, view.revision
        await store.put(f"{namespace}/b", b"2")
        await view.changed(seen)
    assert decoded == [f"{namespace}/{name}" for name in "abcb"]
    assert [view.entries[k] is before[k] for k in sorted(before)] == [True, False, True]


async def test_the_last_known_view_stays_while_etcd_is_away(
    lab: Any, etcd_process: Any, spawn: Any
) -> None:
    process = etcd_process()
    store = lab.open(
        process.endpoint,
        timeout_s=0.3,
        progress_interval_s=0.05,
        silence_s=0.3,
        backoff_max_s=0.1,
    )
    await store.put("/k/a", b"1")
    view = View(store, "/k/", number)
    spawn(view.run())

    async def age_is(wanted: Any) -> None:
        async with asyncio.timeout(10):
            while not wanted(view.age_s(time.monotonic())):
                await asyncio.sleep(0.01)

    await holds(view, {"/k/a": 1})
    for away, back in (
        (process.freeze, process.thaw),
        (process.stop, process.start),
        (process.kill, process.start),
    ):
        revision = view.revision
        away()
        await age_is(lambda age: age > 1)
        assert (dict(view.entries), view.revision) == ({"/k/a": 1}, revision)
        await asyncio.to_thread(back)
        await age_is(lambda age: age < 0.5)
        assert dict(view.entries) == {"/k/a": 1}
    process.stop()
    process.wipe()
    await asyncio.to_thread(process.start)
    await holds(view, {})
    await store.put("/k/b", b"2")
    await holds(view, {"/k/b": 2})


async def test_a_view_ends_with_its_store(lab: Any, namespace: str, within: Any) -> None:
    store = lab.open()
    view = View(store, namespace, number)
    running = asyncio.create_task(view.run())
    await within(view.ready())
    await store.close()
    await within(running, 2)


async def test_instances_are_found(store: Store, namespace: str, spawn: Any) -> None:
    keys = Keys(namespace)
    router = Instance("router", "r1", "0.1.0", {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"})
    view = View(store, keys.instances, Instance.decode)
    spawn(view.run())
    await store.put(keys.instance("router", "r1"), router.encode())
    await holds(view, {keys.instance("router", "r1"): router})
