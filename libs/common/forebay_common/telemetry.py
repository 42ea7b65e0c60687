"""Traces, metrics and logs.

Spans go to the OTLP back end that the standard OpenTelemetry variables name; without one nothing is
recorded. A span costs tens of microseconds, so one is started only where the caller's trace is
sampled or, at the first hop, by the standard sampler variables.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from importlib import metadata as packages

import prometheus_client
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()


def configure(
    service: str, *, instance_id: str, log_level: str = "INFO", distribution: str | None = None
) -> None:
    """Set up tracing and structured logs for this process.

    Args:
        service: `router`, `batcher`, `runner`, …; becomes `service.name` `forebay-<service>`.
        instance_id: becomes `service.instance.id`.
        log_level: least severe record written to standard error.
        distribution: whose version is reported; `forebay-<service>` when None.
    """
    _configure_logs(service, instance_id, log_level)
    propagate.set_global_textmap(_PROPAGATOR)
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    provider = TracerProvider(
        resource=Resource.create(
            {
                "service.name": f"forebay-{service}",
                "service.instance.id": instance_id,
                "service.version": version_of(distribution or f"forebay-{service}"),
            }
        )
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(timeout=5),
            max_queue_size=8192,
            schedule_delay_millis=int(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", "500")),
        )
    )
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Flush what is not exported yet; bounded by the exporter's timeout."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def version_of(distribution: str) -> str:
    """Version of an installed distribution, or `unknown`."""
    try:
        return packages.version(distribution)
    except packages.PackageNotFoundError:
        return "unknown"


def tracer() -> trace.Tracer:
    """The tracer of Forebay's own spans."""
    return trace.get_tracer("forebay")


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The trace context that a call's metadata carries; empty where it carries none."""
    carrier = {
        key: value
        for key, value in metadata or ()
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return _PROPAGATOR.extract(carrier, context=Context()) if carrier else Context()


def inject(context: Context) -> tuple[tuple[str, str], ...]:
    """Metadata that carries a trace context to the next hop."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def context_of(span: trace.Span) -> Context:
    """A context whose current span is `span`, and that holds nothing else."""
    return trace.set_span_in_context(span, Context())


def trace_id_of(context: Context) -> str:
    """The trace's id, 32 hexadecimal digits, or empty where there is none."""
    span = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid else ""


def serve_metrics(listen: str) -> str | None:
    """Serve Prometheus metrics on `host:port` from a thread; port 0 picks a free one.

    Returns:
        The bound address, or None when `listen` is empty.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    server, _ = prometheus_client.start_http_server(int(port), addr=host)
    return f"{host}:{server.server_port}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fixed,
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            entry["trace_id"] = trace.format_trace_id(span.trace_id)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _configure_logs(service: str, instance_id: str, log_level: str) -> None:
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(_JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(log_level)
