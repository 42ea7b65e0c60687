"""Requests through a batcher: admission, deadlines, cancellation, failures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.errors import Reason, from_rpc_error
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from .conftest import CHAT, Host, Runner, Running, Start, loaded, state_of, within

pytestmark = pytest.mark.integration


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans that ended during the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("forebay_common.telemetry._provider", provider)
    return exporter


async def first_part(call: Any) -> str:
    part = await within(call.read())
    return str(part.text_delta)


async def rest(call: Any) -> list[Any]:
    parts = []
    while (part := await within(call.read())) is not grpc.aio.EOF:
        parts.append(part)
    return parts


async def reason_of(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return from_rpc_error(caught.value).reason


async def test_a_plain_stub_needs_no_metadata(serving: Running, runner: Runner) -> None:
    runner.hold = False
    assert await serving.answer("hello") == "first hello"
    assert await serving.answer("hello", model="chat") == "first hello"
    vectors = await serving.inference.Embed(
        inference.EmbedRequest(model="chat", inputs=[inference.EmbedInput(text="a")])
    )
    assert len(vectors.embeddings) == 1
    body = json.dumps({"model": CHAT}).encode()
    call = serving.inference.CallOpenAI(
        inference.CallOpenAIRequest(path="/v1/chat/completions", body=body)
    )
    assert [part.body async for part in call] == [body]
    assert [each.metadata[md.MODEL] for each in runner.calls] == [CHAT] * 4
    assert {each.metadata[md.CLASS] for each in runner.calls} == {"REALTIME"}


async def test_metadata_and_usage_pass_through(serving: Running, runner: Runner) -> None:
    runner.hold = False
    call = serving.generate(
        model="alias-the-router-resolved",
        forebay_model=CHAT,
        forebay_class="BATCH",
        forebay_tenant="acme",
        forebay_session="s1",
        forebay_attempt="2",
        x_request_id="req-7",
    )
    async for _ in call:
        pass
    trailing = dict(await call.trailing_metadata())
    assert (trailing[md.USAGE], trailing[md.REQUEST_ID]) == ("3,2,0", "req-7")
    sent = runner.calls[0].metadata
    assert {key: sent[key] for key in sent if key.startswith(("forebay-", "x-"))} == {
        "forebay-model": CHAT,
        "forebay-class": "BATCH",
        "forebay-tenant": "acme",
        "forebay-session": "s1",
        "forebay-attempt": "2",
        "x-request-id": "req-7",
    }


async def test_wrong_requests_are_refused(serving: Running, host: Host, runner: Runner) -> None:
    host.show("chat@2", path=runner.path)
    await serving.becomes_active("chat@2")
    assert await serving.reason(model="") is Reason.INVALID_ARGUMENT
    assert await serving.reason(model="chat") is Reason.INVALID_ARGUMENT
    assert await serving.reason(model="other") is Reason.MODEL_NOT_FOUND
    assert await serving.reason(forebay_model="other@1") is Reason.MODEL_NOT_LOADED
    assert await serving.reason(forebay_class="URGENT") is Reason.INVALID_ARGUMENT
    for body in (b"{", b"[]", b'{"model": 1}', b"[" * 100_000, b"\xff"):
        call = serving.inference.CallOpenAI(inference.CallOpenAIRequest(body=body))
        assert await reason_of(call) is Reason.INVALID_ARGUMENT
    raw: Any = serving.channel.unary_stream("/forebay.inference.v1.InferenceService/Generate")
    assert await reason_of(raw(b"\xff\xff")) is Reason.INVALID_ARGUMENT
    assert runner.calls == []


async def test_a_model_that_is_not_ready_is_not_loaded(start: Start, host: Host) -> None:
    await host.die()
    running = await start()
    assert await running.reason() is Reason.MODEL_NOT_LOADED
    host.show(state=engine.MODEL_STATE_LOADING)
    await host.start()
    await running.becomes(lambda replica: state_of(replica) == engine.MODEL_STATE_LOADING)
    assert await running.reason() is Reason.MODEL_NOT_LOADED


async def test_fifty_at_once_never_exceed_the_slots(
    serving: Running, host: Host, runner: Runner
) -> None:
    calls = [serving.generate(str(n)) for n in range(50)]
    answers = [asyncio.create_task(_text(call)) for call in calls]
    await runner.called(4)
    replica = await serving.becomes(lambda r: loaded(r).queued == 46)
    assert (loaded(replica).in_flight, loaded(replica).slots) == (4, 4)
    assert len(runner.calls) == 4
    for done in range(50):
        await runner.called(done + 1)
        runner.calls[done].go_on.set()
    texts = await within(asyncio.gather(*answers))
    assert texts == [f"first {n}" for n in range(50)]
    assert runner.running_max == 4
    await serving.becomes(lambda r: (loaded(r).queued, loaded(r).in_flight) == (0, 0))


async def test_higher_classes_go_first_and_the_queue_shows_it(
    serving: Running, host: Host, runner: Runner
) -> None:
    host.show(path=runner.path, slots=1)
    await serving.becomes(lambda r: loaded(r).slots == 1)
    calls = [asyncio.create_task(serving.answer("0"))]
    await runner.called(1)
    for text, priority in (("1", "BACKGROUND"), ("2", "BATCH"), ("3", "REALTIME")):
        calls.append(
            asyncio.create_task(serving.answer(text, forebay_class=priority, x_request_id=text))
        )
        await serving.becomes(lambda r, text=text: loaded(r).queued == int(text))  # type: ignore[misc]
    listed = await serving.control.GetQueue(batcher.GetQueueRequest())
    assert [each.request_id for each in listed.requests] == ["3", "2", "1"]
    assert all(29_000 < each.remaining_ms < 30_100 for each in listed.requests)
    assert {batcher.PriorityClass.Name(d.priority_class)[15:]: d.queued for d in listed.depths} == {
        "REALTIME": 1,
        "BATCH": 1,
        "BACKGROUND": 1,
    }
    cut = await serving.control.GetQueue(batcher.GetQueueRequest(limit=1))
    assert [each.request_id for each in cut.requests] == ["3"]
    runner.let_all_go()
    await within(asyncio.gather(*calls))
    order = [call.metadata[md.CLASS] for call in runner.calls]
    assert order == ["REALTIME", "REALTIME", "BATCH", "BACKGROUND"]


async def test_a_full_queue_refuses_at_once(start: Start, host: Host, runner: Runner) -> None:
    host.show(path=runner.path, slots=1)
    running = await start(queued_max_realtime=2)
    await running.becomes_active()
    calls = [running.generate() for _ in range(3)]
    await runner.called(1)
    await running.becomes(lambda r: loaded(r).queued == 2)
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.answer()
    error = from_rpc_error(caught.value)
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    assert time.monotonic() - began < 0.25
    for call in calls:
        call.cancel()
    await running.becomes(lambda r: (loaded(r).queued, loaded(r).in_flight) == (0, 0))


async def test_a_wait_is_bounded_without_a_deadline(
    start: Start, host: Host, runner: Runner
) -> None:
    host.show(path=runner.path, slots=1)
    running = await start(queue_wait_s_max_realtime=0.2)
    await running.becomes_active()
    first = running.generate(timeout=None)
    await runner.called(1)
    began = time.monotonic()
    assert await running.reason(timeout=None) is Reason.QUEUE_FULL
    assert 0.19 <= time.monotonic() - began < 1
    first.cancel()


async def test_a_deadline_ends_a_running_call_and_the_runners(
    serving: Running, runner: Runner
) -> None:
    began = time.monotonic()
    call = serving.generate(timeout=0.3)
    assert await first_part(call) == "first "
    assert await reason_of(call) is Reason.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 1
    await runner.news.until(lambda: runner.calls[0].ended)
    assert runner.calls[0].cancelled_at is not None
    left = runner.calls[0].deadline_in_s
    assert left is not None and 0 < left < 0.31
    await serving.becomes(lambda r: loaded(r).in_flight == 0)


async def test_a_deadline_ends_a_waiting_call_which_never_reaches_the_runner(
    serving: Running, host: Host, runner: Runner
) -> None:
    host.show(path=runner.path, slots=1)
    await serving.becomes(lambda r: loaded(r).slots == 1)
    first = serving.generate()
    assert await first_part(first) == "first "
    assert await serving.reason(timeout=0.2) is Reason.DEADLINE_EXCEEDED
    await serving.becomes(lambda r: loaded(r).queued == 0)
    runner.let_all_go()
    assert await serving.answer("next") == "first next"
    assert len(runner.calls) == 2


async def test_the_longest_run_is_bounded(start: Start, runner: Runner) -> None:
    running = await start(run_s_max=0.2)
    await running.becomes_active()
    assert await running.reason(timeout=None) is Reason.DEADLINE_EXCEEDED
    await runner.news.until(lambda: runner.calls[0].ended)


async def test_cancelling_a_running_call_reaches_the_runner(
    serving: Running, runner: Runner
) -> None:
    call = serving.generate()
    await first_part(call)
    began = time.monotonic()
    call.cancel()
    await runner.news.until(lambda: runner.calls[0].ended)
    assert runner.calls[0].cancelled_at is not None
    assert runner.calls[0].cancelled_at - began < 0.25
    await serving.becomes(lambda r: loaded(r).in_flight == 0)


async def test_cancelling_a_waiting_call_removes_it(
    serving: Running, host: Host, runner: Runner
) -> None:
    host.show(path=runner.path, slots=1)
    await serving.becomes(lambda r: loaded(r).slots == 1)
    first = serving.generate("a")
    await first_part(first)
    second = serving.generate("b")
    await serving.becomes(lambda r: loaded(r).queued == 1)
    began = time.monotonic()
    second.cancel()
    await serving.becomes(lambda r: loaded(r).queued == 0)
    assert time.monotonic() - began < 0.25
    runner.let_all_go()
    assert await serving.answer("c") == "first c"
    assert len(runner.calls) == 2


async def test_a_full_kv_cache_holds_requests_back(
    serving: Running, host: Host, runner: Runner
) -> None:
    first = serving.generate()
    await first_part(first)
    host.show(path=runner.path, kv_cache_usage=0.97)
    await serving.becomes(lambda r: loaded(r).kv_cache_usage > 0.9)
    second = asyncio.create_task(serving.answer("second"))
    await serving.becomes(lambda r: loaded(r).queued == 1)
    host.show(path=runner.path, kv_cache_usage=0.5)
    await runner.called(2)
    runner.let_all_go()
    assert await within(second) == "first second"


async def test_a_killed_runner_is_told_as_lost_and_offered_no_more(
    start: Start, host: Host
) -> None:
    path = host.runner("killed").path
    script = str(Path(__file__).with_name("runner_process.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, path, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await within(process.stdout.readline(), 30)
        host.show(path=path, slots=2)
        running = await start()
        await running.becomes_active()
        calls = [running.generate() for _ in range(2)]
        for call in calls:
            await first_part(call)
        waiting = asyncio.create_task(running.reason("waits"))
        await running.becomes(lambda r: loaded(r).queued == 1)
        lost = asyncio.create_task(
            running.becomes(lambda r: state_of(r) == engine.MODEL_STATE_FAILED)
        )
        began = time.monotonic()
        process.kill()
        # The host says nothing: the broken connection alone must be enough.
        await lost
        assert time.monotonic() - began < 0.3
        assert [await reason_of(call) for call in calls] == [Reason.REPLICA_LOST] * 2
        assert await within(waiting) is Reason.MODEL_NOT_LOADED
        assert await running.reason() is Reason.MODEL_NOT_LOADED
        again = host.runner("killed", hold=False)
        await again.start()
        host.show(path=path, slots=2, generation=2)
        replica = await running.becomes_active()
        assert loaded(replica).in_flight == 0
        assert await running.answer("back") == "first back"
        await again.die()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_host_that_sees_a_runner_die_is_believed_at_once(
    serving: Running, host: Host, runner: Runner
) -> None:
    call = serving.generate()
    await first_part(call)
    failed = asyncio.create_task(
        serving.becomes(lambda r: state_of(r) == engine.MODEL_STATE_FAILED)
    )
    began = time.monotonic()
    host.show(state=engine.MODEL_STATE_FAILED)
    await failed
    assert time.monotonic() - began < 0.3
    assert await serving.reason() is Reason.MODEL_NOT_LOADED
    await runner.die()
    assert await reason_of(call) is Reason.REPLICA_LOST


async def test_a_runner_that_ends_one_call_is_not_taken_for_dead(
    serving: Running, runner: Runner
) -> None:
    runner.cancel_next = True
    assert await serving.reason() is Reason.REPLICA_LOST
    runner.hold = False
    assert await serving.answer("still here") == "first still here"


async def test_a_lost_host_takes_its_models_away_and_brings_them_back(
    serving: Running, host: Host, runner: Runner
) -> None:
    runs = serving.generate("runs on")
    await first_part(runs)
    await host.die()
    await serving.becomes(lambda r: state_of(r) == engine.MODEL_STATE_UNSPECIFIED)
    assert await serving.reason() is Reason.MODEL_NOT_LOADED
    runner.let_all_go()
    assert [part.text_delta for part in await rest(runs)] == ["runs on"]
    await host.start()
    await serving.becomes_active()
    assert await serving.answer("again") == "first again"


async def test_the_wait_is_a_span_between_caller_and_runner(
    serving: Running, host: Host, runner: Runner, spans: InMemorySpanExporter
) -> None:
    host.show(path=runner.path, slots=1)
    await serving.becomes(lambda r: loaded(r).slots == 1)
    trace_ids = [f"{n:032x}" for n in range(1, 21)]
    calls = [
        asyncio.create_task(serving.answer(traceparent=f"00-{trace_id}-00f067aa0ba902b7-01"))
        for trace_id in trace_ids
    ]
    await serving.becomes(lambda r: loaded(r).queued == 19)
    assert len(spans.get_finished_spans()) == 1, "the span of a waiting request goes on"
    runner.let_all_go()
    await within(asyncio.gather(*calls))
    finished = [span for span in spans.get_finished_spans() if span.name == "queue"]
    assert {f"{span.context.trace_id:032x}" for span in finished} == set(trace_ids)
    assert all(span.parent and span.parent.span_id == 0x00F067AA0BA902B7 for span in finished)
    sent = {call.metadata[md.TRACEPARENT] for call in runner.calls}
    assert sent == {
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01" for span in finished
    }
    attributes = [dict(span.attributes or {}) for span in finished]
    assert {each["forebay.model_version"] for each in attributes} == {CHAT}
    assert {each["forebay.class"] for each in attributes} == {"REALTIME"}
    assert max(int(str(each["forebay.queue_depth"])) for each in attributes) >= 17


async def _text(call: Any) -> str:
    return "".join([part.text_delta async for part in call])
