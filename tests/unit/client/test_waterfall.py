"""How the spans of a trace are laid out."""

import random
from collections.abc import Callable

import pytest
from forebay_client.traces.core.span import Span
from forebay_client.traces.core.waterfall import is_whole, lay_out, of_request

Build = Callable[..., Span]


def a_request(span: Build, prefix: str = "", **more: object) -> list[Span]:
    return [
        span(f"{prefix}router", "caller", at=0, ms=100, name="router", **more),
        span(f"{prefix}place", f"{prefix}router", at=1, ms=1, name="place"),
        span(f"{prefix}queue", f"{prefix}router", at=10, ms=20, name="queue"),
        span(f"{prefix}generate", f"{prefix}queue", at=35, ms=60, name="generate"),
        span(f"{prefix}prefill", f"{prefix}generate", at=35, ms=20, name="prefill"),
        span(f"{prefix}decode", f"{prefix}generate", at=55, ms=40, name="decode"),
    ]


def test_the_order_is_that_of_the_tree_whatever_order_spans_arrive_in(span: Build) -> None:
    spans = a_request(span)
    random.Random(3).shuffle(spans)
    waterfall = lay_out(spans)
    assert [(row.span.name, row.depth) for row in waterfall.rows] == [
        ("router", 0),
        ("place", 1),
        ("queue", 1),
        ("generate", 2),
        ("prefill", 3),
        ("decode", 3),
    ]
    assert waterfall.duration_ms == pytest.approx(100)
    assert waterfall.rows[3].offset_ms == pytest.approx(35)
    assert waterfall.is_connected


def test_gaps_are_where_the_request_is_between_hops(span: Build) -> None:
    gaps = [(g.after, g.before, round(g.duration_ms)) for g in lay_out(a_request(span)).gaps]
    assert gaps == [
        ("", "place", 1),
        ("place", "queue", 8),
        ("queue", "generate", 5),
        ("decode", "", 5),
    ]
    assert not lay_out(a_request(span), gap_ms_min=10).gaps


def test_a_lone_span_has_no_gap(span: Build) -> None:
    waterfall = lay_out([span("only", ms=50)])
    assert not waterfall.gaps
    assert waterfall.rows[0].depth == 0


def test_spans_without_their_parent_stand_on_the_left(span: Build) -> None:
    waterfall = lay_out([span("a", "lost", at=0), span("b", "lost", at=1)])
    assert [row.depth for row in waterfall.rows] == [0, 0]
    assert not waterfall.is_connected


def test_a_circle_is_cut_open_and_nothing_is_lost(span: Build) -> None:
    spans = [span("root"), span("a", "b", at=1), span("b", "a", at=2), span("self", "self", at=3)]
    waterfall = lay_out(spans)
    assert {row.span.span_id for row in waterfall.rows} == {"root", "a", "b", "self"}
    assert len(waterfall.rows) == 4


def test_a_chain_may_be_deeper_than_the_interpreters_stack(span: Build) -> None:
    spans = [span(str(n), str(n - 1), at=n) for n in range(3000)]
    assert lay_out(spans).rows[-1].depth == 2999


def test_a_trace_is_whole_once_the_routers_span_is_there(span: Build) -> None:
    spans = a_request(span)
    assert is_whole(spans)
    assert not is_whole(spans[1:])
    assert not is_whole([one for one in spans if one.name != "queue"])
    assert is_whole([span("caller"), *spans])
    assert not is_whole([])


def test_one_request_of_a_shared_trace_can_be_taken_out(span: Build) -> None:
    first = a_request(span, "1", attributes={"forebay.request_id": "r-1"})
    second = a_request(span, "2", attributes={"forebay.request_id": "r-2"})
    caller = span("caller", ms=200)
    taken = of_request([caller, *first, *second], "r-2")
    assert {one.span_id for one in taken} == {one.span_id for one in second}
    assert lay_out(first).request_ids == ("r-1",)
    assert of_request(first, "r-9") == ()
