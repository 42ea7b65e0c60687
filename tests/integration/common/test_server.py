"""Health, reflection and errors of a real server."""

import asyncio
from typing import Any

import grpc
import pytest
from forebay.registry.v1 import registry_service_pb2 as pb
from forebay.registry.v1 import registry_service_pb2_grpc as rpc
from forebay_common.channel import connect
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

pytestmark = pytest.mark.integration
_NAME = "forebay.registry.v1.RegistryService"


class _Registry(rpc.RegistryServiceServicer):
    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> Any:  # noqa: N802
        raise ForebayError(Reason.MODEL_NOT_FOUND, "No such model.", param="name")

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> Any:  # noqa: N802
        raise RuntimeError("a secret path /etc/secret")

    async def WatchCatalogue(  # noqa: N802
        self, request: pb.WatchCatalogueRequest, context: Any
    ) -> Any:
        yield pb.WatchCatalogueResponse()
        raise RuntimeError("a secret path /etc/secret")


@pytest.fixture
async def server() -> Any:
    server = Server()
    rpc.add_RegistryServiceServicer_to_server(_Registry(), server.grpc)
    server.offer(_NAME)
    yield server
    await server.grpc.stop(None)


async def test_errors_become_statuses_and_secrets_stay(server: Server) -> None:
    async with connect(await server.listen("127.0.0.1:0")) as channel:
        stub = rpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert from_rpc_error(caught.value).param == "name"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest())
        assert from_rpc_error(caught.value).reason is Reason.INTERNAL
        assert "secret" not in str(caught.value.details())
        watch = stub.WatchCatalogue(pb.WatchCatalogueRequest())
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert "secret" not in str(caught.value.details())


async def test_health_is_honest_per_service(server: Server) -> None:
    async with connect(await server.listen("127.0.0.1:0")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        states = []
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=_NAME))
        for ready in (True, False):
            states.append((await watch.read()).status)
            server.set_ready(_NAME, ready)
        states.append((await watch.read()).status)
        kind = health_pb2.HealthCheckResponse
        assert states == [kind.NOT_SERVING, kind.SERVING, kind.NOT_SERVING]
        watch.cancel()


async def test_reflection_lists_what_is_offered(server: Server) -> None:
    async with connect(await server.listen("127.0.0.1:0")) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = stub.ServerReflectionInfo(asked)
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {_NAME, "grpc.health.v1.Health"} <= names


async def test_a_bound_port_is_an_os_error(server: Server) -> None:
    address = await server.listen("127.0.0.1:0")
    other = Server()
    with pytest.raises(OSError, match="cannot listen"):
        await other.listen(address)


async def test_a_unix_socket_serves(server: Server, tmp_path: Any) -> None:
    address = await server.listen(f"unix:{tmp_path}/s")
    async with connect(address) as channel:
        stub = rpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.GetModelRequest())
        assert from_rpc_error(caught.value).reason is Reason.MODEL_NOT_FOUND


async def test_keepalive_pings_of_a_silent_call_are_not_punished() -> None:
    """gRPC closes a connection that pings too often: three strikes in a row, `too_many_pings`."""
    server = Server(ping_interval_s_min=0.25)
    silent = _Silent()
    rpc.add_RegistryServiceServicer_to_server(silent, server.grpc)
    server.offer(_NAME)
    address = await server.listen("127.0.0.1:0")
    async with connect(address, keepalive_s=0.5) as channel:
        call = rpc.RegistryServiceStub(channel).GetModel(pb.GetModelRequest())
        done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=4)
        assert not done
        silent.release.set()
        assert (await call).model.name == "m"
    await server.grpc.stop(None)


async def test_a_peer_slow_to_greet_is_waited_for(server: Server) -> None:
    host, _, port = (await server.listen("127.0.0.1:0")).rpartition(":")

    async def delay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # the slowness that is tested
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    proxy = await asyncio.start_server(delay, "127.0.0.1", 0)
    address = "{}:{}".format(*proxy.sockets[0].getsockname()[:2])
    async with connect(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.RegistryServiceStub(channel).GetModel(pb.GetModelRequest())
        assert from_rpc_error(caught.value).reason is Reason.MODEL_NOT_FOUND
    proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def test_a_caller_who_leaves_in_the_middle_is_no_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    endless = _Endless()
    other = Server()
    rpc.add_RegistryServiceServicer_to_server(endless, other.grpc)
    other.offer(_NAME)
    address = await other.listen("127.0.0.1:0")
    for _ in range(20):
        async with connect(address) as channel:
            call = rpc.RegistryServiceStub(channel).WatchCatalogue(pb.WatchCatalogueRequest())
            await call.read()
            call.cancel()
    await asyncio.wait_for(endless.left.wait(), 5)
    await other.grpc.stop(None)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("error", [ForebayError(Reason.CONFLICT, "Too late."), ValueError("late")])
async def test_a_refusal_for_a_caller_who_has_left_is_no_error(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Unary and streamed: the status has nobody to go to, whatever it says."""
    late = _Late(error)
    server = Server()
    rpc.add_RegistryServiceServicer_to_server(late, server.grpc)
    server.offer(_NAME)
    address = await server.listen("127.0.0.1:0")
    async with connect(address) as channel:
        stub = rpc.RegistryServiceStub(channel)
        calls = [
            stub.GetModel(pb.GetModelRequest()),
            stub.WatchCatalogue(pb.WatchCatalogueRequest()),
        ]
        codes = [asyncio.ensure_future(call.code()) for call in calls]
        await asyncio.wait_for(late.both_wait.wait(), 5)
        for call in calls:
            call.cancel()
        await asyncio.wait_for(late.both_left.wait(), 5)
        assert await asyncio.gather(*codes) == [grpc.StatusCode.CANCELLED] * 2
        # The server has ended both calls when it answers the next one of the connection.
        with pytest.raises(grpc.aio.AioRpcError):
            await _raw(channel, "/no.Such/Method")
    await server.grpc.stop(None)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    # A mistake of the server's own is told, once per call; that nobody hears of it is not.
    mistakes = 0 if isinstance(error, ForebayError) else 2
    assert [r.getMessage().split(" in ")[0] for r in errors] == ["unexpected error"] * mistakes


async def test_what_is_not_in_the_contract_is_refused_with_a_reason(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(await server.listen("127.0.0.1:0")) as channel:
        for path, reason in (
            (f"/{_NAME}/GetModel", Reason.INVALID_ARGUMENT),
            (f"/{_NAME}/NoSuchMethod", Reason.METHOD_NOT_ALLOWED),
            ("/no.Such/Service", Reason.METHOD_NOT_ALLOWED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _raw(channel, path)
            assert from_rpc_error(caught.value).reason is reason
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _raw(channel, f"/{_NAME}/WatchCatalogue", streams=True)
        assert from_rpc_error(caught.value).reason is Reason.INVALID_ARGUMENT
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def _raw(channel: Any, path: str, *, streams: bool = False) -> Any:
    """Call with bytes that are no message."""
    if streams:
        return await channel.unary_stream(path)(b"\xff\xfe").read()
    return await channel.unary_unary(path)(b"\xff\xfe")


class _Late(rpc.RegistryServiceServicer):
    """Answers a cancelled call with an error nobody can get."""

    def __init__(self, error: Exception) -> None:
        self.both_wait = asyncio.Event()
        self.both_left = asyncio.Event()
        self._error = error
        self._waiting = 0
        self._left = 0

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> Any:  # noqa: N802
        await self._wait()

    async def WatchCatalogue(  # noqa: N802
        self, request: pb.WatchCatalogueRequest, context: Any
    ) -> Any:
        await self._wait()
        yield pb.WatchCatalogueResponse()

    async def _wait(self) -> None:
        self._waiting += 1
        if self._waiting == 2:
            self.both_wait.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._left += 1
            if self._left == 2:
                self.both_left.set()
            raise self._error from None


class _Endless(rpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.left = asyncio.Event()
        self._callers = 0

    async def WatchCatalogue(  # noqa: N802
        self, request: pb.WatchCatalogueRequest, context: Any
    ) -> Any:
        self._callers += 1
        try:
            while True:
                yield pb.WatchCatalogueResponse()
        finally:
            self._callers -= 1
            if self._callers == 0:
                self.left.set()


class _Silent(rpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> Any:  # noqa: N802
        await self.release.wait()
        return pb.GetModelResponse(model=pb.Model(name="m"))
