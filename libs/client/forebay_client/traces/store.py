"""Spans in one SQLite file, bounded by number, bytes and age.

One process writes; any may read at the same time (write-ahead log). Whole traces are dropped, the
one that grew longest ago first, so that what is shown is never half a trace.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forebay_client.traces.core.span import Event, Span, Value

_SCHEMA = """
CREATE TABLE IF NOT EXISTS traces (
  trace_id TEXT PRIMARY KEY, updated_unix_s REAL NOT NULL, start_unix_ns INTEGER NOT NULL,
  spans INTEGER NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS traces_by_age ON traces (updated_unix_s);
CREATE TABLE IF NOT EXISTS spans (
  trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT NOT NULL, name TEXT NOT NULL,
  service TEXT NOT NULL, instance TEXT NOT NULL,
  start_unix_ns INTEGER NOT NULL, end_unix_ns INTEGER NOT NULL,
  failed INTEGER NOT NULL, message TEXT NOT NULL, attributes TEXT NOT NULL, events TEXT NOT NULL,
  PRIMARY KEY (trace_id, span_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
  request_id TEXT NOT NULL, trace_id TEXT NOT NULL, PRIMARY KEY (request_id, trace_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_trace ON requests (trace_id);
"""
_SPAN_COLUMNS = (
    "trace_id, span_id, parent_id, name, service, instance, start_unix_ns, end_unix_ns, failed, "
    "message, attributes, events"
)
_ROW_BYTES = 150
"""What a row takes beside its texts, roughly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept; each must be above 0."""

    spans_max: int = 200_000
    bytes_max: int = 128 << 20
    """Of span contents; the file takes about half as much again."""
    age_s_max: float = 24 * 3600
    spans_per_trace_max: int = 2_000
    """Further spans of a trace are dropped."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSummary:
    """One line about a trace."""

    trace_id: str
    request_id: str
    start_unix_ns: int
    spans: int


class SpanWriter:
    """The one writer. Its methods must not overlap; they may come from any thread."""

    def __init__(self, path: Path, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        # A lost second of traces after a power cut is fine; a sync per export is not.
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(f"PRAGMA journal_size_limit={16 << 20}")
        self._db.executescript(_SCHEMA)
        self.spans, self.bytes = self._db.execute(
            "SELECT COALESCE(SUM(spans), 0), COALESCE(SUM(bytes), 0) FROM traces"
        ).fetchone()

    def add(self, spans: Iterable[Span], *, now_unix_s: float) -> int:
        """Keep spans, drop what is over the bounds; returns how many were new."""
        added = 0
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for span in spans:
                added += self._insert(span, now_unix_s)
            self._evict(now_unix_s)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        return added

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _insert(self, span: Span, now_unix_s: float) -> bool:
        held = self._db.execute(
            "SELECT spans FROM traces WHERE trace_id = ?", (span.trace_id,)
        ).fetchone()
        if held is not None and held[0] >= self._bounds.spans_per_trace_max:
            return False
        row = _row_of(span)
        inserted = self._db.execute(
            f"INSERT OR IGNORE INTO spans ({_SPAN_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",  # noqa: S608 - constant columns
            row,
        ).rowcount
        if not inserted:
            return False
        size = _ROW_BYTES + sum(len(cell.encode()) for cell in row if isinstance(cell, str))
        self._db.execute(
            "INSERT INTO traces VALUES (?, ?, ?, 1, ?) ON CONFLICT (trace_id) DO UPDATE SET "
            "updated_unix_s = excluded.updated_unix_s, spans = spans + 1, "
            "start_unix_ns = MIN(start_unix_ns, excluded.start_unix_ns), "
            "bytes = bytes + excluded.bytes",
            (span.trace_id, now_unix_s, span.start_unix_ns, size),
        )
        if span.request_id:
            self._db.execute(
                "INSERT OR IGNORE INTO requests VALUES (?, ?)", (span.request_id, span.trace_id)
            )
        self.spans += 1
        self.bytes += size
        return True

    def _evict(self, now_unix_s: float) -> None:
        while True:
            oldest = self._db.execute(
                "SELECT trace_id, updated_unix_s, spans, bytes FROM traces "
                "ORDER BY updated_unix_s, start_unix_ns LIMIT 1"
            ).fetchone()
            if oldest is None:
                return
            trace_id, updated_unix_s, spans, size = oldest
            if (
                self.spans <= self._bounds.spans_max
                and self.bytes <= self._bounds.bytes_max
                and now_unix_s - updated_unix_s <= self._bounds.age_s_max
            ):
                return
            for table in ("spans", "requests", "traces"):
                self._db.execute(f"DELETE FROM {table} WHERE trace_id = ?", (trace_id,))  # noqa: S608 - constant names
            self.spans -= spans
            self.bytes -= size


class SpanReader:
    """Reads a store that another process may be writing."""

    def __init__(self, path: Path) -> None:
        """Open the file. FileNotFoundError when there is none."""
        if not path.exists():
            raise FileNotFoundError(path)
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0)

    def trace_of(self, name: str) -> str | None:
        """The trace that a trace id or a request id names; the newest one of a request."""
        found = self._db.execute(
            "SELECT trace_id FROM traces WHERE trace_id = ?", (name.lower(),)
        ).fetchone()
        if found is None:
            found = self._db.execute(
                "SELECT trace_id FROM requests JOIN traces USING (trace_id) WHERE request_id = ? "
                "ORDER BY start_unix_ns DESC LIMIT 1",
                (name,),
            ).fetchone()
        return None if found is None else str(found[0])

    def spans(self, trace_id: str) -> tuple[Span, ...]:
        """Every span of a trace, by start; empty when it is not kept."""
        rows = self._db.execute(
            f"SELECT {_SPAN_COLUMNS} FROM spans WHERE trace_id = ? ORDER BY start_unix_ns",  # noqa: S608 - constant columns
            (trace_id,),
        )
        return tuple(_span_of(row) for row in rows)

    def newest(self, count: int) -> tuple[TraceSummary, ...]:
        """The traces that began last, newest first."""
        rows = self._db.execute(
            "SELECT trace_id, COALESCE((SELECT MIN(request_id) FROM requests AS r "
            "WHERE r.trace_id = t.trace_id), ''), start_unix_ns, spans FROM traces AS t "
            "ORDER BY start_unix_ns DESC LIMIT ?",
            (count,),
        )
        return tuple(TraceSummary(*row) for row in rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _row_of(span: Span) -> tuple[Any, ...]:
    events = [[event.name, event.time_unix_ns, dict(event.attributes)] for event in span.events]
    return (
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.name,
        span.service,
        span.instance,
        # SQLite's integers are signed; a clock that is 290 years ahead is nobody's.
        min(span.start_unix_ns, (1 << 63) - 1),
        min(span.end_unix_ns, (1 << 63) - 1),
        int(span.failed),
        span.message,
        json.dumps(dict(span.attributes), ensure_ascii=False),
        json.dumps(events, ensure_ascii=False),
    )


def _span_of(row: tuple[Any, ...]) -> Span:
    trace_id, span_id, parent_id, name, service, instance, start, end = row[:8]
    failed, message, attributes, events = row[8:]
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        service=service,
        instance=instance,
        start_unix_ns=start,
        end_unix_ns=end,
        failed=bool(failed),
        message=message,
        attributes=_attributes_of(json.loads(attributes)),
        events=tuple(
            Event(event, time_unix_ns, _attributes_of(values))
            for event, time_unix_ns, values in json.loads(events)
        ),
    )


def _attributes_of(values: Mapping[str, Any]) -> dict[str, Value]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
