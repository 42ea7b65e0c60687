from collections.abc import Callable

import pytest
from forebay_common import telemetry
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_OFF, DEFAULT_ON, Sampler

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"

Provide = Callable[[Sampler | None], None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Provide:
    """Sets tracing up with a sampler, or not at all with None."""

    def set_up(sampler: Sampler | None) -> None:
        provider = None if sampler is None else TracerProvider(sampler=sampler)
        monkeypatch.setattr("forebay_common.telemetry._provider", provider)

    return set_up


@pytest.mark.parametrize("metadata", [{}, {"traceparent": SAMPLED}, {"traceparent": UNSAMPLED}])
def test_without_tracing_there_is_no_span_and_the_callers_text_goes_on(
    provide: Provide, metadata: dict[str, str]
) -> None:
    provide(None)
    assert telemetry.start_span("router", metadata) is None
    passed_on = telemetry.passed_on({"x": "y", **metadata}, None)
    assert passed_on == tuple(metadata.items())
    assert telemetry.trace_id_of(passed_on) == (TRACE if metadata else "")


@pytest.mark.parametrize("sampler", [DEFAULT_ON, DEFAULT_OFF])
def test_a_caller_that_is_not_sampled_costs_no_span(provide: Provide, sampler: Sampler) -> None:
    provide(sampler)
    metadata = {"traceparent": UNSAMPLED, "tracestate": "vendor=1"}
    assert telemetry.start_span("router", metadata) is None
    assert telemetry.passed_on(metadata, None) == tuple(metadata.items())


@pytest.mark.parametrize("sampler", [DEFAULT_ON, DEFAULT_OFF, ALWAYS_ON])
def test_a_sampled_caller_has_a_span_under_it(provide: Provide, sampler: Sampler) -> None:
    provide(sampler)
    metadata = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
    span = telemetry.start_span("router", metadata)
    assert span is not None and span.is_recording()
    own = span.get_span_context().span_id
    passed_on = telemetry.passed_on(metadata, span)
    assert passed_on == (
        ("traceparent", f"00-{TRACE}-{own:016x}-01"),
        ("tracestate", "vendor=1"),
    )
    assert telemetry.trace_id_of(passed_on) == TRACE
    child = telemetry.start_child("place", span)
    assert child is not None
    assert child.get_span_context().trace_id == span.get_span_context().trace_id


def test_a_sampler_of_its_own_mind_is_asked_whatever_the_caller_says(provide: Provide) -> None:
    provide(ALWAYS_ON)
    span = telemetry.start_span("router", {"traceparent": UNSAMPLED})
    assert span is not None and span.is_recording()


@pytest.mark.parametrize("sampler", [DEFAULT_OFF, ALWAYS_OFF])
def test_the_next_hop_is_told_that_a_trace_begun_here_is_not_sampled(
    provide: Provide, sampler: Sampler
) -> None:
    provide(sampler)
    span = telemetry.start_span("router", {})
    assert span is not None and not span.is_recording()
    assert telemetry.start_child("place", span) is None
    [(key, value)] = passed_on = telemetry.passed_on({}, span)
    assert key == "traceparent"
    own = trace.format_trace_id(span.get_span_context().trace_id)
    assert value.split("-")[1] == own == telemetry.trace_id_of(passed_on)
    assert int(value.split("-")[3], 16) & 1 == 0


@pytest.mark.parametrize(
    "traceparent",
    [
        SAMPLED,
        UNSAMPLED,
        SAMPLED + "-x",
        f"01-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-what-a-later-version-adds",
        f"01-{TRACE}-{SPAN}-01x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-0g",
        "",
        "é" * 55,
        "0" * 9000,
    ],
)
def test_a_traceparent_goes_on_where_opentelemetry_would_take_it(traceparent: str) -> None:
    metadata = {"traceparent": traceparent, "tracestate": "vendor=1"}
    context = telemetry.extract(metadata.items())
    taken = trace.get_current_span(context).get_span_context().is_valid
    passed_on = telemetry.passed_on(metadata, None)
    assert passed_on == (tuple(metadata.items()) if taken else ())
    assert bool(telemetry.trace_id_of(passed_on)) == taken


@pytest.mark.parametrize("tracestate", ["vendor=é", "a=1\x00", "a=1\n", "a" * 8193])
def test_a_tracestate_that_no_header_can_carry_is_left_out(tracestate: str) -> None:
    metadata = {"traceparent": SAMPLED, "tracestate": tracestate}
    assert telemetry.passed_on(metadata, None) == (("traceparent", SAMPLED),)
