"""A router's announcement, traces, drain, and its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import aiohttp
import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata as md
from forebay_common.discovery import Instance, Keys
from forebay_common.errors import Reason, from_rpc_error
from forebay_common.store import Store
from grpc_health.v1 import health_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from .conftest import (
    CHAT,
    WAIT_S,
    RunningRouter,
    Script,
    StartRouter,
    StartStandIn,
    a_refusal,
    eventually,
)

pytestmark = pytest.mark.integration

BODY: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
REQUEST = inference.GenerateRequest(model="chat", text="hello")
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = (md.TRACEPARENT, f"00-{TRACE}-b7ad6b7169203331-01")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("forebay_common.telemetry._provider", provider)
    return exporter


async def test_a_request_is_one_chain_of_spans(
    spans: InMemorySpanExporter, router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_in = await start_stand_in()
    call = router.inference.Generate(REQUEST, metadata=(TRACEPARENT,), timeout=WAIT_S)
    assert [part async for part in call]
    await eventually(lambda: len(spans.get_finished_spans()) == 2)
    place, root = sorted(spans.get_finished_spans(), key=lambda span: span.name)
    assert (place.name, root.name) == ("place", "router")
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert place.parent is not None
    assert place.parent.span_id == root.context.span_id
    passed_on = stand_in.seen[0].metadata[md.TRACEPARENT]
    assert passed_on == f"00-{TRACE}-{root.context.span_id:016x}-01"
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.request.model"] == "chat"
    assert attributes["forebay.model_version"] == "chat@v1"
    assert attributes["forebay.replica"] == "r1"
    assert attributes["forebay.attempts"] == 1
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert "hello" not in json.dumps(attributes)


async def test_a_failed_request_has_its_reason_on_its_span(
    spans: InMemorySpanExporter, router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    (await start_stand_in()).usual = a_refusal(Reason.UNSUPPORTED)
    with pytest.raises(grpc.aio.AioRpcError):
        assert [part async for part in router.inference.Generate(REQUEST, timeout=WAIT_S)]
    await eventually(lambda: len(spans.get_finished_spans()) == 2)
    root = next(span for span in spans.get_finished_spans() if span.name == "router")
    assert root.status.status_code is StatusCode.ERROR
    assert dict(root.attributes or {})["error.type"] == "UNSUPPORTED"


async def test_traces_do_not_mix(
    spans: InMemorySpanExporter, router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_in = await start_stand_in()

    async def ask(n: int) -> None:
        traceparent = (md.TRACEPARENT, f"00-{n + 1:032x}-{n + 1:016x}-01")
        metadata = (traceparent, (md.REQUEST_ID, f"request-{n}"))
        call = router.inference.Generate(REQUEST, metadata=metadata, timeout=WAIT_S)
        assert [part async for part in call]

    await asyncio.gather(*(ask(n) for n in range(100)))
    for seen in stand_in.seen:
        n = int(seen.metadata[md.REQUEST_ID].removeprefix("request-"))
        assert seen.metadata[md.TRACEPARENT].split("-")[1] == f"{n + 1:032x}"


async def test_a_router_is_announced_until_it_drains(
    router: RunningRouter, start_stand_in: StartStandIn, store: Store, keys: Keys
) -> None:
    key = keys.instance("router", "router-0")
    entry = await store.get(key)
    assert entry is not None
    assert Instance.decode(key, entry.value).addresses == router.instance.addresses
    router.stopping.set()
    await asyncio.wait_for(router.task, WAIT_S)
    assert await store.get(key) is None


async def test_a_drain_refuses_what_is_new_and_ends_what_is_old(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(drain_timeout_s=WAIT_S)
    stand_in = await start_stand_in()
    await router.until_serving()
    stand_in.usual = Script(tokens=1, hangs=True)
    async with aiohttp.ClientSession(router.url) as http:
        streams = await http.post(CHAT, json={**BODY, "stream": True})
        call = router.inference.Generate(REQUEST)
        await call.read()
        router.stopping.set()
        await router.until_serving(health_pb2.HealthCheckResponse.NOT_SERVING)
        async with http.get("/health/ready") as answer:
            assert answer.status == 503
            assert "draining" in (await answer.json())["reasons"]
        async with http.get("/health/live") as answer:
            assert answer.status == 200
        async with http.post(CHAT, json=BODY) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["code"] == "draining"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.inference.Generate(REQUEST).read()
        assert from_rpc_error(caught.value).reason is Reason.DRAINING
        assert not router.task.done()
        for seen in stand_in.seen:
            seen.go_on.set()
        assert b"[DONE]" in await streams.read()
        assert (await call.read()).text_delta == "t1 "
        await asyncio.wait_for(router.task, WAIT_S)


async def test_what_outlives_the_grace_is_told_so(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(drain_timeout_s=0.1)
    stand_in = await start_stand_in()
    stand_in.usual = Script(tokens=1, hangs=True)
    async with aiohttp.ClientSession(router.url) as http:
        streams = await http.post(CHAT, json={**BODY, "stream": True})
        router.stopping.set()
        text = (await streams.read()).decode()
    assert json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == (
        "draining"
    )
    await asyncio.wait_for(router.task, WAIT_S)
    await asyncio.wait_for(stand_in.seen[0].ended.wait(), WAIT_S)


async def test_the_process_drains_on_sigterm_and_exits_with_0(
    etcd: str, namespace: str, store: Store, keys: Keys
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "forebay_router",
        env={
            **os.environ,
            "FOREBAY_ETCD_ENDPOINTS": etcd,
            "FOREBAY_NAMESPACE": namespace,
            "FOREBAY_INSTANCE_ID": "process",
            "FOREBAY_ROUTER_OPEN": "true",
            "FOREBAY_ROUTER_GRPC_LISTEN": "127.0.0.1:0",
            "FOREBAY_ROUTER_HTTP_LISTEN": "127.0.0.1:0",
        },
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        key = keys.instance("router", "process")

        async def announced() -> bool:
            return await store.get(key) is not None

        await eventually(announced, within_s=20)
        entry = await store.get(key)
        assert entry is not None
        url = f"http://{Instance.decode(key, entry.value).addresses['http']}"
        async with aiohttp.ClientSession(url) as http, http.get("/health/live") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, stderr.decode()
    assert b"Traceback" not in stderr
    assert await store.get(key) is None


async def test_a_wrong_option_names_its_variable() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "forebay_router",
        env={**os.environ, "FOREBAY_ROUTER_MAX_ATTEMPTS": "0"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert b"FOREBAY_ROUTER_MAX_ATTEMPTS" in stderr
