"""A real engine host and its runners, each in a process of its own, as tests use them."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as pb_grpc
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_common.channel import connect
from google.protobuf import json_format

BOUND_S = 20


def a_spec(**changes: Any) -> pb.ModelSpec:
    """A specification of a simulated model version that takes no time."""
    fields = {
        "model_version": "tiny@1",
        "backend": pb.BACKEND_SIMULATED,
        "profile": "instant",
        **changes,
    }
    return pb.ModelSpec(**fields)


class EngineHost:
    """A host's process and clients for it."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        channel = connect(address)
        self.process = process
        self.address = address
        self.stub = pb_grpc.EngineServiceStub(channel)
        self.channels = [channel]
        self.events: list[pb.LoadModelResponse] = []

    async def load(self, spec: pb.ModelSpec) -> list[pb.LoadModelResponse]:
        """Load a version and return every event of the load."""
        return [event async for event in self.stub.LoadModel(pb.LoadModelRequest(spec=spec))]

    async def until(
        self,
        reached: Callable[[pb.ModelStatus], bool],
        *,
        model_version: str = "tiny@1",
        bound_s: float = BOUND_S,
    ) -> pb.ModelStatus:
        """Watch until a version's status is as wanted, and return it."""
        watch = self.stub.WatchEngine(pb.WatchEngineRequest(load_interval_ms=10))
        try:
            async with asyncio.timeout(bound_s):
                async for state in watch:
                    for status in state.models:
                        if status.spec.model_version == model_version and reached(status):
                            return status
        finally:
            watch.cancel()
        raise AssertionError("the watch ended")

    async def until_active(self, *, model_version: str = "tiny@1") -> pb.ModelStatus:
        """Wait until a version takes requests."""
        return await self.until(
            lambda status: status.state == pb.MODEL_STATE_ACTIVE, model_version=model_version
        )

    async def runner(self, *, model_version: str = "tiny@1") -> inference_grpc.InferenceServiceStub:
        """Return a client of an active version's runner."""
        status = await self.until_active(model_version=model_version)
        channel = connect(f"unix:{status.socket_path}")
        self.channels.append(channel)
        return inference_grpc.InferenceServiceStub(channel)

    async def load_of(self, *, model_version: str = "tiny@1") -> pb.EngineLoad:
        """Return a version's load now."""
        return (await self.until(lambda _: True, model_version=model_version)).load

    async def stop(self) -> int:
        """Stop the host as an operator does; return its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), BOUND_S)
        except TimeoutError:
            self.process.kill()
            raise


@contextlib.asynccontextmanager
async def running_host(
    directory: Path, load: Sequence[pb.ModelSpec] = (), **options: object
) -> AsyncIterator[EngineHost]:
    """Run a host with options, as `running_host(directory, [spec], restart_first_s=0.05)`."""
    address = f"unix:{directory}/host.sock"
    environ = {
        **{name: value for name, value in os.environ.items() if "FOREBAY" not in name},
        "FOREBAY_DRAIN_TIMEOUT_S": "5",
        "FOREBAY_ENGINE_LISTEN": address,
        "FOREBAY_ENGINE_CANARY_DIR": str(directory / "canaries"),
        "FOREBAY_ENGINE_LOAD": json.dumps([json_format.MessageToDict(spec) for spec in load]),
    }
    for name, value in options.items():
        environ[f"FOREBAY_ENGINE_{name.upper()}"] = str(value)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay_engine", env=environ
    )
    host = EngineHost(process, address)
    try:
        await asyncio.wait_for(host.channels[0].channel_ready(), BOUND_S)
        yield host
    finally:
        for channel in host.channels:
            await channel.close()
        await host.stop()
