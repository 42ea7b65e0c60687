"""Several router processes behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc
from forebay_common.channel import connect
from forebay_common.discovery import Instance, Keys
from forebay_common.store import Store

from .conftest import WAIT_S, StartStandIn, eventually

pytestmark = pytest.mark.integration
PROCESSES = 2
CONNECTIONS = 24


@pytest.fixture
async def supervisor(
    etcd: str, namespace: str, catalogue: None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "forebay_router",
        env={
            **os.environ,
            "FOREBAY_ETCD_ENDPOINTS": etcd,
            "FOREBAY_NAMESPACE": namespace,
            "FOREBAY_INSTANCE_ID": "shared",
            "FOREBAY_ROUTER_OPEN": "true",
            "FOREBAY_ROUTER_GRPC_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_HTTP_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_PROCESSES": str(PROCESSES),
        },
    )
    yield process
    if process.returncode is None:
        process.kill()
        await process.wait()


def _children(pid: int) -> set[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in path.read_text().split()}


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def _instances(store: Store, keys: Keys) -> dict[str, Instance]:
    found = {}
    for number in range(1, PROCESSES + 1):
        key = keys.instance("router", f"shared-{number}")
        if (entry := await store.get(key)) is not None:
            found[key] = Instance.decode(key, entry.value)
    return found


async def _all_announced(store: Store, keys: Keys) -> list[Instance]:
    async def announced() -> bool:
        return len(await _instances(store, keys)) == PROCESSES

    await eventually(announced, within_s=30)
    return list((await _instances(store, keys)).values())


async def _ask(address: str) -> None:
    async with connect(address) as channel:
        call = inference_rpc.InferenceServiceStub(channel).Generate(
            inference.GenerateRequest(model="chat", text="hello"),
            timeout=WAIT_S,
            wait_for_ready=True,
        )
        assert [part async for part in call]


async def test_processes_share_a_port_and_their_ends(
    supervisor: asyncio.subprocess.Process,
    start_stand_in: StartStandIn,
    store: Store,
    keys: Keys,
) -> None:
    await start_stand_in()
    instances = await _all_announced(store, keys)
    assert len({instance.addresses["grpc"] for instance in instances}) == 1
    assert len({instance.addresses["http"] for instance in instances}) == 1
    metrics = {instance.addresses["metrics"] for instance in instances}
    assert len(metrics) == PROCESSES

    address = instances[0].addresses["grpc"]
    await asyncio.gather(*(_ask(address) for _ in range(CONNECTIONS)))
    shares = [await _answered(listen) for listen in metrics]
    assert sum(shares) == CONNECTIONS
    # By chance alone one of two gets nothing once in 8 million runs.
    assert min(shares) > 0

    children = _children(supervisor.pid)
    assert len(children) == PROCESSES
    victim = min(children)
    os.kill(victim, signal.SIGKILL)

    async def restarted() -> bool:
        now = _children(supervisor.pid)
        return victim not in now and len(now) == PROCESSES

    await eventually(restarted, within_s=10)
    with contextlib.suppress(grpc.aio.AioRpcError):
        # A connection that the kernel had queued for the dead one may be lost.
        await _ask(address)
    await _ask(address)

    children = _children(supervisor.pid)
    supervisor.kill()
    await supervisor.wait()

    async def gone() -> bool:
        return not any(_is_running(pid) for pid in children)

    await eventually(gone, within_s=20)


async def test_processes_drain_together(
    supervisor: asyncio.subprocess.Process, store: Store, keys: Keys
) -> None:
    await _all_announced(store, keys)
    supervisor.terminate()
    assert await asyncio.wait_for(supervisor.wait(), 20) == 0
    assert await _instances(store, keys) == {}


async def _answered(listen: str) -> int:
    host, _, port = listen.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    line = next(line for line in text.splitlines() if line.startswith("forebay_wire_calls_total "))
    return int(float(line.split()[1]))
