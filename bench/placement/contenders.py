"""Who places requests: this router, this router by other rules, and other routers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Instance, Keys, to_json
from forebay_common.store import Store

from bench.placement.backend import MODEL_VERSION
from bench.relay import peers
from bench.relay.native import FOLDER
from bench.relay.pinned import Pinned, wait_for_line
from tests.conftest import free_port

_START_S = 60.0
_POLL_S = 0.05
NAMESPACE = "/bench-placement"
PROFILE = "h100-llama-3.1-8b"
REPLICAS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """The back ends of one run."""

    process: Pinned
    grpc: Sequence[int]
    http: Sequence[int]

    def end(self) -> dict[str, Any]:
        """What their caches did; ends them."""
        self.process.stop()
        found: dict[str, Any] = json.loads(self.process.log_tail().strip().splitlines()[-1])
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What contenders are started with."""

    etcd: str
    core: int
    engines: Engines


@contextlib.contextmanager
def running_engines(core: int) -> Iterator[Engines]:
    """Fresh engines with empty caches."""
    grpc, http = ([free_port() for _ in range(REPLICAS)] for _ in range(2))
    config = {
        "profile": PROFILE,
        "replicas": [
            (f"r{number}", grpc_port, http_port)
            for number, (grpc_port, http_port) in enumerate(zip(grpc, http, strict=True))
        ],
    }
    log = FOLDER / "logs" / "placement-engines.log"
    command = [sys.executable, "-m", "bench.placement.backend", json.dumps(config)]
    process = Pinned(command, core, log)
    try:
        wait_for_line(process, "ready", timeout_s=_START_S)
        yield Engines(process, grpc, http)
    finally:
        process.stop()


async def list_replicas(endpoint: str, engines: Engines) -> None:
    """Put the catalogue and the replicas where routers look for them."""
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
        for number, port in enumerate(engines.grpc):
            replica = batcher.Replica(
                replica_id=f"r{number}",
                pool="default",
                address=f"127.0.0.1:{port}",
                role=batcher.ROLE_ACTIVE,
                models=[
                    batcher.ReplicaModel(
                        model_version=MODEL_VERSION, state=engine.MODEL_STATE_ACTIVE
                    )
                ],
            )
            await store.put(keys.replica(replica.replica_id), to_json(replica))


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """A router that serves."""

    process: Pinned
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One router with one rule."""

    name: str
    serve: Callable[[Site], AbstractContextManager[Serving]]
    package: peers.Package | None = None


def _forebay(*command: str) -> Callable[[Site], AbstractContextManager[Serving]]:
    @contextlib.contextmanager
    def serve(site: Site) -> Iterator[Serving]:
        instance_id = f"router-{free_port()}"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("FOREBAY_", "OTEL_"))},
            "FOREBAY_ETCD_ENDPOINTS": site.etcd,
            "FOREBAY_NAMESPACE": NAMESPACE,
            "FOREBAY_INSTANCE_ID": instance_id,
            "FOREBAY_DRAIN_TIMEOUT_S": "0",
            "FOREBAY_ROUTER_GRPC_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_HTTP_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_OPEN": "true",
        }
        log = FOLDER / "logs" / "placement-forebay.log"
        process = Pinned([sys.executable, "-m", *command], site.core, log, environment)
        try:
            address = asyncio.run(_announced(process, site.etcd, instance_id))
            serving = Serving(process, int(address.rpartition(":")[2]))
            _wait_until_answering(serving)
            yield serving
        finally:
            process.stop()

    return serve


def _peer(
    name: str, command: Callable[[int, Sequence[str], str], list[str]], policy: str
) -> Callable[[Site], AbstractContextManager[Serving]]:
    @contextlib.contextmanager
    def serve(site: Site) -> Iterator[Serving]:
        port = free_port()
        urls = [f"http://127.0.0.1:{each}" for each in site.engines.http]
        log = FOLDER / "logs" / f"placement-{name}.log"
        process = Pinned(command(port, urls, policy), site.core, log)
        try:
            serving = Serving(process, port)
            _wait_until_answering(serving)
            yield serving
        finally:
            process.stop()

    return serve


async def _announced(process: Pinned, etcd: str, instance_id: str) -> str:
    key = Keys(NAMESPACE).instance("router", instance_id)
    deadline = time.monotonic() + _START_S
    async with Store.open([etcd]) as store:
        while (entry := await store.get(key)) is None:
            if not process.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start: {process.log_tail()}")
            await asyncio.sleep(_POLL_S)
    return Instance.decode(key, entry.value).addresses["http"]


def _wait_until_answering(serving: Serving) -> None:
    """Wait until a short chat completion is answered."""
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{serving.port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            return
        except (urllib.error.URLError, OSError) as error:
            if not serving.process.is_running() or time.monotonic() > deadline:
                tail = serving.process.log_tail()
                raise RuntimeError(f"no answer ({error}): {tail}") from None
        time.sleep(_POLL_S)


CONTENDERS = (
    Contender("ours", _forebay("forebay_router")),
    Contender("round robin", _forebay("bench.placement.baseline", "round_robin")),
    Contender("least loaded", _forebay("bench.placement.baseline", "least_loaded")),
    Contender(
        "vllm-router",
        _peer("vllm-router", peers.vllm_router, "cache_aware"),
        peers.VLLM_ROUTER,
    ),
    Contender("smg", _peer("smg", peers.smg, "cache_aware"), peers.SMG),
)
