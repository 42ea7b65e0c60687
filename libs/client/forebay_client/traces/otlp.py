"""Reads OTLP messages into spans; everything a producer can make large is cut to size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.trace.v1 import trace_pb2

from forebay_client.traces.core.span import Event, Scalar, Span, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How much of one span is kept."""

    attributes_max: int = 64
    events_max: int = 32
    text_chars_max: int = 2048
    list_max: int = 32


def spans_of(
    request: otlp.ExportTraceServiceRequest, limits: Limits | None = None
) -> Iterator[Span]:
    """The spans of one export; those without valid ids are skipped."""
    limits = limits or Limits()
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes, limits)
        service = str(resource.get("service.name", ""))
        instance = str(resource.get("service.instance.id", ""))
        for scope in group.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield _span(span, service, instance, limits)


def _span(span: Any, service: str, instance: str, limits: Limits) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name[: limits.text_chars_max],
        service=service,
        instance=instance,
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=max(span.end_time_unix_nano, span.start_time_unix_nano),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        message=span.status.message[: limits.text_chars_max],
        attributes=_attributes(span.attributes, limits),
        events=tuple(
            Event(
                event.name[: limits.text_chars_max],
                event.time_unix_nano,
                _attributes(event.attributes, limits),
            )
            for event in span.events[: limits.events_max]
        ),
    )


def _attributes(entries: Iterable[Any], limits: Limits) -> dict[str, Value]:
    kept: dict[str, Value] = {}
    for entry in entries:
        if len(kept) >= limits.attributes_max:
            break
        value = _value(entry.value, limits)
        if value is not None:
            kept[entry.key[:256]] = value
    return kept


def _value(value: Any, limits: Limits) -> Value | None:
    if value.WhichOneof("value") == "array_value":
        parts = (_scalar(part, limits) for part in value.array_value.values[: limits.list_max])
        return tuple(part for part in parts if part is not None)
    return _scalar(value, limits)


def _scalar(value: Any, limits: Limits) -> Scalar | None:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        text: str = value.string_value
        return text[: limits.text_chars_max]
    if kind in ("bool_value", "int_value", "double_value"):
        scalar: Scalar = getattr(value, kind)
        return scalar
    return None
