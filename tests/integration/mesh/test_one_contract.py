"""One contract at every hop: the same client and request, the same text."""

import asyncio

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata as md
from forebay_common.channel import connect
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.mesh import Mesh

pytestmark = pytest.mark.integration
_INFERENCE = "forebay.inference.v1.InferenceService"


async def _hops(mesh: Mesh) -> dict[str, str]:
    record = await mesh.replica_record("r1")
    assert record is not None
    status = await mesh.engine_status("r1")
    return {
        "router": mesh.grpc,
        "batcher": record.address,
        "runner": f"unix:{status.socket_path}",
    }


async def _generate(address: str, request: pb.GenerateRequest) -> tuple[str, pb.GenerateResponse]:
    async with connect(address) as channel:
        parts = [part async for part in rpc.InferenceServiceStub(channel).Generate(request)]
    return "".join(part.text_delta for part in parts), parts[-1]


async def test_every_hop_gives_the_same_text(mesh: Mesh) -> None:
    request = pb.GenerateRequest(
        model="sim@1", text="What is a forebay?", sampling=pb.SamplingOptions(max_tokens=12)
    )
    answers = {
        hop: await _generate(address, request) for hop, address in (await _hops(mesh)).items()
    }
    texts = {text for text, _ in answers.values()}
    assert len(texts) == 1 and texts.pop()
    assert {last.usage.completion_tokens for _, last in answers.values()} == {12}


async def test_an_answer_says_which_replica_gave_it(mesh: Mesh) -> None:
    async with connect(mesh.grpc) as channel:
        call = rpc.InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(model="sim", text="Who?", sampling=pb.SamplingOptions(max_tokens=2))
        )
        async for _ in call:
            pass
        trailing = md.texts(await call.trailing_metadata())
    assert trailing[md.REPLICA] in mesh.replicas
    assert md.Usage.decode(trailing[md.USAGE]) is not None


async def test_every_server_lists_its_services_and_its_health(mesh: Mesh) -> None:
    hops = {**await _hops(mesh), "engine host": f"unix:{mesh.directory}/r1.sock"}
    expected = {
        "router": {_INFERENCE, "forebay.router.v1.RouterService"},
        "batcher": {_INFERENCE, "forebay.batcher.v1.BatcherService"},
        "runner": {_INFERENCE},
        "engine host": {"forebay.engine.v1.EngineService"},
    }
    for hop, address in hops.items():
        async with connect(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            answer = await stub.ServerReflectionInfo(asked).read()
            names = {service.name for service in answer.list_services_response.service}
            assert expected[hop] | {"grpc.health.v1.Health"} <= names, hop
            health = health_pb2_grpc.HealthStub(channel)
            for name in expected[hop]:
                state = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert state.status == health_pb2.HealthCheckResponse.SERVING, (hop, name)


async def test_reflection_gives_the_whole_contract(mesh: Mesh) -> None:
    async with connect(mesh.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=_INFERENCE)])
        answer = await asyncio.wait_for(stub.ServerReflectionInfo(asked).read(), 5)
        assert b"CallOpenAI" in b"".join(answer.file_descriptor_response.file_descriptor_proto)
