"""Processes that are told to end while they answer, die in the middle, or come back."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect
from forebay_common.errors import Reason, from_rpc_error

from tests.mesh import Load, Mesh, ask, running, simulated, until

pytestmark = pytest.mark.integration
_TOKENS = 100
_MESSAGES = [{"role": "user", "content": "What is a forebay?"}]
_BODY = {"model": "sim", "messages": _MESSAGES, "ignore_eos": True}


class Streams:
    """Streams over HTTP and gRPC that have all begun."""

    def __init__(self, mesh: Mesh, *, each: int, tokens: int = _TOKENS) -> None:
        self._mesh = mesh
        self._tokens = tokens
        self._begun = [asyncio.Event() for _ in range(2 * each)]
        self._tasks = [
            asyncio.create_task((self._http if n % 2 else self._grpc)(begun))
            for n, begun in enumerate(self._begun)
        ]

    async def begun(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in self._begun))

    async def ends(self) -> set[str]:
        """How each ended: `whole`, or the one reason."""
        async with asyncio.timeout(20):
            return set(await asyncio.gather(*self._tasks))

    async def _grpc(self, begun: asyncio.Event) -> str:
        options = pb.SamplingOptions(max_tokens=self._tokens, ignore_eos=True)
        request = pb.GenerateRequest(model="sim", text="What is a forebay?", sampling=options)
        tokens = 0
        async with connect(self._mesh.grpc) as channel:
            try:
                async for part in rpc.InferenceServiceStub(channel).Generate(request, timeout=30):
                    begun.set()
                    tokens += len(part.token_ids)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason.value
        return "whole" if tokens == self._tokens else f"{tokens} tokens"

    async def _http(self, begun: asyncio.Event) -> str:
        body = {**_BODY, "max_tokens": self._tokens, "stream": True}
        url = f"http://{self._mesh.http}/v1/chat/completions"
        lines: list[bytes] = []
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            async for line in answer.content:
                begun.set()
                lines.append(line)
        events = [line for line in lines if line.startswith(b"data: ")]
        if events[-1] == b"data: [DONE]\n":
            return "whole"
        errors = [event for event in events if b'"error"' in event]
        assert events[-1:] == errors, "one error, and nothing after it"
        code: str = json.loads(errors[0].removeprefix(b"data: "))["error"]["code"]
        return code.upper()


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 15)


async def test_a_router_told_to_end_finishes_its_streams_and_refuses_the_rest(mesh: Mesh) -> None:
    streams = Streams(mesh, each=20)
    await streams.begun()
    async with aiohttp.ClientSession() as http, connect(mesh.grpc) as channel:
        url = f"http://{mesh.http}/v1/chat/completions"
        async with http.post(url, json={**_BODY, "max_tokens": 1}) as answer:
            assert answer.status == 200
        mesh.router.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            async with http.post(url, json={**_BODY, "max_tokens": 1}) as answer:
                if answer.status == 200:
                    return False
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "draining"
            return True

        await until(refuses, 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(rpc.InferenceServiceStub(channel))
        assert from_rpc_error(caught.value).reason is Reason.DRAINING
        assert await streams.ends() == {"whole"}
    assert await exit_code(mesh.router) == 0
    assert mesh.errors_logged() == []


async def test_a_batcher_told_to_end_loses_no_request(mesh: Mesh) -> None:
    batcher = mesh.replicas["r1"].batcher
    async with Load(mesh.grpc, 4) as load:
        streams = Streams(mesh, each=10)
        await streams.begun()
        batcher.send_signal(signal.SIGTERM)
        assert await streams.ends() == {"whole"}
        assert await exit_code(batcher) == 0
        await mesh.placeable("r2")
        answered = load.answered

        async def goes_on() -> bool:
            return load.answered > answered + 10

        await until(goes_on, 10)
    assert load.failures == []
    assert mesh.errors_logged() == []


async def test_an_engine_host_told_to_end_finishes_its_streams(mesh: Mesh) -> None:
    host = mesh.replicas["r1"].host
    async with Load(mesh.grpc, 4) as load:
        streams = Streams(mesh, each=10)
        await streams.begun()
        host.send_signal(signal.SIGTERM)
        assert await streams.ends() == {"whole"}
        assert await exit_code(host) == 0
        await mesh.placeable("r2")
    assert load.failures == []
    assert mesh.errors_logged() == []


async def test_a_whole_replica_told_to_end_finishes_its_streams(mesh: Mesh) -> None:
    """As a pod is ended: every process of it at once."""
    replica = mesh.replicas["r1"]
    async with Load(mesh.grpc, 4) as load:
        streams = Streams(mesh, each=10)
        await streams.begun()
        replica.host.send_signal(signal.SIGTERM)
        replica.batcher.send_signal(signal.SIGTERM)
        assert await streams.ends() == {"whole"}
        assert [await exit_code(p) for p in (replica.host, replica.batcher)] == [0, 0]
        await mesh.placeable("r2")
    assert load.failures == []
    assert mesh.errors_logged() == []


@pytest.fixture
async def lone_mesh(tmp_path: Path, etcd: str, namespace: str) -> AsyncIterator[Mesh]:
    """One replica with two models, and processes that drain for a moment only."""
    one, two = simulated(), simulated("other@1")
    async with running(tmp_path, etcd, namespace, one, two, drain_timeout_s=0.5) as mesh:
        mesh.add_replica("r1", one, two)
        await mesh.placeable("r1")
        yield mesh


async def test_streams_longer_than_the_grace_are_told_so_once(lone_mesh: Mesh) -> None:
    streams = Streams(lone_mesh, each=5, tokens=3000)
    await streams.begun()
    lone_mesh.router.send_signal(signal.SIGTERM)
    assert await streams.ends() <= {"DRAINING", "REPLICA_LOST"}
    assert await exit_code(lone_mesh.router) == 0
    assert lone_mesh.errors_logged() == []


async def test_one_models_runner_dies_mid_stream_and_the_other_models_streams_go_on(
    lone_mesh: Mesh,
) -> None:
    streams = Streams(lone_mesh, each=5)
    request = pb.GenerateRequest(
        model="other", text="Go on.", sampling=pb.SamplingOptions(max_tokens=200, ignore_eos=True)
    )
    async with connect(lone_mesh.grpc) as channel:
        other = rpc.InferenceServiceStub(channel).Generate(request)
        await other.read()
        await streams.begun()
        victim = await lone_mesh.engine_status("r1", "sim@1")
        os.kill(victim.runner_pid, signal.SIGKILL)
        # They go on with the runner's successor, if that is there in time.
        assert await streams.ends() <= {"whole", "REPLICA_LOST"}
        tokens = 1
        while (part := await other.read()) is not grpc.aio.EOF:
            tokens += len(part.token_ids)
        assert tokens >= 200
    await lone_mesh.placeable("r1")


async def test_without_any_replica_the_answer_is_503_until_one_is_back(lone_mesh: Mesh) -> None:
    replica = lone_mesh.replicas["r1"]
    url = f"http://{lone_mesh.http}/v1/chat/completions"
    streams = Streams(lone_mesh, each=2)
    await streams.begun()
    replica.batcher.kill()
    assert await streams.ends() == {"REPLICA_LOST"}
    async with aiohttp.ClientSession() as http:
        async with http.post(url, json={**_BODY, "max_tokens": 1}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["code"] == "no_replica"
        lone_mesh.add_batcher("r1")
        await lone_mesh.placeable("r1")
        async with http.post(url, json={**_BODY, "max_tokens": 1}) as answer:
            assert answer.status == 200
    assert lone_mesh.errors_logged() == []


async def test_without_the_registry_requests_are_answered(lone_mesh: Mesh) -> None:
    lone_mesh.registry.kill()
    await exit_code(lone_mesh.registry)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://{lone_mesh.http}/v1/models") as answer:
            assert {model["id"] for model in (await answer.json())["data"]} >= {"sim", "other"}
        url = f"http://{lone_mesh.http}/v1/chat/completions"
        for model in ("sim", "other", "other@1"):
            async with http.post(url, json={**_BODY, "model": model, "max_tokens": 1}) as answer:
                assert answer.status == 200
