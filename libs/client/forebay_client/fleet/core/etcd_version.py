"""Which etcd may be trusted with what.

3.4.22 and 3.5.6 are the first releases without known faults that lose or corrupt what was written;
3.5.0 to 3.5.2 can lose consistency when killed under load.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TypeAlias

Version: TypeAlias = tuple[int, int, int]


class Verdict(StrEnum):
    """What a version is good for."""

    SOUND = "sound"
    FAULTY = "faulty"
    """Only for a throw-away run, with a warning."""
    TOO_OLD = "too old"
    """Its API lacks what Forebay needs, or nobody maintains it."""


def parse(output: str) -> Version | None:
    """Read what `etcd --version` prints; None when it is something else."""
    found = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", output)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def judge(version: Version) -> Verdict:
    """What a version is good for."""
    if version < (3, 4, 0):
        return Verdict.TOO_OLD
    if version < (3, 4, 22) or (3, 5, 0) <= version < (3, 5, 6):
        return Verdict.FAULTY
    return Verdict.SOUND


def show(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))
