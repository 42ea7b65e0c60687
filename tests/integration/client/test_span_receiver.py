"""The span store behind OpenTelemetry's own exporter."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from forebay_client.traces.receiver import SpanReceiver
from forebay_client.traces.store import SpanReader, SpanWriter
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

pytestmark = pytest.mark.integration


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[str]:
    receiver = SpanReceiver(SpanWriter(tmp_path / "spans.db"))
    yield await receiver.listen("127.0.0.1:0")
    await receiver.close()


async def test_exported_spans_can_be_read_at_once(endpoint: str, tmp_path: Path) -> None:
    resource = Resource({"service.name": "forebay-router", "service.instance.id": "i-1"})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(f"http://{endpoint}", insecure=True, timeout=5)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def work() -> str:
        with tracer.start_as_current_span("router") as router:
            router.set_attribute("forebay.request_id", "r-1")
            router.set_attribute("reasons", ["stop"])
            with tracer.start_as_current_span("queue") as queue:
                queue.add_event("dispatched", {"slots": 3})
                queue.set_status(trace.StatusCode.ERROR, "full")
        provider.shutdown()
        return trace.format_trace_id(router.get_span_context().trace_id)

    trace_id = await asyncio.to_thread(work)
    reader = SpanReader(tmp_path / "spans.db")
    assert reader.trace_of("r-1") == trace_id
    router, queue = reader.spans(trace_id)
    reader.close()
    assert (router.name, router.parent_id, router.service) == ("router", "", "forebay-router")
    assert router.attributes == {"forebay.request_id": "r-1", "reasons": ("stop",)}
    assert queue.parent_id == router.span_id
    assert (queue.failed, queue.message) == (True, "full")
    assert queue.events[0].attributes == {"slots": 3}
    assert queue.start_unix_ns >= router.start_unix_ns
    assert router.duration_ms > 0
