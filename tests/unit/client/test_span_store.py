"""What the span store keeps and what it drops. SQLite in memory's place is a file of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forebay_client.traces.core.span import Event, Span
from forebay_client.traces.store import Bounds, SpanReader, SpanWriter

Build = Callable[..., Span]


class _Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: list[SpanReader | SpanWriter] = []

    def writer(self, **bounds: float) -> SpanWriter:
        writer = SpanWriter(self.path, Bounds(**bounds))  # type: ignore[arg-type]
        self._open.append(writer)
        return writer

    def reader(self) -> SpanReader:
        reader = SpanReader(self.path)
        self._open.append(reader)
        return reader

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[_Store]:
    store = _Store(tmp_path / "spans.db")
    yield store
    store.close()


def test_a_span_comes_back_as_it_was(store: _Store, span: Build) -> None:
    kept = span(
        "b" * 16,
        failed=True,
        message="why",
        attributes={"forebay.request_id": "r-1", "n": 3, "reasons": ("stop", "length")},
        events=(Event("first", 5, {"ok": True}),),
    )
    assert store.writer().add([kept], now_unix_s=1.0) == 1
    reader = store.reader()
    assert reader.trace_of("r-1") == kept.trace_id
    assert reader.trace_of(kept.trace_id.upper()) == kept.trace_id
    assert reader.trace_of("r-2") is None
    assert reader.spans(kept.trace_id) == (kept,)


def test_a_span_that_arrives_twice_counts_once(store: _Store, span: Build) -> None:
    writer = store.writer()
    writer.add([span("a")], now_unix_s=1.0)
    assert writer.add([span("a"), span("b")], now_unix_s=1.0) == 1
    assert writer.spans == 2


def test_whole_traces_go_oldest_first(store: _Store, span: Build) -> None:
    writer = store.writer(spans_max=4)
    for number, trace in enumerate("abc"):
        spans = [
            span("1", trace_id=trace, attributes={"forebay.request_id": f"r-{trace}"}),
            span("2", trace_id=trace),
        ]
        writer.add(spans, now_unix_s=float(number))
    reader = store.reader()
    assert writer.spans == 4
    assert reader.spans("a") == ()
    assert reader.trace_of("r-a") is None
    assert len(reader.spans("b")) == len(reader.spans("c")) == 2


def test_a_trace_that_still_grows_is_not_the_oldest(store: _Store, span: Build) -> None:
    writer = store.writer(spans_max=3)
    writer.add([span("1", trace_id="a")], now_unix_s=0.0)
    writer.add([span("1", trace_id="b")], now_unix_s=1.0)
    writer.add([span("2", trace_id="a")], now_unix_s=2.0)
    writer.add([span("1", trace_id="c")], now_unix_s=3.0)
    reader = store.reader()
    assert reader.spans("b") == ()
    assert len(reader.spans("a")) == 2


def test_bytes_and_age_are_bounds_too(store: _Store, span: Build) -> None:
    writer = store.writer(bytes_max=3000, age_s_max=60)
    for number in range(20):
        writer.add(
            [span("1", trace_id=str(number), attributes={"text": "x" * 500})], now_unix_s=number
        )
        assert writer.bytes <= 3000
    assert 0 < writer.spans < 6
    writer.add([span("1", trace_id="late")], now_unix_s=1000.0)
    assert writer.spans == 1


def test_one_trace_cannot_fill_the_store(store: _Store, span: Build) -> None:
    writer = store.writer(spans_per_trace_max=5)
    assert writer.add([span(str(n)) for n in range(9)], now_unix_s=1.0) == 5


def test_what_is_held_is_counted_again_after_a_restart(store: _Store, span: Build) -> None:
    first = store.writer()
    first.add([span("a"), span("b")], now_unix_s=1.0)
    again = store.writer()
    assert (again.spans, again.bytes) == (first.spans, first.bytes)


def test_the_newest_traces_are_listed_first(store: _Store, span: Build) -> None:
    writer = store.writer()
    for number, trace in enumerate("abc"):
        attributes = {"forebay.request_id": f"r-{trace}"}
        writer.add([span("1", trace_id=trace, at=number, attributes=attributes)], now_unix_s=1.0)
    assert [one.request_id for one in store.reader().newest(2)] == ["r-c", "r-b"]


def test_there_may_be_no_store(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SpanReader(tmp_path / "none.db")
