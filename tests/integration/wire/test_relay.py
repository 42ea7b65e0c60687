"""The relay between real gRPC clients and servers: who is asked, who is told, how often."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_wire.policy import Head, Method, Outcome, Progress, Route
from forebay_wire.relay import Relay

from tests.wire_tools import Hops, RecordingPolicy, Script, read_text, until, within

pytestmark = pytest.mark.integration
_DIES = Script(0, reason="REPLICA_LOST", message="The runner died.")
_DIES_LATE = Script(1, reason="REPLICA_LOST", message="The runner died.")
_ENDLESS = Script(1, hangs=True)
_SILENT = Script(0, hangs=True)


async def test_a_stream_passes_whole_with_its_usage(hops: Hops) -> None:
    policy = RecordingPolicy([(await hops.engine()).address])
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script().request(), metadata=((md.REQUEST_ID, "r1"),))
    assert await read_text(call) == "abcde"
    trailing = md.texts(await call.trailing_metadata())
    assert trailing[md.USAGE] == "1,5,0"
    assert trailing[md.REQUEST_ID] == "r1"
    assert "other" not in trailing
    [(outcome, reason, progress)] = policy.ends
    assert (outcome, reason) == (Outcome.SUCCEEDED, None)
    assert progress.usage == md.Usage(1, 5, 0)
    assert progress.messages == 5


async def test_a_unary_call_passes(hops: Hops) -> None:
    policy = RecordingPolicy([(await hops.engine()).address])
    stub = hops.stub(await hops.relay(policy))
    answer = await stub.Embed(pb.EmbedRequest(model="m"))
    assert answer.usage.prompt_tokens == 3
    assert policy.ends[0][2].usage == md.Usage(3, 0, 0)


async def test_an_answer_of_no_messages_is_an_answer(hops: Hops) -> None:
    policy = RecordingPolicy([(await hops.engine()).address])
    stub = hops.stub(await hops.relay(policy))
    assert await read_text(stub.Generate(Script(0).request())) == ""
    assert policy.ends[0][0] is Outcome.SUCCEEDED


async def test_a_refusal_is_one_status_and_no_end(hops: Hops) -> None:
    policy = RecordingPolicy([], refuse=ForebayError(Reason.QUEUE_FULL, "Full.", retry_after_s=2))
    stub = hops.stub(await hops.relay(policy))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest()).read()
    assert from_rpc_error(caught.value).retry_after_s == 2
    assert policy.ends == []


async def test_a_refusal_after_a_wait_is_one_status_and_no_end(hops: Hops) -> None:
    async def refuse(head: Head) -> None:
        await asyncio.sleep(0)
        raise ForebayError(Reason.QUEUE_FULL, "Full.", retry_after_s=2)

    policy = RecordingPolicy([], admission=refuse)
    stub = hops.stub(await hops.relay(policy))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest()).read()
    assert from_rpc_error(caught.value).retry_after_s == 2
    assert policy.ends == []


class _Faulty(RecordingPolicy):
    """Breaks where a test says."""

    where = ""

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        if self.where == "admit":
            raise ZeroDivisionError
        return super().admit(head, message)

    async def on_failure(self, *arguments: Any) -> Any:
        if self.where == "on_failure":
            raise ZeroDivisionError
        return await super().on_failure(*arguments)

    def on_end(self, *arguments: Any) -> None:
        super().on_end(*arguments)
        if self.where == "on_end":
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("where", "script"), [("admit", Script()), ("on_failure", _DIES), ("on_end", _DIES)]
)
async def test_a_policy_that_breaks_fails_its_request_alone(
    hops: Hops, where: str, script: Script
) -> None:
    policy = _Faulty([(await hops.engine()).address])
    stub = hops.stub(await hops.relay(policy))
    endless = stub.Generate(_ENDLESS.request())
    assert (await endless.read()).text_delta == "a"
    policy.where = where
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Generate(script.request(), timeout=5).read()
    policy.where = ""
    assert await read_text(stub.Generate(Script().request())) == "abcde"
    assert not endless.done()
    endless.cancel()


async def test_a_death_before_the_first_message_is_retried_unseen(hops: Hops) -> None:
    dead, alive = await hops.engine(), await hops.engine()
    policy = RecordingPolicy([dead.address, alive.address])
    assert dead.server is not None
    await dead.server.stop()
    stub = hops.stub(await hops.relay(policy))
    assert await read_text(stub.Generate(Script().request())) == "abcde"
    assert [end[0] for end in policy.ends] == [Outcome.SUCCEEDED]
    assert policy.failures == [Reason.REPLICA_LOST]


async def test_a_status_before_the_first_message_is_retried_unseen(hops: Hops) -> None:
    first, second = await hops.engine(), await hops.engine()
    policy = RecordingPolicy([first.address, second.address])
    stub = hops.stub(await hops.relay(policy))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(_DIES.request()).read()
    assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
    assert (first.seen.calls, second.seen.calls) == (1, 1)
    assert policy.failures == [Reason.REPLICA_LOST] * 2
    assert [end[:2] for end in policy.ends] == [(Outcome.FAILED, Reason.REPLICA_LOST)]


async def test_a_closed_port_is_a_lost_replica(hops: Hops) -> None:
    alive = await hops.engine()
    policy = RecordingPolicy(["127.0.0.1:1", alive.address])
    stub = hops.stub(await hops.relay(policy))
    assert await read_text(stub.Generate(Script().request())) == "abcde"
    assert policy.failures == [Reason.REPLICA_LOST]


async def test_a_peer_that_is_no_grpc_server_is_a_fault_of_that_replica(hops: Hops) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    alive = await hops.engine()
    policy = RecordingPolicy([address, alive.address])
    stub = hops.stub(await hops.relay(policy))
    assert await read_text(stub.Generate(Script().request())) == "abcde"
    assert policy.failures == [Reason.REPLICA_LOST]
    server.close()


async def test_a_death_after_the_first_message_is_one_error(hops: Hops) -> None:
    dying, alive = await hops.engine(), await hops.engine()
    policy = RecordingPolicy([dying.address, alive.address])
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(_DIES_LATE.request())
    assert (await call.read()).text_delta == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
    assert [end[:2] for end in policy.ends] == [(Outcome.FAILED, Reason.REPLICA_LOST)]
    assert alive.seen.calls == 0


@pytest.mark.parametrize("script", [_ENDLESS, _SILENT])
async def test_a_caller_who_leaves_stops_the_engine(hops: Hops, script: Script) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(script.request())
    await within(engine.seen.called.wait())
    if script is _ENDLESS:
        await call.read()
    call.cancel()
    await within(policy.ended.wait())
    await within(engine.seen.cancelled.wait())
    assert [end[0] for end in policy.ends] == [Outcome.CANCELLED]


async def test_a_caller_who_leaves_while_it_waits_is_forgotten(hops: Hops) -> None:
    policy = RecordingPolicy(["127.0.0.1:1"], admission=lambda head: asyncio.Event().wait())
    server = await hops.relay(policy)
    call = hops.stub(server).Generate(Script().request())
    await within(policy.waited.wait())
    call.cancel()
    await until(lambda: policy.waiting == 0)
    await until(lambda: server.in_flight == 0)
    assert policy.ends == []


async def test_a_deadline_ends_the_request_and_the_engine(hops: Hops) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(_ENDLESS.request(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await within(engine.seen.cancelled.wait())
    await within(policy.ended.wait())
    assert len(policy.ends) == 1


async def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest(hops: Hops) -> None:
    policy = RecordingPolicy([(await hops.engine()).address])
    server = await hops.relay(policy)
    stub = hops.stub(server)
    call = stub.Generate(Script(10, gap_s=0.05).request())
    assert (await call.read()).text_delta == "a"
    draining = asyncio.create_task(server.drain(5))
    await asyncio.sleep(0)
    # Over another connection: a call that the library was about to send when the GOAWAY came would
    # end in the library.
    late = hops.stub(server)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await late.Generate(Script().request()).read()
    assert from_rpc_error(caught.value).reason is Reason.DRAINING
    rest = [(await call.read()).text_delta for _ in range(9)]
    assert "".join(rest) == Script(10).text[1:]
    assert await call.read() is grpc.aio.EOF
    await within(draining)
    assert policy.ends[0][0] is Outcome.SUCCEEDED


async def test_a_python_caller_gets_messages_and_leaves_by_closing(hops: Hops) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    relay = Relay(policy, hops.pool())
    head = Head(Method.GENERATE, {}, None, "r1")
    progress = Progress()
    message = Script().request().SerializeToString()
    parts = [part async for part in relay.stream(head, message, progress)]
    texts = [pb.GenerateResponse.FromString(part).text_delta for part in parts]
    assert texts == ["a", "b", "c", "d", "e"]
    assert progress.usage == md.Usage(1, 5, 0)
    answers = relay.stream(head, _ENDLESS.request().SerializeToString())
    await anext(answers)
    await answers.aclose()
    await within(engine.seen.cancelled.wait())
    assert [end[0] for end in policy.ends] == [Outcome.SUCCEEDED, Outcome.CANCELLED]
    embed = Head(Method.EMBED, {}, None, "r2")
    answer = await relay.unary(embed, pb.EmbedRequest(model="m").SerializeToString())
    assert pb.EmbedResponse.FromString(answer).usage.prompt_tokens == 3
