"""The spans of a runner, as an OTLP back end gets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common import metadata
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.engine_host import a_spec, running_host

pytestmark = pytest.mark.integration
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps every span it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.grown = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Take spans."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.grown.set()
        return otlp.ExportTraceServiceResponse()

    async def until(self, count: int) -> list[Span]:
        """Wait for so many spans."""
        async with asyncio.timeout(10):
            while len(self.spans) < count:
                self.grown.clear()
                await self.grown.wait()
        return self.spans


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A back end that hosts started from now on send to."""
    collector = Collector()
    server = grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield collector
    await server.stop(0)


def attributes_of(span: Span) -> dict[str, Any]:
    return {
        entry.key: getattr(entry.value, entry.value.WhichOneof("value"))
        for entry in span.attributes
    }


async def test_generate_has_prefill_and_decode_that_add_up(
    tmp_path: Path, collector: Collector
) -> None:
    async with running_host(tmp_path, [a_spec(profile="paced")]) as host:
        runner = await host.runner()
        request = inference.GenerateRequest(
            text="a secret river",
            sampling=inference.SamplingOptions(max_tokens=5, ignore_eos=True),
        )
        for flags in ("00", "01"):
            sent = ((metadata.TRACEPARENT, f"00-{TRACE}-{PARENT}-{flags}"),)
            assert [message async for message in runner.Generate(request, metadata=sent)]
        spans = {span.name: span for span in await collector.until(3)}
    assert len(collector.spans) == 3, "the unsampled call has left spans"
    generate, prefill, decode = spans["generate"], spans["prefill"], spans["decode"]
    assert generate.trace_id.hex() == TRACE
    assert generate.parent_span_id.hex() == PARENT
    assert prefill.parent_span_id == decode.parent_span_id == generate.span_id
    assert generate.start_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= generate.end_time_unix_nano
    # Four more steps of 10 ms after the first token.
    assert decode.end_time_unix_nano - decode.start_time_unix_nano > 35e6
    found = attributes_of(generate)
    assert found["gen_ai.response.model"] == "tiny@1"
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.usage.input_tokens"] > 0
    assert "secret" not in str(collector.spans)


async def test_refused_call_says_why(tmp_path: Path, collector: Collector) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        runner = await host.runner()
        sent = ((metadata.TRACEPARENT, f"00-{TRACE}-{PARENT}-01"),)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(runner.Generate(inference.GenerateRequest(), metadata=sent)))
        spans = {span.name: span for span in await collector.until(2)}
    assert attributes_of(spans["generate"])["error.type"] == "INVALID_ARGUMENT"


async def test_an_answer_that_is_taken_up_says_how(tmp_path: Path, collector: Collector) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        runner = await host.runner()
        request = inference.GenerateRequest(text="a secret river")
        unsampled = ((metadata.TRACEPARENT, f"00-{TRACE}-{PARENT}-00"),)
        call = runner.Generate(request, metadata=unsampled)
        first, second = [message async for message in call][:2]
        request.resume.text = first.text_delta + second.text_delta
        request.resume.tokens.add(token_ids=[*first.token_ids, *second.token_ids])
        sent = ((metadata.TRACEPARENT, f"00-{TRACE}-{PARENT}-01"),)
        assert [message async for message in runner.Generate(request, metadata=sent)]
        spans = {span.name: span for span in await collector.until(3)}
    found = attributes_of(spans["generate"])
    assert found["forebay.resume.mode"] == "prefill"
    assert found["forebay.resume.tokens"] == len(request.resume.tokens[0].token_ids)
