"""Shows a trace: as a waterfall in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from forebay_client.traces.core.bars import bar
from forebay_client.traces.core.span import Span, Value
from forebay_client.traces.core.waterfall import Gap, Row, Waterfall

_COLOURS = {
    "router": "cyan",
    "place": "blue",
    "queue": "yellow",
    "generate": "green",
    "embed": "green",
    "prefill": "magenta",
    "decode": "bright_green",
}
_NOTES = (
    ("forebay.replica", "{}"),
    ("forebay.model_version", "{}"),
    ("gen_ai.response.model", "{}"),
    ("forebay.class", "{}"),
    ("gen_ai.usage.input_tokens", "{} in"),
    ("gen_ai.usage.cache_read.input_tokens", "{} cached"),
    ("gen_ai.usage.output_tokens", "{} out"),
    ("gen_ai.response.finish_reasons", "{}"),
    ("forebay.attempts", "{} attempts"),
    ("error.type", "{}"),
)
_UNINTERESTING = {("forebay.attempts", 1), ("gen_ai.usage.cache_read.input_tokens", 0)}


def render(waterfall: Waterfall) -> RenderableType:
    """The waterfall, as wide as the terminal."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim", expand=True)
    table.add_column("span", no_wrap=True)
    table.add_column("", ratio=1, min_width=16)
    table.add_column("start ms", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", ratio=1)
    for row in waterfall.rows:
        span = row.span
        table.add_row(
            _name(row),
            _Bar(row, waterfall.duration_ms),
            f"{row.offset_ms:.1f}",
            f"{span.duration_ms:.1f}",
            Text(_notes(span), style="red" if span.failed else "dim"),
        )
    parts: list[RenderableType] = [_title(waterfall), table]
    if waterfall.gaps:
        parts.append(Text("between hops: " + ", ".join(map(_gap, waterfall.gaps)), style="dim"))
    return Group(*parts)


def to_json(waterfall: Waterfall) -> dict[str, Any]:
    """The same for programs. Milliseconds count from the trace's start."""
    return {
        "trace_id": waterfall.trace_id,
        "request_ids": list(waterfall.request_ids),
        "start_unix_ns": waterfall.start_unix_ns,
        "duration_ms": waterfall.duration_ms,
        "connected": waterfall.is_connected,
        "spans": [_row_json(row) for row in waterfall.rows],
        "gaps": [
            {
                "after": gap.after,
                "before": gap.before,
                "offset_ms": gap.offset_ms,
                "duration_ms": gap.duration_ms,
            }
            for gap in waterfall.gaps
        ],
    }


class _Bar:
    """A span's stretch of the time axis, drawn to whatever width the column gets."""

    def __init__(self, row: Row, total_ms: float) -> None:
        self._row = row
        self._total_ms = total_ms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        start, length = bar(
            self._row.offset_ms, self._row.span.duration_ms, self._total_ms, width=width
        )
        colour = "red" if self._row.span.failed else _COLOURS.get(self._row.span.name, "white")
        block = "#" if options.ascii_only else "━"
        yield Segment(" " * start)
        yield Segment(block * length, Style(color=colour))
        yield Segment(" " * (width - start - length))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


def _title(waterfall: Waterfall) -> Text:
    ids = ", ".join(waterfall.request_ids[:3]) or "no request id"
    more = len(waterfall.request_ids) - 3
    title = Text(f"trace {waterfall.trace_id}  ", style="bold")
    title.append(ids + (f" and {more} more" if more > 0 else ""), style="not bold")
    title.append(f"  {waterfall.duration_ms:.1f} ms", style="not bold")
    return title


def _name(row: Row) -> Text:
    lead = "".join("│ " if follows else "  " for follows in row.lines)
    branch = ("└ " if row.last else "├ ") if row.depth else ""
    name = Text(lead + branch, style="dim")
    name.append(row.span.name, style="not dim " + ("red" if row.span.failed else "bold"))
    name.append(f" {row.span.service.removeprefix('forebay-')}", style="dim")
    return name


def _notes(span: Span) -> str:
    notes = [
        pattern.format(_plain(span.attributes[key]))
        for key, pattern in _NOTES
        if key in span.attributes and (key, span.attributes[key]) not in _UNINTERESTING
    ]
    return " · ".join(dict.fromkeys(notes)) + (f" · {span.message}" if span.message else "")


def _plain(value: Value) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _gap(gap: Gap) -> str:
    return f"{gap.after or 'start'} → {gap.before or 'end'} {gap.duration_ms:.1f} ms"


def _row_json(row: Row) -> dict[str, Any]:
    span = row.span
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "depth": row.depth,
        "service": span.service,
        "instance": span.instance,
        "offset_ms": row.offset_ms,
        "duration_ms": span.duration_ms,
        "failed": span.failed,
        "message": span.message,
        "attributes": _plain_map(span.attributes),
        "events": [
            {
                "name": event.name,
                "time_unix_ns": event.time_unix_ns,
                "attributes": _plain_map(event.attributes),
            }
            for event in span.events
        ],
    }


def _plain_map(values: Mapping[str, Value]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
