"""Eight simulated engines in one process, each behind two ports: as a batcher, which reports its
load and its prefix cache over gRPC, and as an OpenAI server over HTTP, for routers that speak that.

`python -m bench.placement.backend CONFIG`, where CONFIG is a JSON object; writes "ready" when it
serves, and one line of JSON about the engines' caches when it is told to end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay_common.cache_feed import CacheService
from forebay_common.prompts import openai_prompt
from forebay_engine.adapters.profiles import load_profile
from forebay_engine.core.pace import Pace
from forebay_engine.core.simulated.profile import Profile
from forebay_engine.runner.backend import Call, Frame, SendFrame
from forebay_engine.runner.cache_report import CacheReport
from forebay_engine.runner.pacing import Ticker
from forebay_engine.runner.service import Gate, InferenceServicer
from forebay_engine.runner.simulated import SimulatedBackend
from forebay_wire.core.http1 import HttpLimits
from forebay_wire.core.limits import Limits
from forebay_wire.exchange import Endpoint, Exchange, answer_json
from forebay_wire.http import HttpServer
from forebay_wire.server import Server

MODEL_VERSION = "m@1"
_CALLS_MAX = 10_000


class Backend(SimulatedBackend):
    """A simulated engine that knows how much of its prompts waits, as a batcher does."""

    waiting_tokens = 0
    calls = 0

    async def call_openai(self, path: str, body: bytes, call: Call, send: SendFrame) -> None:
        """See `SimulatedBackend`."""
        tokens = len(body) // 4
        self.waiting_tokens += tokens
        self.calls += 1

        async def send_on(frame: Frame) -> None:
            nonlocal tokens
            self.waiting_tokens -= tokens
            tokens = 0
            await send(frame)

        try:
            await super().call_openai(path, body, call, send_on)
        finally:
            self.waiting_tokens -= tokens
            self.calls -= 1


class Reports(batcher_rpc.BatcherServiceServicer):
    """A batcher's report of its replica, ten times a second."""

    def __init__(self, backend: Backend, replica: batcher.Replica) -> None:
        self._backend = backend
        self._replica = replica

    async def WatchReplica(  # noqa: N802
        self, request: batcher.WatchReplicaRequest, context: Any
    ) -> AsyncIterator[batcher.WatchReplicaResponse]:
        """See the contract."""
        revision = 0
        [model] = self._replica.models
        while True:
            revision += 1
            model.in_flight = min(self._backend.calls, model.slots)
            model.queued = self._backend.calls - model.in_flight
            model.waiting_prompt_tokens = self._backend.waiting_tokens
            model.kv_cache_usage = self._backend.load_now().kv_cache_usage
            yield batcher.WatchReplicaResponse(revision=revision, replica=self._replica)
            await asyncio.sleep((request.load_interval_ms or 100) / 1000)


class Web:
    """The OpenAI server of one engine."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._infer = Endpoint(self._answer, is_work=True)
        self._about = Endpoint(self._tell)
        limits = HttpLimits(slow_reader_s=600.0, answer_bytes=1 << 26)
        self.server = HttpServer(self._find, limits)

    def _find(self, method: str, path: str) -> Endpoint:
        return self._infer if method == "POST" else self._about

    def _tell(self, exchange: Exchange) -> None:
        answer_json(exchange, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _answer(self, exchange: Exchange) -> None:
        path, body = exchange.head.path, exchange.body
        call = Call(exchange.request_id, time.time_ns())
        call.prompt = functools.partial(openai_prompt, path, body)
        has_begun = False

        async def send(frame: Frame) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                exchange.begin(frame.content_type)
            exchange.write(frame.body)
            if frame.last:
                exchange.end()

        await self._backend.call_openai(path, body, call, send)


async def serve(config: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    backends = []
    tasks = []
    for replica_id, grpc_port, http_port in config["replicas"]:
        backend, report = await _start(config, replica_id, grpc_port, http_port)
        backends.append(backend)
        tasks.append(asyncio.create_task(report.run()))
    print("ready", flush=True)
    await stopping.wait()
    loads = [backend.load_now() for backend in backends]
    found = {
        "queried_tokens": [load.prefix_queries_tokens for load in loads],
        "hit_tokens": [load.prefix_hits_tokens for load in loads],
        "generated_tokens": [load.generated_tokens for load in loads],
    }
    print(json.dumps(found), flush=True)


async def _start(
    config: dict[str, Any], replica_id: str, grpc_port: int, http_port: int
) -> tuple[Backend, CacheReport]:
    spec = engine.ModelSpec(
        model_version=MODEL_VERSION,
        backend=engine.BACKEND_SIMULATED,
    )
    backend = Backend(spec, _profile(config["profile"]), waiting_max=_CALLS_MAX)
    report = CacheReport(MODEL_VERSION, names_max=1 << 17, blocks_max=1 << 18)
    backend.report_cache(report)
    loaded = await backend.load(lambda phase: None)
    servicer = InferenceServicer(
        backend,
        Ticker(Pace(from_streams=1 << 20, interval_s=0.0)),
        model_version=MODEL_VERSION,
        calls_max=_CALLS_MAX,
    )
    servicer.set_gate(Gate.OPEN)
    server = Server(Limits(connection_age_s=0, streams=_CALLS_MAX))
    inference_rpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    engine_rpc.add_CacheServiceServicer_to_server(CacheService(report.feed), server.grpc)
    replica = batcher.Replica(
        replica_id=replica_id,
        pool="default",
        address=f"127.0.0.1:{grpc_port}",
        role=batcher.ROLE_ACTIVE,
        models=[
            batcher.ReplicaModel(
                model_version=MODEL_VERSION,
                state=engine.MODEL_STATE_ACTIVE,
                slots=loaded.max_sequences,
                context_tokens=loaded.context_tokens,
                task=engine.TASK_GENERATE,
            )
        ],
    )
    batcher_rpc.add_BatcherServiceServicer_to_server(
        Reports(backend, replica),  # type: ignore[abstract]
        server.grpc,
    )
    await server.listen(f"127.0.0.1:{grpc_port}")
    await Web(backend).server.listen(f"127.0.0.1:{http_port}")
    return backend, report


def _profile(name: str) -> Profile:
    """A profile whose loads take no time."""
    return dataclasses.replace(
        load_profile(name),
        process_ms=0.0,
        import_ms=0.0,
        engine_init_ms=0.0,
        weights_ms=0.0,
        warm_up_ms=0.0,
    )


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(json.loads(sys.argv[1])))
