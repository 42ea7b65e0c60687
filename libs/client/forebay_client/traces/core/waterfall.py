"""Lays the spans of one trace out as a tree on a common time axis.

A *gap* is time in which only spans that wait for others are open (the roots, and the router's):
the request is between two hops then, and nobody works on it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from forebay_client.traces.core.span import Span

ENTRY = "router"
"""Name of the first span of a request in the fleet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One span in its place."""

    span: Span
    depth: int
    """0 for a span whose parent is not in the trace."""
    last: bool
    """No sibling follows."""
    offset_ms: float
    """From the trace's start."""
    lines: tuple[bool, ...]
    """Per ancestor but the root: whether siblings of it follow further down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Time between two spans in which nobody works on the request."""

    after: str
    """Name of the span that ended before it; empty at the start."""
    before: str
    """Name of the span that starts after it; empty at the end."""
    offset_ms: float
    duration_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Waterfall:
    """One trace, top to bottom in the order it happened."""

    trace_id: str
    request_ids: tuple[str, ...]
    start_unix_ns: int
    duration_ms: float
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]

    @property
    def is_connected(self) -> bool:
        """Whether one span is above all others."""
        return sum(row.depth == 0 for row in self.rows) == 1


def lay_out(spans: Iterable[Span], *, gap_ms_min: float = 1.0) -> Waterfall:
    """Arrange the spans of one trace.

    Args:
        spans: at least one, all of one trace, in any order. Parents may be missing.
        gap_ms_min: shorter gaps are not reported.
    """
    ordered = sorted(spans, key=lambda span: (span.start_unix_ns, -span.end_unix_ns, span.span_id))
    assert ordered, "a trace has at least one span"
    start = ordered[0].start_unix_ns
    end = max(span.end_unix_ns for span in ordered)
    roots, children = _tree(ordered)
    return Waterfall(
        trace_id=ordered[0].trace_id,
        request_ids=tuple(dict.fromkeys(s.request_id for s in ordered if s.request_id)),
        start_unix_ns=start,
        duration_ms=(end - start) / 1e6,
        rows=tuple(_rows(roots, children, start)),
        gaps=tuple(_gaps(ordered, roots, children, gap_ms_min)),
    )


def of_request(spans: Iterable[Span], request_id: str) -> tuple[Span, ...]:
    """The spans of one request: those that name it, and everything below them.

    A caller's trace may hold many requests, and its own spans.
    """
    ordered = sorted(spans, key=lambda span: span.start_unix_ns)
    _, children = _tree(ordered)
    kept: dict[str, Span] = {}
    stack = [span for span in ordered if span.request_id == request_id]
    while stack:
        span = stack.pop()
        if span.span_id not in kept:
            kept[span.span_id] = span
            stack.extend(children.get(span.span_id, []))
    return tuple(kept.values())


def is_whole(spans: Sequence[Span]) -> bool:
    """Whether nothing above any span is missing, save what the caller keeps of its own trace.

    Hops export by themselves, so a span may arrive before the one above it.
    """
    roots, _ = _tree(spans)
    return bool(roots) and all(root.name == ENTRY or not root.parent_id for root in roots)


def _tree(ordered: Sequence[Span]) -> tuple[list[Span], Mapping[str, list[Span]]]:
    by_id = {span.span_id: span for span in ordered}
    children: dict[str, list[Span]] = defaultdict(list)
    roots = []
    for span in ordered:
        if span.parent_id in by_id:
            children[span.parent_id].append(span)
        else:
            roots.append(span)
    reached: set[str] = set()
    _reach(roots, children, reached)
    for span in ordered:
        # A broken producer may close a circle, which no root reaches: it is cut open here.
        if span.span_id not in reached:
            children[span.parent_id].remove(span)
            roots.append(span)
            _reach([span], children, reached)
    return roots, {parent: below for parent, below in children.items() if below}


def _reach(roots: Iterable[Span], children: Mapping[str, list[Span]], reached: set[str]) -> None:
    stack = list(roots)
    while stack:
        span = stack.pop()
        if span.span_id not in reached:
            reached.add(span.span_id)
            stack.extend(children.get(span.span_id, ()))


def _rows(
    roots: Sequence[Span], children: Mapping[str, list[Span]], start_ns: int
) -> Iterator[Row]:
    # An explicit stack: a trace may be deeper than Python's own.
    stack = [Row(root, 0, root is roots[-1], 0.0, ()) for root in reversed(roots)]
    while stack:
        row = stack.pop()
        yield dataclasses.replace(row, offset_ms=(row.span.start_unix_ns - start_ns) / 1e6)
        below = children.get(row.span.span_id, [])
        lines = (*row.lines, not row.last) if row.depth else ()
        stack.extend(
            Row(child, row.depth + 1, child is below[-1], 0.0, lines) for child in reversed(below)
        )


def _gaps(
    ordered: Sequence[Span],
    roots: Sequence[Span],
    children: Mapping[str, list[Span]],
    gap_ms_min: float,
) -> Iterator[Gap]:
    start = ordered[0].start_unix_ns
    end = max(span.end_unix_ns for span in ordered)
    waiting = {span.span_id for span in (*roots, *(s for s in ordered if s.name == ENTRY))}
    reached, after = start, ""
    for span in ordered:
        if span.span_id in waiting and span.span_id in children:
            continue
        gap_ms = (span.start_unix_ns - reached) / 1e6
        if gap_ms >= gap_ms_min:
            yield Gap(after, span.name, (reached - start) / 1e6, gap_ms)
        if span.end_unix_ns >= reached:
            reached, after = span.end_unix_ns, span.name
    if (end - reached) / 1e6 >= gap_ms_min:
        yield Gap(after, "", (reached - start) / 1e6, (end - reached) / 1e6)
