"""How the supervisor sees that a service does its work."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from forebay_common.channel import connect
from forebay_common.errors import ForebayError
from forebay_common.store import Store
from grpc_health.v1 import health_pb2, health_pb2_grpc

_INTERVAL_S = 0.1
_CALL_TIMEOUT_S = 5.0


async def listens(address: str) -> None:
    """Wait until somebody accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        await asyncio.sleep(_INTERVAL_S)


async def serves(address: str, service: str) -> None:
    """Wait until the service at `host:port` says that it is ready."""
    while True:
        await listens(address)
        with contextlib.suppress(grpc.RpcError):
            async with connect(address) as channel:
                call = health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service=service)
                )
                while (answer := await call.read()) is not grpc.aio.EOF:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
        await asyncio.sleep(_INTERVAL_S)


async def stores(endpoints: tuple[str, ...], namespace: str) -> None:
    """Wait until etcd answers reads."""
    async with Store.open(endpoints, timeout_s=_CALL_TIMEOUT_S) as store:
        while True:
            with contextlib.suppress(ForebayError):
                await store.get(f"{namespace}/probe")
                return
            await asyncio.sleep(_INTERVAL_S)
