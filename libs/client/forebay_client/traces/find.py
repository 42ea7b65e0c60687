"""Waits for a trace that is still on its way into the store."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from forebay_client.traces.core.span import Span
from forebay_client.traces.core.waterfall import is_whole, of_request
from forebay_client.traces.store import SpanReader

_LOOK_INTERVAL_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait. Seconds."""

    longest_s: float = 4.0
    quiet_s: float = 0.6
    """A whole trace that did not grow for this long is complete; longer than exporters wait."""


def find(path: Path, name: str, patience: Patience | None = None) -> tuple[Span, ...]:
    """The spans of a trace or of a request, waiting until they are complete, within bounds.

    Args:
        path: the store's file.
        name: a trace id (32 hexadecimal digits), or a request id.
        patience: how long to wait.

    Returns:
        Every span that is there in the end; empty when there is none of that name.
    """
    patience = patience or Patience()
    until = time.monotonic() + patience.longest_s
    spans: tuple[Span, ...] = ()
    grew_s = time.monotonic()
    while True:
        found = _read(path, name)
        now = time.monotonic()
        if len(found) != len(spans):
            spans, grew_s = found, now
        settled = bool(spans) and _is_settled(spans, now - grew_s, patience)
        if settled or now >= until:
            return spans
        time.sleep(_LOOK_INTERVAL_S)


def _read(path: Path, name: str) -> tuple[Span, ...]:
    try:
        reader = SpanReader(path)
    except FileNotFoundError:
        return ()
    try:
        trace_id = reader.trace_of(name)
        if trace_id is None:
            return ()
        spans = reader.spans(trace_id)
    finally:
        reader.close()
    return spans if trace_id == name.lower() else of_request(spans, name)


def _is_settled(spans: tuple[Span, ...], since_growth_s: float, patience: Patience) -> bool:
    ended_s_ago = time.time() - max(span.end_unix_ns for span in spans) / 1e9
    # What ended long ago has been exported long ago, or never will be.
    if ended_s_ago > patience.longest_s:
        return True
    return is_whole(spans) and since_growth_s >= patience.quiet_s
