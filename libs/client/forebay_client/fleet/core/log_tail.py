"""The one line of a log that says why a process died."""

from __future__ import annotations

import json
from collections.abc import Sequence


def reason_in(lines: Sequence[str], *, chars_max: int = 300) -> str:
    """The last thing a process said, out of its JSON record where it wrote one; may be empty."""
    for line in reversed(lines):
        text = line.strip()
        if text:
            return _plain(text)[:chars_max]
    return ""


def _plain(text: str) -> str:
    if not text.startswith("{"):
        return text
    try:
        record = json.loads(text)
    except ValueError:
        return text
    if not isinstance(record, dict):
        return text
    exception = str(record.get("exception", "")).strip()
    return exception.splitlines()[-1] if exception else str(record.get("message", text))
