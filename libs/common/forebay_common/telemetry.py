"""Traces, metrics and logs.

Spans go to the OTLP back end that the standard OpenTelemetry variables name; without one nothing is
recorded. A span costs tens of microseconds, so one is started only where the caller's trace is
sampled or, at the first hop, by the standard sampler variables.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata as packages
from typing import TypeVar

import prometheus_client
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util import types
from prometheus_client.metrics import MetricWrapperBase

from forebay_common.metadata import TRACEPARENT, TRACESTATE, Metadata

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()
# Version ff is none, and ids of zeros alone are invalid. What follows the flags is for a version
# later than 00 to define.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"(?:(?<!^00.{53})-[\x20-\x7e]{0,256})?"
)
_TRACE_ID = slice(3, 35)
_FLAGS = slice(53, 55)
_TRACESTATE_CHARS_MAX = 8192
_CHILDREN_MAX = 1024

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)

_provider: trace.TracerProvider | None = None


def configure(
    service: str, *, instance_id: str, log_level: str = "INFO", distribution: str | None = None
) -> None:
    """Set up tracing and structured logs for this process.

    Args:
        service: `router`, `batcher`, `runner`, …; becomes `service.name` `forebay-<service>`.
        instance_id: becomes `service.instance.id`.
        log_level: least severe record written to standard error. Of libraries, whose debugging
            tells headers, keys and prompts, it is never less than INFO.
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
    trace_with(provider)


def trace_with(provider: trace.TracerProvider | None) -> None:
    """Start all spans of this process with `provider`; none with None, as before `configure`."""
    # OpenTelemetry's own global looks into the environment each time it is asked and not set, which
    # costs every request that is not traced a microsecond.
    global _provider  # noqa: PLW0603  # a process has one, as with OpenTelemetry's own
    _provider = provider


def shutdown() -> None:
    """Flush what is not exported yet; bounded by the exporter's timeout."""
    if isinstance(_provider, TracerProvider):
        _provider.shutdown()


def version_of(distribution: str) -> str:
    """Version of an installed distribution, or `unknown`."""
    try:
        return packages.version(distribution)
    except packages.PackageNotFoundError:
        return "unknown"


def tracer() -> trace.Tracer:
    """The tracer of Forebay's own spans."""
    return _tracer_of(_provider if _provider is not None else trace.NoOpTracerProvider())


def start_span(
    name: str,
    metadata: Mapping[str, str],
    *,
    kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    attributes: types.Attributes = None,
    start_time: int | None = None,
) -> trace.Span | None:
    """Start a span under the caller's, or say with None that nothing would be recorded of it.

    None: no tracing is set up, or the caller's trace is not sampled and the sampler follows the
    caller. Where a trace begins and the sampler drops it, the span records nothing and is returned
    nevertheless: the next hop is told of the decision through it.

    Args:
        name: the span's.
        metadata: the call's, keys in lower case.
        kind: the span's.
        attributes: the span's.
        start_time: nanoseconds since the epoch; now when None.
    """
    if _provider is None:
        return None
    parent = _parent_of(metadata)
    if parent is not None and not _is_sampled(parent) and _follows_parent(_provider):
        return None
    return _tracer_of(_provider).start_span(
        name,
        context=extract(metadata.items()),
        kind=kind,
        attributes=attributes,
        start_time=start_time,
    )


def start_child(name: str, parent: trace.Span | None) -> trace.Span | None:
    """Start a span under another of this hop; None where nothing would be recorded of it."""
    if parent is None or not parent.is_recording():
        return None
    return tracer().start_span(name, context=context_of(parent))


def passed_on(metadata: Mapping[str, str], span: trace.Span | None) -> Metadata:
    """The trace context for the next hop: the span's, or without one the caller's own text."""
    if span is not None:
        return inject(context_of(span))
    parent = _parent_of(metadata)
    if parent is None:
        return ()
    tracestate = metadata.get(TRACESTATE)
    if tracestate is None or not _is_passable(tracestate):
        return ((TRACEPARENT, parent),)
    return ((TRACEPARENT, parent), (TRACESTATE, tracestate))


def trace_id_of(context: Metadata) -> str:
    """The trace's id in what `passed_on` gave, 32 hexadecimal digits; empty where it gave none."""
    for key, value in context:
        if key == TRACEPARENT:
            return value[_TRACE_ID]
    return ""


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The trace context that a call's metadata carries; empty where it carries none."""
    carrier = {
        key: value
        for key, value in metadata or ()
        if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)
    }
    return _PROPAGATOR.extract(carrier, context=Context()) if carrier else Context()


def inject(context: Context) -> Metadata:
    """Metadata that carries a trace context to the next hop."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def context_of(span: trace.Span) -> Context:
    """A context whose current span is `span`, and that holds nothing else."""
    return trace.set_span_in_context(span, Context())


def _parent_of(metadata: Mapping[str, str]) -> str | None:
    """`traceparent` where it names the caller's span as W3C Trace Context has it."""
    text = metadata.get(TRACEPARENT)
    return text if text is not None and _TRACEPARENT.fullmatch(text) is not None else None


def _is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent[_FLAGS], 16) & trace.TraceFlags.SAMPLED)


def _is_passable(tracestate: str) -> bool:
    is_text = tracestate.isascii() and tracestate.isprintable()
    return is_text and len(tracestate) <= _TRACESTATE_CHARS_MAX


def _follows_parent(provider: trace.TracerProvider) -> bool:
    """Whether the sampler records nothing below a caller that does not."""
    return isinstance(provider, TracerProvider) and isinstance(provider.sampler, ParentBased)


@functools.lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    # A provider makes a new tracer each time it is asked.
    return provider.get_tracer("forebay")


def children(metric: _Metric) -> Callable[..., _Metric]:
    """`metric.labels`, remembering what it found: to find a child takes longer than to count with
    it. Not for a metric whose children are removed."""
    return functools.lru_cache(maxsize=_CHILDREN_MAX)(metric.labels)


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


def _ours_or_severe(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.INFO or record.name.startswith("forebay")


def _configure_logs(service: str, instance_id: str, log_level: str) -> None:
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(_JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(log_level)
    output.addFilter(_ours_or_severe)
