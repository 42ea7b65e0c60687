"""Many at once, and callers who leave at any moment: nothing stays behind in any process."""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect

from tests.conftest import free_port
from tests.mesh import Mesh, until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
_SEED = int(os.environ.get("FOREBAY_TEST_SEED", "7"))
_CHAT = "/v1/chat/completions"


def a_chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "What is a forebay?"}]
    return json.dumps({"model": "sim", "messages": messages, **fields}).encode()


async def open_files(mesh: Mesh) -> dict[str, int]:
    """Open file descriptors of the processes a request passes."""
    pids = {"router": mesh.router.pid}
    for name, replica in mesh.replicas.items():
        pids |= {f"batcher {name}": replica.batcher.pid, f"host {name}": replica.host.pid}
        pids[f"runner {name}"] = (await mesh.engine_status(name, "sim@1")).runner_pid
    return {name: count_files(pid) for name, pid in pids.items()}


def count_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def router_gauge(address: str, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}/metrics") as answer:
        text = await answer.text()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def is_quiet(mesh: Mesh) -> bool:
    """Whether no process counts a request any more."""
    if await router_gauge(mesh.http, "forebay_router_in_flight") != 0:
        return False
    for routed in (await mesh.view()).values():
        loads = [(model.queued, model.in_flight) for model in routed.replica.models]
        if routed.in_flight or any(load != (0, 0) for load in loads):
            return False
    for name in mesh.replicas:
        load = (await mesh.engine_status(name, "sim@1")).load
        if load.running or load.waiting:
            return False
    return True


async def settle(mesh: Mesh, files_before: Mapping[str, int]) -> None:
    """Wait until nothing is in flight and no descriptor is left; connections to peers are kept."""

    async def settled() -> bool:
        files = await open_files(mesh)
        return await is_quiet(mesh) and all(files[n] <= files_before[n] + 4 for n in files)

    await until(settled, 10)
    assert mesh.errors_logged() == []


async def test_five_hundred_calls_that_leave_at_random_moments_leave_nothing(
    shared_mesh: Mesh,
) -> None:
    mesh = shared_mesh
    rng = random.Random(_SEED)
    ends: list[str] = []

    async def ask(stub: rpc.InferenceServiceStub, number: int) -> None:
        sampling = pb.SamplingOptions(max_tokens=rng.choice((1, 5, 1000)))
        request = pb.GenerateRequest(model="sim", text=f"Question {number}?", sampling=sampling)
        call = stub.Generate(request, timeout=rng.choice((0.05, 0.3, 30)))
        leaves_s = rng.uniform(0, 1.5)
        try:
            async with asyncio.timeout(leaves_s):
                async for _ in call:
                    pass
            ends.append("OK")
        except TimeoutError:
            call.cancel()
            ends.append("left")
        except grpc.aio.AioRpcError as error:
            ends.append(error.code().name)

    before = await open_files(mesh)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connect(mesh.grpc)) for _ in range(4)]
        stubs = [rpc.InferenceServiceStub(channel) for channel in channels]
        await asyncio.gather(*(ask(stubs[n % 4], n) for n in range(500)))
    await settle(mesh, before)
    assert len(ends) == 500
    assert set(ends) <= {"OK", "left", "DEADLINE_EXCEEDED"}


async def test_connections_cut_at_random_moments_leave_nothing(shared_mesh: Mesh) -> None:
    mesh = shared_mesh
    rng = random.Random(_SEED)
    host, _, port = mesh.http.rpartition(":")
    body = a_chat(max_tokens=1000, stream=True)
    whole = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        _CHAT.encode(),
        len(body),
        body,
    )

    async def cut() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = rng.choice((rng.randrange(len(whole)), len(whole), len(whole)))
        writer.write(whole[:sent])
        try:
            async with asyncio.timeout(rng.uniform(0, 1)):
                await reader.read()
        except TimeoutError:
            pass
        writer.transport.abort()

    before = await open_files(mesh)
    await asyncio.gather(*(cut() for _ in range(300)))
    await settle(mesh, before)


async def test_three_hundred_streams_at_once_end_once_each(shared_mesh: Mesh) -> None:
    mesh = shared_mesh

    async def stream(http: aiohttp.ClientSession) -> tuple[int, bytes]:
        async with http.post(f"http://{mesh.http}{_CHAT}", data=body) as answer:
            return answer.status, await answer.read()

    body = a_chat(max_tokens=5, stream=True)
    before = await open_files(mesh)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        answers = await asyncio.gather(*(stream(http) for _ in range(300)))
    assert {status for status, _ in answers} == {200}
    assert all(text.count(b"data: [DONE]\n\n") == 1 for _, text in answers)
    assert all(text.endswith(b"data: [DONE]\n\n") for _, text in answers)
    await settle(mesh, before)


async def test_a_reader_who_never_reads_is_cut_and_forgotten(shared_mesh: Mesh) -> None:
    mesh = shared_mesh
    http = f"127.0.0.1:{free_port()}"
    router = mesh.spawn(
        "router", FOREBAY_ROUTER_HTTP_LISTEN=http, FOREBAY_ROUTER_SLOW_READER_S="0.3"
    )

    async def ready() -> bool:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{http}/health/ready") as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    await until(ready, 20)
    files = count_files(router.pid)
    # Sixteen choices with twenty candidates each: megabytes a second.
    body = a_chat(
        max_tokens=5000, stream=True, n=16, logprobs=True, top_logprobs=20, ignore_eos=True
    )
    host, _, port = http.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # of every socket transport
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % _CHAT.encode())
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def took_it() -> bool:
        return await router_gauge(http, "forebay_router_in_flight") == 1

    async def cut() -> bool:
        return await router_gauge(http, "forebay_router_in_flight") == 0

    await until(took_it, 5)
    await until(cut, 20)
    writer.transport.abort()

    async def closed() -> bool:
        return count_files(router.pid) <= files + 2 and await is_quiet(mesh)

    await until(closed, 30)
    assert mesh.errors_logged() == []
