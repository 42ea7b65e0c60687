"""Where a stretch of time lies on an axis of whole characters."""

from __future__ import annotations


def bar(offset_ms: float, duration_ms: float, total_ms: float, *, width: int) -> tuple[int, int]:
    """First character and length of a bar. Even the shortest is one long and lies on the axis."""
    if total_ms <= 0 or width <= 1:
        return 0, max(1, width)
    start = min(width - 1, max(0, int(offset_ms / total_ms * width)))
    end = round((offset_ms + duration_ms) / total_ms * width)
    return start, max(1, min(end, width) - start)
