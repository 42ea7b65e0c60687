"""The one line of a log that says why a process died."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

_MODULES = re.compile(r"^(?:\w+\.)+([A-Z]\w*: )")
"""Before an exception's name."""


def reason_in(lines: Sequence[str], *, chars_max: int = 300) -> str:
    """The last thing a process said, out of its JSON record where it wrote one; may be empty."""
    for line in reversed(_without_ignored(lines)):
        text = line.strip()
        if text:
            return _plain(text)[:chars_max]
    return ""


def first_crash(logs: Iterable[Sequence[str]]) -> str:
    """The reason in the first log that ends with something else than a record, as that of a process
    does that nobody has stopped; else the one in the first log; may be empty."""
    ends = [_without_ignored(lines) for lines in logs]
    reasons = [(lines[-1].startswith("{"), reason_in(lines)) for lines in ends if lines]
    return min(reasons, key=lambda one: one[0], default=(False, ""))[1]


def _without_ignored(lines: Sequence[str]) -> Sequence[str]:
    """The lines before what Python reports of its own end, which explains nothing."""
    for start in reversed(range(len(lines))):
        if lines[start].startswith("Exception ignored in"):
            rest = [x for x in lines[start + 1 :] if not x.startswith((" ", "Traceback"))]
            return _without_ignored(lines[:start]) if len(rest) <= 1 else lines
    return lines


def _plain(text: str) -> str:
    if not text.startswith("{"):
        return _MODULES.sub(r"\1", text)
    try:
        record = json.loads(text)
    except ValueError:
        return text
    if not isinstance(record, dict):
        return text
    exception = str(record.get("exception", "")).strip()
    if exception:
        return _MODULES.sub(r"\1", exception.splitlines()[-1])
    return str(record.get("message", text))
