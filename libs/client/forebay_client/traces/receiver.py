"""Takes spans in by OTLP over gRPC and hands them to the store."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forebay_common.server import Server
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc

from forebay_client.traces.otlp import spans_of
from forebay_client.traces.store import SpanWriter

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_EXPORTS_AT_ONCE_MAX = 32
"""Further ones are refused; exporters keep what was refused and try again."""


class SpanReceiver:
    """An OTLP trace endpoint over a span store."""

    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer
        # SQLite blocks: one thread, so that writes neither overlap nor hold up the event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spans")
        self._server = Server(max_concurrent_rpcs=_EXPORTS_AT_ONCE_MAX)
        otlp_rpc.add_TraceServiceServicer_to_server(_Servicer(self), self._server.grpc)  # type: ignore[no-untyped-call]
        self._server.offer(SERVICE)

    async def listen(self, address: str) -> str:
        """Start, and return the bound address. OSError when it cannot be bound."""
        bound = await self._server.listen(address)
        self._server.set_ready(SERVICE, True)
        return bound

    async def take(self, request: otlp.ExportTraceServiceRequest) -> None:
        """Keep the spans of one export; returns when they can be read."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, request)

    async def close(self, grace_s: float = 1.0) -> None:
        """Finish what is being written, then stop."""
        await self._server.drain(grace_s)
        await asyncio.to_thread(self._thread.shutdown)
        self._writer.close()

    def _write(self, request: otlp.ExportTraceServiceRequest) -> None:
        self._writer.add(spans_of(request), now_unix_s=time.time())


class _Servicer(otlp_rpc.TraceServiceServicer):
    def __init__(self, receiver: SpanReceiver) -> None:
        self._receiver = receiver

    async def Export(  # noqa: N802
        self, request: otlp.ExportTraceServiceRequest, context: Any
    ) -> otlp.ExportTraceServiceResponse:
        await self._receiver.take(request)
        return otlp.ExportTraceServiceResponse()
