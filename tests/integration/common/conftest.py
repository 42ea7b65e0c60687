"""Stores of the test's own, a network between them and etcd that can break, and no task left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from aetcd import rpc
from forebay_common.store import Store

_BOUND_S = 20.0


class Proxy:
    """A TCP proxy that can cut its connections, or keep them open and forward nothing."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._port = 0
        self._pipes: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def endpoint(self) -> str:
        """Where to connect."""
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        """Accept connections, at the same port each time."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        pipes = set(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        if pipes:
            await asyncio.wait(pipes)

    def freeze(self) -> None:
        """Forward nothing more, on old connections and new ones."""
        self._flowing.clear()

    def forget(self) -> None:
        """Go on, but only with new connections; frozen ones stay dead without a word."""
        self._flowing = asyncio.Event()
        self._flowing.set()

    def thaw(self) -> None:
        """Go on, with what was held back."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        flowing = self._flowing
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await asyncio.open_connection(*self._target)
            await asyncio.gather(
                self._pump(reader, onward, flowing), self._pump(back, writer, flowing)
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._pipes.discard(task)
            writer.close()
            if onward is not None:
                onward.close()

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        while chunk := await reader.read(65536):
            await flowing.wait()
            writer.write(chunk)
            await writer.drain()
        writer.close()


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    """Whatever a test started and closed must have ended."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        # What was cancelled last may need one more turn of the loop.
        _, left = await asyncio.wait(left, timeout=2)
    assert not left


class Lab:
    """Makes stores and proxies, and closes them."""

    def __init__(self, etcd: str) -> None:
        self._etcd = etcd
        self._stores: list[Store] = []
        self._proxies: list[Proxy] = []

    def open(self, *endpoints: str, **options: Any) -> Store:
        """A store, on the shared etcd if no endpoint is given."""
        self._stores.append(Store(endpoints or (self._etcd,), **options))
        return self._stores[-1]

    async def proxy(self, target: str | None = None) -> Proxy:
        """An open proxy, to the shared etcd if no target is given."""
        proxy = Proxy(target or self._etcd)
        await proxy.open()
        self._proxies.append(proxy)
        return proxy

    async def compact(self, revision: int) -> None:
        """Make the shared etcd forget what was before a revision."""
        async with grpc.aio.insecure_channel(self._etcd) as channel:
            await rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision))

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        for proxy in self._proxies:
            await proxy.cut()


@pytest.fixture
async def lab(etcd: str) -> AsyncIterator[Lab]:
    lab = Lab(etcd)
    yield lab
    await lab.close()


@pytest.fixture
async def store(lab: Lab) -> Store:
    """A store on the shared etcd."""
    return lab.open()


@pytest.fixture
async def spawn() -> AsyncIterator[Callable[..., asyncio.Task[Any]]]:
    """Starts tasks that end with the test."""
    tasks: list[asyncio.Task[Any]] = []

    def spawn(work: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    yield spawn
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def within() -> Callable[..., Any]:
    """Awaits something that must come soon."""

    async def within(awaited: Awaitable[Any], timeout_s: float = _BOUND_S) -> Any:
        async with asyncio.timeout(timeout_s):
            return await awaited

    return within


@pytest.fixture
def becomes() -> Callable[..., Awaitable[Any]]:
    """Waits until a key has a value (None: is not there)."""

    async def becomes(store: Store, key: str, value: bytes | None) -> Any:
        async with asyncio.timeout(_BOUND_S), contextlib.aclosing(store.watch(key)) as snapshots:
            async for snapshot in snapshots:
                entry = snapshot.entries.get(key)
                if (None if entry is None else entry.value) == value:
                    return entry
        raise AssertionError("the watch ended")

    return becomes
