"""Autoscalers as real processes, with real engine hosts and batchers, on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import pytest
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_autoscaler.adapters.processes import Watched, refer
from forebay_common.channel import connect
from forebay_common.discovery import Instance, Keys, View, from_json, to_json
from forebay_common.store import Store

POOL = "p"
MODEL = "chat"


class Fleet:
    """Autoscalers that share an etcd and a directory, and what they run."""

    HELD_TOKENS = 12_000

    def __init__(self, endpoint: str, namespace: str, state_dir: Path, store: Store) -> None:
        self.endpoint = endpoint
        self.namespace = namespace
        self.state_dir = state_dir
        self.store = store
        self.keys = Keys(namespace)
        self.records = View(store, self.keys.replicas, _replica)
        self.instances = View(store, self.keys.instances_of("autoscaler"), Instance.decode)
        self.decided = View(store, self.keys.decisions(POOL), _history)
        self.processes: dict[str, Popen[bytes]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def put_model(self, **spec: Any) -> None:
        """Register the model that the pool serves."""
        fields = {"backend": engine.BACKEND_SIMULATED, "profile": "instant", **spec}
        model = registry.Model(name=MODEL, split=[registry.SplitEntry(version="1", weight=1)])
        model.versions.add(version="1", spec=engine.ModelSpec(model_version=f"{MODEL}@1", **fields))
        await self.store.put(self.keys.model(MODEL), to_json(model))

    async def put_pool(self, **changes: Any) -> None:
        """Put or replace the pool."""
        fields: dict[str, Any] = {
            "name": POOL,
            "models": [MODEL],
            "min_replicas": 1,
            "max_replicas": 3,
            "standby_replicas": 1,
            "target_requests_per_replica": 2,
            "scale_down_window_s": 1,
            **changes,
        }
        await self.store.put(self.keys.pool(POOL), to_json(autoscaler.Pool(**fields)))

    async def start(
        self, instance_id: str, **options: str
    ) -> autoscaler_grpc.AutoscalerServiceStub:
        """Start an autoscaler and wait until it is announced."""
        environ = {
            **os.environ,
            "FOREBAY_ETCD_ENDPOINTS": self.endpoint,
            "FOREBAY_NAMESPACE": self.namespace,
            "FOREBAY_INSTANCE_ID": instance_id,
            "FOREBAY_LEASE_TTL_S": "2",
            "FOREBAY_DRAIN_TIMEOUT_S": "5",
            "FOREBAY_AUTOSCALER_LISTEN": "127.0.0.1:0",
            "FOREBAY_AUTOSCALER_STATE_DIR": str(self.state_dir),
            "FOREBAY_AUTOSCALER_STOP_REPLICAS_ON_EXIT": "true",
            "FOREBAY_AUTOSCALER_STOP_GRACE_S": "6",
            "FOREBAY_AUTOSCALER_DRAIN_TIMEOUT_S": "10",
            "FOREBAY_AUTOSCALER_TICK_INTERVAL_S": "0.2",
            **{f"FOREBAY_AUTOSCALER_{name.upper()}": value for name, value in options.items()},
        }
        with (self.state_dir.parent / f"{instance_id}.log").open("ab") as log:
            self.processes[instance_id] = Popen(
                [sys.executable, "-m", "forebay_autoscaler"], env=environ, stdout=log, stderr=log
            )
        key = self.keys.instance("autoscaler", instance_id)
        await self.until(lambda: key in self.instances.entries, views=(self.instances,))
        address = self.instances.entries[key].addresses["grpc"]
        return autoscaler_grpc.AutoscalerServiceStub(self._channel(address))

    async def kill(self, instance_id: str) -> None:
        """End an autoscaler without a word."""
        process = self.processes.pop(instance_id)
        process.kill()
        await asyncio.to_thread(process.wait)

    async def stop(self, instance_id: str) -> None:
        """End an autoscaler in order; it must exit with 0."""
        process = self.processes.pop(instance_id)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0

    async def leader(self, *, after: str = "") -> str:
        """Wait for a leader, another one than `after`."""
        async with asyncio.timeout(15):
            async with contextlib.aclosing(
                self.store.watch(self.keys.leader("autoscaler"))
            ) as snapshots:
                async for snapshot in snapshots:
                    for entry in snapshot.entries.values():
                        if (leader := entry.value.decode()) != after:
                            return leader
        raise AssertionError("the watch ended")

    async def until(
        self,
        condition: Callable[[], bool],
        *,
        within_s: float = 30,
        views: tuple[View[Any], ...] = (),
    ) -> float:
        """Wait until the records say so; returns how long it took, in seconds."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                for view in views or (self.records,):
                    await view.ready()
                while not condition():
                    waits = [
                        asyncio.ensure_future(view.changed(view.revision))
                        for view in views or (self.records,)
                    ]
                    await asyncio.wait(waits, return_when="FIRST_COMPLETED")
                    for wait in waits:
                        wait.cancel()
        except TimeoutError:
            raise AssertionError(f"not within {within_s} s:\n{self.describe()}") from None
        return time.monotonic() - began_s

    async def until_sized(self, *, active: int, standby: int, within_s: float = 30) -> float:
        """Wait until the pool has exactly these replicas, all of them ready."""

        def is_sized() -> bool:
            return (
                len(self.active) == active
                and len(self.standby) == standby
                and len(self.records.entries) == active + standby
            )

        return await self.until(is_sized, within_s=within_s)

    @property
    def decisions(self) -> list[autoscaler.Decision]:
        """The pool's decisions as saved in etcd, oldest first."""
        saved = next(iter(self.decided.entries.values()), autoscaler.ExplainPoolResponse())
        return list(reversed(saved.decisions))

    async def until_decided(
        self, condition: Callable[[list[autoscaler.Decision]], bool], *, within_s: float = 20
    ) -> list[autoscaler.Decision]:
        """Wait until the saved decisions say so, and return them."""
        await self.until(
            lambda: condition(self.decisions), views=(self.decided,), within_s=within_s
        )
        return self.decisions

    @property
    def replicas(self) -> Mapping[str, batcher.Replica]:
        """The announced replicas, by id."""
        return {record.replica_id: record for record in self.records.entries.values()}

    @property
    def active(self) -> set[str]:
        return self._ready(batcher.ROLE_ACTIVE)

    @property
    def standby(self) -> set[str]:
        return self._ready(batcher.ROLE_STANDBY)

    def _ready(self, role: int) -> set[str]:
        return {
            replica_id
            for replica_id, record in self.replicas.items()
            if record.role == role
            and not record.draining
            and any(model.state == engine.MODEL_STATE_ACTIVE for model in record.models)
        }

    def in_flight(self, replica_id: str) -> int:
        """Requests on a replica, as it announces them."""
        return sum(model.in_flight for model in self.replicas[replica_id].models)

    def pids(self) -> dict[str, dict[str, int]]:
        """Process ids by replica and part, as the launcher has recorded them."""
        found = {}
        for path in (self.state_dir / "replicas").glob("*/replica.json"):
            record = json.loads(path.read_text())
            found[record["replica_id"]] = {
                part: process["pid"] for part, process in record["processes"].items()
            }
        return found

    def hold(self, replica_id: str) -> grpc.aio.UnaryStreamCall[Any, Any]:
        """Begin a request that stays in flight until it is cancelled: its answer is not read."""
        stub = inference_grpc.InferenceServiceStub(self._channel(self.replicas[replica_id].address))
        request = inference.GenerateRequest(model=f"{MODEL}@1", text="x" * 64)
        request.sampling.max_tokens = self.HELD_TOKENS
        request.sampling.ignore_eos = True
        request.sampling.logprobs = 20
        metadata = (("forebay-model", f"{MODEL}@1"),)
        return stub.Generate(request, metadata=metadata)

    def leftovers(self) -> list[str]:
        """Command lines of the processes of this namespace that still run."""
        needle = f"FOREBAY_NAMESPACE={self.namespace}".encode()
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not path.name.isdecimal() or int(path.name) == os.getpid():
                    continue
                if needle in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def describe(self) -> str:
        """What is there, and what the autoscalers have said, for a failed test."""
        lines = [
            f"{r.replica_id} role {r.role} draining {r.draining} models "
            f"{[(m.state, m.queued, m.in_flight) for m in r.models]}"
            for r in self.replicas.values()
        ]
        for log in sorted(self.state_dir.parent.glob("*.log")):
            lines += [f"--- {log.name}", *log.read_text().splitlines()[-25:]]
        return "\n".join(lines)

    def _channel(self, address: str) -> grpc.aio.Channel:
        return self._channels.setdefault(address, connect(address))

    async def close(self) -> None:
        """End everything; nothing may be left."""
        for channel in self._channels.values():
            await channel.close()
        try:
            for instance_id in list(self.processes):
                await self.stop(instance_id)
            assert self.leftovers() == []
            assert list((self.state_dir / "replicas").glob("*")) == []
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
            for pids in self.pids().values():
                for pid in pids.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)


def _history(key: str, value: bytes) -> autoscaler.ExplainPoolResponse:
    return from_json(autoscaler.ExplainPoolResponse, value)


def _replica(key: str, value: bytes) -> batcher.Replica:
    return from_json(batcher.Replica, value)


async def ended(pid: int, *, within_s: float = 20) -> None:
    """Wait for the end of any process of this host."""
    ref = refer(pid)
    if ref is not None:
        watched = Watched(ref)
        assert await watched.wait(within_s), f"process {pid} still runs"


@pytest.fixture
def until_ended() -> Callable[..., Awaitable[None]]:
    return ended


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A short path: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp"))
    yield path / "s"
    shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def a_fleet(endpoint: str, namespace: str, state_dir: Path) -> AsyncIterator[Fleet]:
    async with Store.open((endpoint,)) as store:
        fleet = Fleet(endpoint, namespace, state_dir, store)
        views = [
            asyncio.create_task(view.run())
            for view in (fleet.records, fleet.instances, fleet.decided)
        ]
        try:
            yield fleet
        finally:
            try:
                await fleet.close()
            finally:
                for view in views:
                    view.cancel()
                await asyncio.wait(views)


@pytest.fixture
async def fleet(etcd: str, namespace: str, state_dir: Path) -> AsyncIterator[Fleet]:
    async with a_fleet(etcd, namespace, state_dir) as fleet:
        yield fleet


@pytest.fixture
def make_fleet(namespace: str, state_dir: Path) -> Callable[[str], Any]:
    """A fleet on an etcd of the test's own."""
    return lambda endpoint: a_fleet(endpoint, namespace, state_dir)
