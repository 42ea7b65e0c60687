"""A registry of the test's own, as a real process would construct it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.registry.v1 import registry_service_pb2_grpc as registry_grpc
from forebay_common.channel import connect
from forebay_common.config import CommonConfig
from forebay_registry.__main__ import serve
from forebay_registry.config import Config
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclasses.dataclass(frozen=True)
class Running:
    """A registry that serves, and a client of it."""

    address: str
    stub: registry_grpc.RegistryServiceAsyncStub
    health: health_pb2_grpc.HealthStub
    stop: Callable[[], Awaitable[None]]

    async def health_becomes(self, wanted: int, *, within_s: float = 15) -> None:
        """Wait until health says so."""
        async with asyncio.timeout(within_s):
            watch = self.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            async for answer in watch:
                if answer.status == wanted:
                    watch.cancel()
                    return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            endpoint: str, namespace: str, *, ready: bool = True, **options: object
        ) -> Running:
            stopping = asyncio.Event()
            address = f"127.0.0.1:{free_port()}"
            common = CommonConfig(
                etcd_endpoints=(endpoint,), namespace=namespace, instance_id="r1", drain_timeout_s=2
            )
            config = Config(listen=address, **options)  # type: ignore[arg-type]
            serving = asyncio.create_task(serve(common, config, stopping))
            channel = connect(address)

            async def stop() -> None:
                stopping.set()
                await channel.close()
                await asyncio.wait_for(serving, 10)

            stack.push_async_callback(stop)
            running = Running(
                address,
                registry_grpc.RegistryServiceStub(channel),
                health_pb2_grpc.HealthStub(channel),
                stop,
            )
            if ready:
                await running.health_becomes(health_pb2.HealthCheckResponse.SERVING)
            return running

        yield start


def a_put(model: str = "chat", version: str = "v1", **spec: object) -> registry.PutVersionRequest:
    fields = {"backend": engine.BACKEND_SIMULATED, **spec}
    return registry.PutVersionRequest(
        model=model,
        version=registry.ModelVersion(
            version=version,
            spec=engine.ModelSpec(**fields),  # type: ignore[arg-type]
        ),
    )


@pytest.fixture
def put_request() -> Callable[..., registry.PutVersionRequest]:
    return a_put
