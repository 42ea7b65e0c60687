"""Where routers are measured: two cores, back ends, and an etcd that lists them as replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Keys, to_json
from forebay_common.store import Store

from bench.relay.native import FOLDER
from bench.relay.pinned import Pinned, cores, on_core, wait_for_line
from tests.conftest import EtcdProcess, free_port

MODEL_VERSION = "m@1"
NAMESPACE = "/bench-relay"
_REPLICAS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class BackEnd:
    """One process that plays several replicas."""

    process: Pinned
    ports: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What contenders are started with."""

    folder: Path
    """For configuration; goes with the site."""
    cores: tuple[int, int]
    """Of whoever is measured, and of everything else."""
    etcd: str
    replicas: BackEnd
    """gRPC, listed in etcd, without header tables: as batchers are."""
    grpc: BackEnd
    """gRPC, with header tables: as most gRPC servers are."""
    sse: BackEnd
    """The OpenAI protocol over HTTP/1.1."""

    def back_end(self, lane_protocol: str, *, listed: bool) -> BackEnd:
        """What stands behind a router that is spoken to in a protocol."""
        if listed:
            return self.replicas
        return self.grpc if lane_protocol == "grpc" else self.sse


@contextlib.contextmanager
def open_site(programs: Mapping[str, Path]) -> Iterator[Site]:
    """Start everything but the routers, on a core of its own; this process moves there, too."""
    allowed = cores()
    other = allowed[1]
    started: list[Pinned] = []

    def start(name: str, program: str, ports: Sequence[int], *arguments: str) -> BackEnd:
        process = Pinned([str(programs[program]), *arguments], other, FOLDER / f"logs/{name}.log")
        started.append(process)
        wait_for_line(process, "ready")
        return BackEnd(process, ports)

    with tempfile.TemporaryDirectory() as folder, on_core(other):
        etcd = EtcdProcess(Path(folder) / "etcd")
        etcd.start()
        try:
            replicas = [_replica(f"r{n}", free_port()) for n in range(1, _REPLICAS + 1)]
            asyncio.run(_list(etcd.endpoint, replicas))
            listens = [_listen(Path(folder), replica) for replica in replicas]
            listed = [_port(replica) for replica in replicas]
            plain, web = ([free_port() for _ in range(_REPLICAS)] for _ in range(2))
            yield Site(
                Path(folder),
                allowed,
                etcd.endpoint,
                start("replicas", "grpc_backend", listed, "table=0", *listens),
                start("grpc", "grpc_backend", plain, "table=4096", *(f"listen={p}" for p in plain)),
                start("sse", "sse_backend", web, *(f"listen={p}" for p in web)),
            )
        finally:
            for process in started:
                process.stop()
            etcd.kill()


def _replica(replica_id: str, port: int) -> batcher.Replica:
    return batcher.Replica(
        replica_id=replica_id,
        pool="default",
        address=f"127.0.0.1:{port}",
        role=batcher.ROLE_ACTIVE,
        models=[
            batcher.ReplicaModel(
                model_version=MODEL_VERSION,
                state=engine.MODEL_STATE_ACTIVE,
                slots=256,
                context_tokens=4096,
                task=engine.TASK_GENERATE,
            )
        ],
    )


def _port(replica: batcher.Replica) -> int:
    return int(replica.address.rpartition(":")[2])


def _listen(folder: Path, replica: batcher.Replica) -> str:
    """The back end's argument for a replica, whose one report lies in a file."""
    report = folder / f"{replica.replica_id}.report"
    report.write_bytes(
        batcher.WatchReplicaResponse(revision=1, replica=replica).SerializeToString()
    )
    return f"listen={_port(replica)},{replica.replica_id},{report}"


async def _list(endpoint: str, replicas: Sequence[batcher.Replica]) -> None:
    name, version = MODEL_VERSION.split("@")
    spec = engine.ModelSpec(model_version=MODEL_VERSION, backend=engine.BACKEND_SIMULATED)
    model = registry.Model(
        name=name,
        versions=[registry.ModelVersion(version=version, spec=spec)],
        split=[registry.SplitEntry(version=version, weight=1)],
    )
    keys = Keys(NAMESPACE)
    async with Store.open([endpoint]) as store:
        await store.put(keys.model(name), to_json(model))
        for replica in replicas:
            await store.put(keys.replica(replica.replica_id), to_json(replica))
