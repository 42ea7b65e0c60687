"""The relay between a real gRPC client and real gRPC servers."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata as md
from forebay_common.channel import ChannelPool, connect
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.server import Server
from forebay_wire.policy import SERVICE, Fail, Head, Outcome, Progress, Retry, Route
from forebay_wire.relay import Relay, serve_relay

pytestmark = pytest.mark.integration
_WAIT_S = 5.0

Answer = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]


class _Engine(rpc.InferenceServiceServicer):
    """Answers as a test says, and remembers who left."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.called.set()
        try:
            async for part in self.answer(request, context):
                yield part
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        context.set_trailing_metadata(((md.USAGE, "3,0,0"),))
        return pb.EmbedResponse(usage=pb.Usage(prompt_tokens=3))


@dataclasses.dataclass
class _Policy:
    """Sends each attempt to the next target and records how requests end."""

    targets: list[str]
    refuse: ForebayError | None = None
    ends: list[tuple[Outcome, Reason | None, Progress]] = dataclasses.field(default_factory=list)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def admit(self, head: Head, message: bytes) -> Route:
        if self.refuse is not None:
            raise self.refuse
        return self._route(head)

    def _route(self, head: Head) -> Route:
        return Route(self.targets.pop(0), ((md.REQUEST_ID, head.request_id),), head.deadline)

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Retry | Fail:
        if error.status.replica_fault and self.targets:
            return Retry(self._route(head))
        return Fail(error)

    def on_end(
        self,
        head: Head,
        route: Route,
        outcome: Outcome,
        error: ForebayError | None,
        progress: Progress,
    ) -> None:
        self.ends.append((outcome, error.reason if error else None, progress))
        self.ended.set()


@pytest.fixture
async def closing() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def _engine(closing: contextlib.AsyncExitStack, answer: Answer) -> tuple[_Engine, str]:
    server = Server()
    engine = _Engine(answer)
    rpc.add_InferenceServiceServicer_to_server(engine, server.grpc)
    server.offer(SERVICE)
    address = await server.listen("127.0.0.1:0")
    closing.push_async_callback(server.grpc.stop, None)
    return engine, address


async def _relay(
    closing: contextlib.AsyncExitStack, policy: _Policy
) -> tuple[rpc.InferenceServiceStub, Server]:
    pool = ChannelPool()
    server = Server()
    serve_relay(server, Relay(policy, pool))
    address = await server.listen("127.0.0.1:0")
    channel = connect(address)
    closing.push_async_callback(pool.close)
    closing.push_async_callback(server.grpc.stop, None)
    closing.push_async_callback(channel.close)
    return rpc.InferenceServiceStub(channel), server


async def _counts(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    for number in range(5):
        yield pb.GenerateResponse(text_delta=str(number))
    context.set_trailing_metadata(((md.USAGE, "1,5,0"), ("other", "x")))


async def _dies(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    raise ForebayError(Reason.REPLICA_LOST, "The runner died.")
    yield pb.GenerateResponse()


async def _dies_late(
    request: pb.GenerateRequest, context: Any
) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text_delta="a")
    raise ForebayError(Reason.REPLICA_LOST, "The runner died.")


async def _endless(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text_delta="a")
    await asyncio.Event().wait()


async def _silent(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    await asyncio.Event().wait()
    yield pb.GenerateResponse()


async def _within(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, _WAIT_S)


async def test_a_stream_passes_whole_with_its_usage(closing: contextlib.AsyncExitStack) -> None:
    _, address = await _engine(closing, _counts)
    policy = _Policy([address])
    stub, _ = await _relay(closing, policy)
    call = stub.Generate(pb.GenerateRequest(model="m"), metadata=((md.REQUEST_ID, "r1"),))
    assert "".join([part.text_delta async for part in call]) == "01234"
    trailing = md.texts(await call.trailing_metadata())
    assert trailing[md.USAGE] == "1,5,0"
    assert trailing[md.REQUEST_ID] == "r1"
    assert "other" not in trailing
    [(outcome, reason, progress)] = policy.ends
    assert (outcome, reason) == (Outcome.SUCCEEDED, None)
    assert progress.usage == md.Usage(1, 5, 0)
    assert progress.messages == 5


async def test_a_unary_call_passes(closing: contextlib.AsyncExitStack) -> None:
    _, address = await _engine(closing, _counts)
    policy = _Policy([address])
    stub, _ = await _relay(closing, policy)
    answer = await stub.Embed(pb.EmbedRequest(model="m"))
    assert answer.usage.prompt_tokens == 3
    assert policy.ends[0][2].usage == md.Usage(3, 0, 0)


async def test_a_refusal_is_one_status_and_no_end(closing: contextlib.AsyncExitStack) -> None:
    policy = _Policy([], refuse=ForebayError(Reason.QUEUE_FULL, "Full.", retry_after_s=2))
    stub, _ = await _relay(closing, policy)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest()).read()
    assert from_rpc_error(caught.value).retry_after_s == 2
    assert policy.ends == []


async def test_a_death_before_the_first_message_is_retried_unseen(
    closing: contextlib.AsyncExitStack,
) -> None:
    _, dead = await _engine(closing, _dies)
    _, alive = await _engine(closing, _counts)
    policy = _Policy([dead, alive])
    stub, _ = await _relay(closing, policy)
    parts = [part.text_delta async for part in stub.Generate(pb.GenerateRequest())]
    assert "".join(parts) == "01234"
    assert [end[0] for end in policy.ends] == [Outcome.SUCCEEDED]


async def test_a_closed_port_is_a_lost_replica(closing: contextlib.AsyncExitStack) -> None:
    _, alive = await _engine(closing, _counts)
    policy = _Policy(["127.0.0.1:1", alive])
    stub, _ = await _relay(closing, policy)
    assert len([part async for part in stub.Generate(pb.GenerateRequest())]) == 5


async def test_a_death_after_the_first_message_is_one_error(
    closing: contextlib.AsyncExitStack,
) -> None:
    _, dying = await _engine(closing, _dies_late)
    _, alive = await _engine(closing, _counts)
    policy = _Policy([dying, alive])
    stub, _ = await _relay(closing, policy)
    call = stub.Generate(pb.GenerateRequest())
    assert (await call.read()).text_delta == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).reason is Reason.REPLICA_LOST
    assert [end[:2] for end in policy.ends] == [(Outcome.FAILED, Reason.REPLICA_LOST)]


@pytest.mark.parametrize("answer", [_endless, _silent])
async def test_a_caller_who_leaves_stops_the_engine(
    closing: contextlib.AsyncExitStack, answer: Answer
) -> None:
    engine, address = await _engine(closing, answer)
    policy = _Policy([address])
    stub, _ = await _relay(closing, policy)
    call = stub.Generate(pb.GenerateRequest())
    await _within(engine.called.wait())
    if answer is _endless:
        await call.read()
    call.cancel()
    await _within(policy.ended.wait())
    await _within(engine.cancelled.wait())
    assert [end[0] for end in policy.ends] == [Outcome.CANCELLED]


async def test_a_deadline_ends_the_request_and_the_engine(
    closing: contextlib.AsyncExitStack,
) -> None:
    engine, address = await _engine(closing, _endless)
    policy = _Policy([address])
    stub, _ = await _relay(closing, policy)
    call = stub.Generate(pb.GenerateRequest(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await _within(engine.cancelled.wait())
    await _within(policy.ended.wait())
    assert len(policy.ends) == 1


async def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest(
    closing: contextlib.AsyncExitStack,
) -> None:
    release = asyncio.Event()

    async def held(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text_delta="a")
        await release.wait()
        yield pb.GenerateResponse(text_delta="b")

    _, address = await _engine(closing, held)
    policy = _Policy([address])
    stub, server = await _relay(closing, policy)
    call = stub.Generate(pb.GenerateRequest())
    assert (await call.read()).text_delta == "a"
    draining = asyncio.create_task(server.drain(_WAIT_S))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest()).read()
    assert from_rpc_error(caught.value).reason is Reason.DRAINING
    release.set()
    assert (await call.read()).text_delta == "b"
    assert await call.read() is grpc.aio.EOF
    await _within(draining)
