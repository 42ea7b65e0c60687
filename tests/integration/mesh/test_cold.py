"""Models that nobody serves yet: held and loaded once, never called unknown."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path

import aiohttp
import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata as md
from forebay_common.channel import connect
from forebay_common.errors import from_rpc_error

from tests.mesh import Mesh, running, simulated, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
_HERD = 1000


async def ask(stub: rpc.InferenceServiceStub, model: str, timeout_s: float = 60) -> str:
    request = pb.GenerateRequest(
        model=model, text="Hello", sampling=pb.SamplingOptions(max_tokens=2)
    )
    try:
        return "".join(
            [part.text_delta async for part in stub.Generate(request, timeout=timeout_s)]
        )
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason.value


async def holders(mesh: Mesh, model_version: str) -> list[str]:
    return [
        name
        for name, routed in (await mesh.view()).items()
        if any(model.model_version == model_version for model in routed.replica.models)
    ]


async def test_a_herd_on_a_cold_model_makes_one_load(
    tmp_path: Path, etcd: str, namespace: str
) -> None:
    warm, cold = simulated(), simulated("cold@1")
    async with running(tmp_path, etcd, namespace, warm, cold) as mesh:
        for name in ("r1", "r2"):
            mesh.add_replica(name, warm)
        await mesh.placeable("r1", "r2")
        assert await holders(mesh, "cold@1") == []
        async with connect(mesh.grpc) as channel:
            stub = rpc.InferenceServiceStub(channel)
            answers = await asyncio.gather(*(ask(stub, "cold") for _ in range(_HERD)))
        reasons = collections.Counter(answer for answer in answers if answer.isupper())
        assert set(reasons) <= {"NO_REPLICA", "QUEUE_FULL"}
        assert len(answers) - reasons.total() >= 0.99 * _HERD
        [holder] = await holders(mesh, "cold@1")
        status = await mesh.engine_status(holder, "cold@1")
        assert (status.generation, status.restarts) == (1, 0)


async def test_whoever_waits_is_told_what_for(tmp_path: Path, etcd: str, namespace: str) -> None:
    warm, cold = simulated(), simulated("cold@1", profile="staged")
    async with running(tmp_path, etcd, namespace, warm, cold) as mesh:
        mesh.add_replica("r1", warm)
        await mesh.placeable("r1")
        async with connect(mesh.grpc) as channel:
            stub = rpc.InferenceServiceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(
                    model="cold", text="Hello", sampling=pb.SamplingOptions(max_tokens=2)
                ),
                metadata=((md.PROGRESS, "1"),),
                timeout=60,
            )
            parts = [part async for part in call]
        told = [part.progress for part in parts if part.HasField("progress")]
        assert told
        assert {one.model_version for one in told} == {"cold@1"}
        assert all(one.phase for one in told)
        assert all(not part.HasField("progress") for part in parts[len(told) :])
        assert parts[len(told)].HasField("header")


async def test_an_openai_stream_that_waits_gets_comments(
    tmp_path: Path, etcd: str, namespace: str
) -> None:
    warm, cold = simulated(), simulated("cold@1", profile="staged")
    async with running(tmp_path, etcd, namespace, warm, cold) as mesh:
        mesh.add_replica("r1", warm)
        await mesh.placeable("r1")
        body = {
            "model": "cold",
            "stream": True,
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{mesh.http}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            lines = (await response.text()).splitlines()
        comments = [line for line in lines if line.startswith(":")]
        assert comments and "cold@1" in comments[0]
        assert lines[-2] == "data: [DONE]"


async def test_a_model_that_cannot_be_loaded_is_an_honest_503(
    tmp_path: Path, etcd: str, namespace: str
) -> None:
    warm = simulated()
    broken = simulated("broken@1", profile="no-such-profile")
    async with running(tmp_path, etcd, namespace, warm, broken) as mesh:
        mesh.add_replica("r1", warm)
        await mesh.placeable("r1")
        async with connect(mesh.grpc) as channel:
            stub = rpc.InferenceServiceStub(channel)
            answers = await asyncio.gather(*(ask(stub, "broken", 20) for _ in range(20)))
            assert set(answers) == {"NO_REPLICA"}
            assert await ask(stub, "sim")


async def test_a_router_that_has_just_started_never_calls_a_known_model_unknown(
    tmp_path: Path, etcd: str, namespace: str
) -> None:
    spec = simulated()
    async with running(tmp_path, etcd, namespace, spec) as mesh:
        mesh.add_replica("r1", spec)
        await mesh.placeable("r1")
        statuses: list[int] = []
        port = int(mesh.http.rpartition(":")[2])
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 1}
        async with aiohttp.ClientSession() as session:

            async def answered() -> bool:
                try:
                    async with session.post(url, json=body) as response:
                        statuses.append(response.status)
                        return response.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            for _ in range(3):
                mesh.router.terminate()
                await asyncio.to_thread(mesh.router.wait)
                mesh.router = mesh.spawn("router", FOREBAY_ROUTER_HTTP_LISTEN=f"127.0.0.1:{port}")
                for _ in range(3):
                    await until(answered, 20)
    assert set(statuses) <= {200, 503}
