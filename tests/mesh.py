"""A whole mesh of real processes: etcd, registry, router, and replicas of engine host and batcher.

Tests get it by the `mesh` fixtures; benchmarks use it too. Addresses are found as any client finds
them: in etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay.router.v1 import router_service_pb2 as router
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_client.traces.receiver import SpanReceiver
from forebay_client.traces.store import SpanReader, SpanWriter
from forebay_common.channel import connect
from forebay_common.discovery import Keys, from_json
from forebay_common.store import Store
from google.protobuf import json_format

POLL_S = 0.02
STARTED_S = 30.0


@dataclasses.dataclass(slots=True)
class Replica:
    """An engine host and its batcher."""

    replica_id: str
    host: subprocess.Popen[bytes]
    batcher: subprocess.Popen[bytes]


class Mesh:
    """Starts services as processes and finds them again."""

    def __init__(self, directory: Path, etcd: str, namespace: str) -> None:
        self.directory = directory
        self.etcd = etcd
        self.namespace = namespace
        self.spans = directory / "spans.db"
        self.http = ""
        self.grpc = ""
        self.replicas: dict[str, Replica] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment: dict[str, str] = {}
        self._receiver: SpanReceiver | None = None

    async def start(
        self,
        *specs: engine.ModelSpec,
        drain_timeout_s: float = 5,
        router: Mapping[str, str] | None = None,
    ) -> None:
        """Start all but the replicas, with these model versions in the catalogue.

        `router` is what the router's environment has besides.
        """
        self._receiver = SpanReceiver(SpanWriter(self.spans))
        collector = await self._receiver.listen("127.0.0.1:0")
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")},
            "FOREBAY_ETCD_ENDPOINTS": self.etcd,
            "FOREBAY_NAMESPACE": self.namespace,
            "FOREBAY_DRAIN_TIMEOUT_S": str(drain_timeout_s),
            "FOREBAY_ROUTER_GRPC_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_HTTP_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_OPEN": "true",
            "FOREBAY_REGISTRY_LISTEN": "127.0.0.1:0",
            "FOREBAY_REGISTRY_BOOTSTRAP": json.dumps([_put_version(spec) for spec in specs]),
            "FOREBAY_ENGINE_CANARY_DIR": str(self.directory / "canaries"),
            "FOREBAY_ENGINE_RESTART_FIRST_S": "0.1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        self.registry = self.spawn("registry")
        self.router = self.spawn("router", **(router or {}))
        addresses = await self._addresses("router")
        self.grpc, self.http = addresses["grpc"], addresses["http"]

    def spawn(self, service: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one service; its log goes to a file of its name."""
        with (self.directory / f"{service}-{len(self._processes)}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"forebay_{service}"],
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def add_replica(
        self,
        replica_id: str,
        *specs: engine.ModelSpec,
        role: str = "active",
        **batcher_environment: str,
    ) -> None:
        """Start an engine host that loads the given model versions, and its batcher."""
        socket = f"unix:{self.directory}/{replica_id}.sock"
        loads = [json_format.MessageToDict(spec) for spec in specs]
        host = self.spawn(
            "engine",
            FOREBAY_ENGINE_LISTEN=socket,
            FOREBAY_ENGINE_LOAD=json.dumps(loads),
            FOREBAY_INSTANCE_ID=f"host-{replica_id}",
        )
        added = self.add_batcher(replica_id, role, **batcher_environment)
        self.replicas[replica_id] = Replica(replica_id, host, added)

    def add_batcher(
        self, replica_id: str, role: str = "active", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a batcher of a replica's host."""
        return self.spawn(
            "batcher",
            FOREBAY_BATCHER_LISTEN="127.0.0.1:0",
            FOREBAY_BATCHER_ENGINE_ADDRESS=f"unix:{self.directory}/{replica_id}.sock",
            FOREBAY_BATCHER_REPLICA_ID=replica_id,
            FOREBAY_BATCHER_ROLE=role,
            FOREBAY_INSTANCE_ID=replica_id,
            **environment,
        )

    async def view(self) -> dict[str, router.RoutedReplica]:
        """The replicas as the router sees them."""
        async with connect(self.grpc) as channel:
            stub = router_rpc.RouterServiceStub(channel)
            answer = await stub.ListReplicas(router.ListReplicasRequest(), timeout=5)
        return {routed.replica.replica_id: routed for routed in answer.replicas}

    async def placeable(self, *replica_ids: str, timeout_s: float = 30) -> float:
        """Wait until the router may choose exactly these; returns the seconds it took."""

        async def check() -> bool:
            seen = await self.view()
            return {name for name, routed in seen.items() if routed.placeable} == set(replica_ids)

        return await until(check, timeout_s)

    async def replica_record(self, replica_id: str) -> batcher.Replica | None:
        """What etcd holds of a replica."""
        async with Store.open([self.etcd]) as store:
            entry = await store.get(Keys(self.namespace).replica(replica_id))
        return from_json(batcher.Replica, entry.value) if entry else None

    async def engine_status(self, replica_id: str, model_version: str = "") -> engine.ModelStatus:
        """A model version of a replica's host; the only one when none is named."""
        from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc

        async with connect(f"unix:{self.directory}/{replica_id}.sock") as channel:
            watch = engine_rpc.EngineServiceStub(channel).WatchEngine(
                engine.WatchEngineRequest(), timeout=5
            )
            answer = await watch.read()
            watch.cancel()
        found: list[engine.ModelStatus] = [
            status for status in answer.models if model_version in ("", status.spec.model_version)
        ]
        return found[0]

    def errors_logged(self) -> list[str]:
        """What any process called an error."""
        return [
            line[:500]
            for log in self.directory.glob("*.log")
            for line in log.read_text().splitlines()
            if '"level": "ERROR"' in line or line.startswith("Traceback")
        ]

    def reader(self) -> SpanReader:
        """The spans that were collected."""
        return SpanReader(self.spans)

    async def stop(self) -> None:
        """End every process, the last started first; none is left."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self._processes:
            try:
                await asyncio.to_thread(process.wait, max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._receiver is not None:
            await self._receiver.close()

    async def _addresses(self, service: str) -> dict[str, str]:
        found: dict[str, str] = {}

        async def announced() -> bool:
            listing = await store.list(f"{self.namespace}/instances/{service}/")
            for entry in listing.entries.values():
                found.update(json.loads(entry.value)["addresses"])
            return bool(found)

        # While processes start, etcd may get little of the machine.
        async with Store.open([self.etcd], timeout_s=STARTED_S) as store:
            await until(announced, STARTED_S)
        return found


async def ask(
    stub: inference_rpc.InferenceServiceStub, *, tokens: int = 3, text: str = "Hello"
) -> str:
    """One answer of the model `sim`, over gRPC."""
    request = inference.GenerateRequest(
        model="sim", text=text, sampling=inference.SamplingOptions(max_tokens=tokens)
    )
    call = stub.Generate(request, timeout=30)
    return "".join([part.text_delta async for part in call])


class Load:
    """Asks all the time, several at once, and keeps every failure."""

    def __init__(self, address: str, streams: int) -> None:
        self._address = address
        self._streams = streams
        self._stopping = asyncio.Event()
        self.answered = 0
        self.failures: list[str] = []

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._stopping.set()
        await self._task

    async def _run(self) -> None:
        async with connect(self._address) as channel:
            stub = inference_rpc.InferenceServiceStub(channel)
            await asyncio.gather(*(self._ask_on(stub) for _ in range(self._streams)))

    async def _ask_on(self, stub: inference_rpc.InferenceServiceStub) -> None:
        while not self._stopping.is_set():
            try:
                await ask(stub)
                self.answered += 1
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")


def simulated(name: str = "sim@1", *, profile: str = "paced", **fields: Any) -> engine.ModelSpec:
    """A simulated model version."""
    return engine.ModelSpec(
        model_version=name, backend=engine.BACKEND_SIMULATED, profile=profile, **fields
    )


def _put_version(spec: engine.ModelSpec) -> dict[str, Any]:
    name, version = spec.model_version.split("@")
    return {
        "model": name,
        "version": {"version": version, "spec": json_format.MessageToDict(spec)},
    }


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> float:
    """Wait until a condition holds; returns the seconds it took, or fails."""
    started_s = time.monotonic()
    while not await condition():
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"not so within {timeout_s} s"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started_s


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    etcd: str,
    namespace: str,
    *specs: engine.ModelSpec,
    drain_timeout_s: float = 5,
    router: Mapping[str, str] | None = None,
) -> AsyncIterator[Mesh]:
    """A mesh without replicas, ended afterwards."""
    mesh = Mesh(directory, etcd, namespace)
    try:
        await mesh.start(*specs, drain_timeout_s=drain_timeout_s, router=router)
        yield mesh
    finally:
        await mesh.stop()
