"""Both clients against a real server."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay.registry.v1 import registry_service_pb2 as registry_pb
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Message,
    ModelNotFound,
    Overloaded,
    ServerFault,
    Unreachable,
)
from forebay_common.errors import ForebayError, Reason
from forebay_common.server import Server

pytestmark = pytest.mark.integration
_BOUND_S = 5.0


class _Hop(rpc.InferenceServiceServicer, router_rpc.RouterServiceServicer):
    """Answers words of the prompt; the model's name chooses what goes wrong."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.remaining_s: float | None = None
        self.waiting = threading.Event()
        self.stopped = threading.Event()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining()
        if request.model == "missing":
            raise ForebayError(Reason.MODEL_NOT_FOUND, "No model `missing`.", param="model")
        if request.model == "busy":
            raise ForebayError(Reason.QUEUE_FULL, "The queue is full.", retry_after_s=1.5)
        header = pb.AnswerHeader(
            request_id=self.metadata["x-request-id"],
            model_version=f"{request.model}@1",
            system_fingerprint="test",
        )
        yield pb.GenerateResponse(header=header, text_delta="", token_ids=[0])
        if request.model == "endless":
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped.set()
        if request.model == "broken":
            return
        text = request.text or request.messages.messages[-1].content
        words = text.split()
        for index, word in enumerate(words):
            yield pb.GenerateResponse(text_delta=word, token_ids=[index])
        yield pb.GenerateResponse(
            finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(completion_tokens=len(words) + 1)
        )
        context.set_trailing_metadata((("forebay-replica", "r-1"),))

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> Any:  # noqa: N802
        context.set_trailing_metadata((("forebay-replica", "r-1"),))
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=[index, 0.5]) for index in range(len(request.inputs))],
            usage=pb.Usage(prompt_tokens=len(request.inputs)),
        )

    async def ListRoutes(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = registry_pb.Model(name="m", versions=[registry_pb.ModelVersion(version="1")])
        return router_pb.ListRoutesResponse(catalogue=registry_pb.Catalogue(models=[model]))


class _Running:
    """The hop on a thread with its own event loop, so that blocking clients can call it."""

    def __init__(self) -> None:
        self.hop = _Hop()  # type: ignore[abstract]  # the rest stays unimplemented
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(_BOUND_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = Server()
        rpc.add_InferenceServiceServicer_to_server(self.hop, server.grpc)
        router_rpc.add_RouterServiceServicer_to_server(self.hop, server.grpc)
        self.address = await server.listen("127.0.0.1:0")
        self._ready.set()
        await self._stopping.wait()
        await server.grpc.stop(None)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_BOUND_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[_Running]:
    running = _Running()
    yield running
    running.stop()


@pytest.fixture
async def client(running: _Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.address, timeout_s=_BOUND_S) as client:
        yield client


@pytest.fixture
def blocking(running: _Running) -> Iterator[Client]:
    with Client(running.address, timeout_s=_BOUND_S) as client:
        yield client


async def test_deltas_then_the_answer(client: AsyncClient) -> None:
    async with client.stream("m", "one two", request_id="r-9") as stream:
        with pytest.raises(RuntimeError):
            _ = stream.answer
        texts = [delta.text async for delta in stream]
    assert texts == ["", "one", "two"]
    assert stream.answer.text == "onetwo"
    assert stream.answer.model_version == "m@1"
    assert stream.answer.replica == "r-1"
    assert stream.answer.request_id == "r-9"
    assert stream.answer.usage.completion_tokens == 3


def test_blocking_deltas_then_the_answer(blocking: Client) -> None:
    with blocking.stream("m", "one two") as stream:
        assert [delta.text for delta in stream] == ["", "one", "two"]
    assert list(stream) == []
    assert stream.answer.text == "onetwo"
    assert stream.answer.replica == "r-1"
    assert stream.answer.request_id == stream.request_id


async def test_chat_sends_a_conversation(client: AsyncClient, running: _Running) -> None:
    turns = [Message("system", "be brief"), Message("user", "hello there")]
    answer = await client.chat("m", turns, session="s-1", priority_class="BATCH", timeout_s=3)
    assert answer.text == "hellothere"
    assert running.hop.metadata["forebay-session"] == "s-1"
    assert running.hop.metadata["forebay-class"] == "BATCH"
    assert running.hop.remaining_s is not None
    # gRPC rounds a timeout up by some per cent on its way.
    assert 0 < running.hop.remaining_s <= 3 * 1.05


async def test_vectors_keep_the_order_of_inputs(client: AsyncClient, blocking: Client) -> None:
    expected = ((0.0, 0.5), (1.0, 0.5))
    assert (await client.embed("m", ["a", [1, 2]])).vectors == expected
    answer = await asyncio.to_thread(blocking.embed, "m", ["a", "b"])
    assert answer.vectors == expected
    assert answer.replica == "r-1"


async def test_models_are_the_routers(client: AsyncClient, blocking: Client) -> None:
    assert [model.name for model in await client.models()] == ["m"]
    assert [model.name for model in await asyncio.to_thread(blocking.models)] == ["m"]


async def test_errors_are_typed(client: AsyncClient) -> None:
    with pytest.raises(ModelNotFound, match="missing") as missing:
        await client.generate("missing", "x")
    assert missing.value.param == "model"
    with pytest.raises(Overloaded) as busy:
        await client.generate("busy", "x")
    assert busy.value.retry_after_s == 1.5
    with pytest.raises(ServerFault):
        await client.generate("broken", "x")
    with pytest.raises(InvalidRequest):
        await client.generate("", "x")


def test_blocking_errors_are_typed(blocking: Client) -> None:
    with pytest.raises(ModelNotFound):
        blocking.generate("missing", "x")
    with pytest.raises(Overloaded) as busy:
        blocking.generate("busy", "x")
    assert busy.value.retry_after_s == 1.5
    with pytest.raises(ServerFault):
        blocking.chat("broken", "x")


async def test_a_deadline_ends_the_call_on_both_sides(
    client: AsyncClient, running: _Running
) -> None:
    running.hop.stopped.clear()
    with pytest.raises(DeadlineExceeded):
        await client.generate("endless", "x", timeout_s=0.3)
    assert await asyncio.to_thread(running.hop.stopped.wait, _BOUND_S)


async def test_a_cancelled_task_stops_the_server(client: AsyncClient, running: _Running) -> None:
    running.hop.waiting.clear()
    running.hop.stopped.clear()
    task = asyncio.create_task(client.generate("endless", "x"))
    assert await asyncio.to_thread(running.hop.waiting.wait, _BOUND_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(running.hop.stopped.wait, _BOUND_S)


async def test_leaving_the_stream_stops_the_server(client: AsyncClient, running: _Running) -> None:
    running.hop.stopped.clear()
    async with client.stream("endless", "x") as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(running.hop.stopped.wait, _BOUND_S)
    with pytest.raises(Cancelled):
        await anext(stream)


def test_another_thread_can_cancel(blocking: Client, running: _Running) -> None:
    running.hop.waiting.clear()
    running.hop.stopped.clear()
    stream = blocking.stream("endless", "x")
    next(stream)
    assert running.hop.waiting.wait(_BOUND_S)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    with pytest.raises(Cancelled):
        next(stream)
    canceller.join(_BOUND_S)
    assert running.hop.stopped.wait(_BOUND_S)


async def test_nobody_there_is_told_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(Unreachable, match="Nobody answers"):
                await client.generate("m", "x")

        def call() -> None:
            with Client(address) as client:
                client.generate("m", "x")

        with pytest.raises(Unreachable):
            await asyncio.to_thread(call)
