"""The spans of one call: `generate`, with `prefill` and `decode` under it at their real times."""

from collections.abc import Mapping

from forebay_common import telemetry
from opentelemetry import trace

from forebay_engine.runner.backend import Call


def start_span(
    metadata: Mapping[str, str], call: Call, *, operation: str, model: str
) -> trace.Span | None:
    """Start the `generate` span under the caller's; None when it would not be recorded."""
    span = telemetry.start_span(
        "generate",
        metadata,
        kind=trace.SpanKind.SERVER,
        start_time=call.started_ns,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.response.id": call.request_id,
            "forebay.request_id": call.request_id,
        },
    )
    return span if span is not None and span.is_recording() else None


def end_span(span: trace.Span, call: Call, *, end_ns: int, model: str, failure: str | None) -> None:
    """End the span and write its children from the times the back end saw."""
    span.set_attributes(
        {
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        }
    )
    if call.finish_reasons:
        span.set_attribute("gen_ai.response.finish_reasons", tuple(call.finish_reasons))
    resumption = call.resumption
    if resumption is not None:
        span.set_attribute("forebay.resume.mode", resumption.mode or "none")
        span.set_attribute("forebay.resume.tokens", sum(map(len, resumption.tokens.values())))
    context = telemetry.context_of(span)
    tracer = telemetry.tracer()
    prefill_end = call.first_token_ns or end_ns
    tracer.start_span("prefill", context=context, start_time=call.started_ns).end(prefill_end)
    if call.first_token_ns:
        tracer.start_span("decode", context=context, start_time=call.first_token_ns).end(
            call.last_token_ns
        )
    if failure is not None:
        span.set_attribute("error.type", failure)
        span.set_status(trace.StatusCode.ERROR)
    span.end(end_ns)
