"""TLS and mutual TLS: who is let in, and that HTTP/2 is agreed on by ALPN."""

import asyncio
import dataclasses
import socket
import ssl

import grpc
import pytest
from forebay_common.errors import Reason
from forebay_wire.core.limits import Limits
from forebay_wire.policy import Head, Method
from forebay_wire.relay import Relay
from forebay_wire.tls import client_context

from tests.wire_tools import BOUND_S, Certificates, Hops, RecordingPolicy, Script, read_text, until

pytestmark = pytest.mark.integration


async def test_http2_is_agreed_on_by_alpn(hops: Hops, certificates: Certificates) -> None:
    engine = await hops.engine(certificates=certificates)
    host, _, port = engine.address.rpartition(":")

    def agreed(protocols: list[str]) -> str | None:
        context = client_context(ca=str(certificates.ca))
        context.set_alpn_protocols(protocols)
        with (
            socket.create_connection((host, int(port)), BOUND_S) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as secured,
        ):
            return secured.selected_alpn_protocol()

    assert await asyncio.to_thread(agreed, ["http/1.1", "h2"]) == "h2"


async def test_mutual_tls_lets_in_only_whom_the_authority_has_signed(
    hops: Hops, certificates: Certificates
) -> None:
    engine = await hops.engine(certificates=certificates, mutual=True)
    stub = hops.stub(engine.address, certificates=certificates, mutual=True)
    assert await read_text(stub.Generate(Script().request())) == "abcde"
    stranger = dataclasses.replace(
        certificates, client=certificates.stranger, client_key=certificates.stranger_key
    )
    for who, mutual in ((certificates, False), (stranger, True)):
        refused = hops.stub(engine.address, certificates=who, mutual=mutual)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_text(refused.Generate(Script().request(), timeout=BOUND_S))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert engine.seen.calls == 1
    assert await read_text(stub.Generate(Script().request())) == "abcde"


@pytest.mark.parametrize("behind", ["ours", "aio"])
async def test_our_pool_without_a_certificate_is_refused_as_a_lost_replica(
    hops: Hops, certificates: Certificates, behind: str
) -> None:
    engine = await hops.engine(behind, certificates=certificates, mutual=True)
    limits = Limits(connect_timeout_s=1.0)
    for mutual in (True, False):
        policy = RecordingPolicy([engine.address])
        pool = hops.pool(limits, certificates=certificates, mutual=mutual)
        stub = hops.stub(await hops.relay(policy, pool=pool))
        if mutual:
            assert await read_text(stub.Generate(Script().request())) == "abcde"
            continue
        with pytest.raises(grpc.aio.AioRpcError):
            await read_text(stub.Generate(Script().request(), timeout=BOUND_S))
        assert policy.failures == [Reason.REPLICA_LOST]
    assert engine.seen.calls == 1


async def test_our_pool_refuses_a_server_that_it_does_not_trust(
    hops: Hops, certificates: Certificates
) -> None:
    engine = await hops.engine(certificates=certificates)
    policy = RecordingPolicy([engine.address])
    strangers = dataclasses.replace(certificates, ca=certificates.stranger)
    stub = hops.stub(await hops.relay(policy, pool=hops.pool(certificates=strangers)))
    with pytest.raises(grpc.aio.AioRpcError):
        await read_text(stub.Generate(Script().request(), timeout=BOUND_S))
    assert policy.failures == [Reason.REPLICA_LOST]


async def test_plain_text_on_a_tls_port_disturbs_nobody(
    hops: Hops, certificates: Certificates
) -> None:
    engine = await hops.engine(certificates=certificates)
    assert engine.server is not None
    stub = hops.stub(engine.address, certificates=certificates)
    answers = stub.Generate(Script(50, gap_s=0.002).request())
    plain = hops.stub(engine.address)
    with pytest.raises(grpc.aio.AioRpcError):
        await read_text(plain.Generate(Script().request(), timeout=BOUND_S))
    policy = RecordingPolicy([engine.address])
    relayed = hops.stub(await hops.relay(policy))
    with pytest.raises(grpc.aio.AioRpcError):
        await read_text(relayed.Generate(Script().request(), timeout=BOUND_S))
    assert policy.failures == [Reason.REPLICA_LOST]
    assert await read_text(answers) == Script(50).text


async def test_a_handshake_that_never_ends_holds_nothing_for_long(
    hops: Hops, certificates: Certificates
) -> None:
    engine = await hops.engine(
        certificates=certificates, limits=Limits(connect_timeout_s=0.5, settings_timeout_s=0.5)
    )
    assert engine.server is not None
    host, _, port = engine.address.rpartition(":")
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.set_alpn_protocols(["h2"])
    # Speaks TLS, but never HTTP/2.
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname="localhost"
    )
    server = engine.server
    await until(lambda: server.connections == 1)
    await until(lambda: server.connections == 0, 4.0)
    writer.transport.abort()
    del reader


async def test_our_pool_gives_up_on_a_server_that_never_speaks(
    hops: Hops, certificates: Certificates
) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    target = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    limits = Limits(connect_timeout_s=0.5)
    for secured in (None, certificates):
        policy = RecordingPolicy([target])
        relay = Relay(policy, hops.pool(limits, certificates=secured))
        head = Head(Method.GENERATE, {}, None, "r1")
        with pytest.raises(Exception, match="cannot be reached"):
            await relay.unary(head, Script().request().SerializeToString())
    silent.close()
