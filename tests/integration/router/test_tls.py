"""A router whose ports speak TLS, with and without client certificates."""

from __future__ import annotations

import ssl

import aiohttp
import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_rpc

from tests.wire_tools import Certificates, make_certificates

from .conftest import WAIT_S, StartRouter, StartStandIn

pytestmark = pytest.mark.integration
REQUEST = inference.GenerateRequest(model="chat", text="hello")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def _parts(address: str, credentials: grpc.ChannelCredentials) -> int:
    port = address.rpartition(":")[2]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        stub = inference_rpc.InferenceServiceStub(channel)
        return len([part async for part in stub.Generate(REQUEST, timeout=WAIT_S)])


async def test_both_ports_speak_tls(
    start_router: StartRouter,
    start_stand_in: StartStandIn,
    certificates: Certificates,
    catalogue: None,
) -> None:
    await start_stand_in()
    router = await start_router(
        tls_certificate_file=str(certificates.server), tls_key_file=str(certificates.server_key)
    )
    credentials = certificates.grpc_calling(mutual=False)
    assert await _parts(router.instance.addresses["grpc"], credentials)
    port = router.instance.addresses["http"].rpartition(":")[2]
    context = ssl.create_default_context(cafile=str(certificates.ca))
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"https://localhost:{port}/health/live", ssl=context) as answer,
    ):
        assert answer.status == 200
    with pytest.raises(grpc.aio.AioRpcError):
        await router.inference.Generate(REQUEST, timeout=WAIT_S).read()


async def test_callers_must_show_a_certificate_where_that_is_asked_for(
    start_router: StartRouter,
    start_stand_in: StartStandIn,
    certificates: Certificates,
    catalogue: None,
) -> None:
    await start_stand_in()
    router = await start_router(
        tls_certificate_file=str(certificates.server),
        tls_key_file=str(certificates.server_key),
        tls_client_ca_file=str(certificates.ca),
    )
    address = router.instance.addresses["grpc"]
    assert await _parts(address, certificates.grpc_calling(mutual=True))
    with pytest.raises(grpc.aio.AioRpcError):
        await _parts(address, certificates.grpc_calling(mutual=False))
