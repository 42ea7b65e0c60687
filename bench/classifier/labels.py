"""Questions of which is known whether a small and a large model answer them right."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

_FILE = Path(__file__).parents[1] / "data" / "routing_labels.jsonl"
_HELD_OF_TEN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One question."""

    source: str
    prompt: str
    small_ok: bool
    large_ok: bool

    @property
    def needs_large(self) -> bool:
        """Whether the small model loses what the large one has."""
        return self.large_ok and not self.small_ok

    @property
    def is_held(self) -> bool:
        """Whether no training may see it: by a hash of its text, so that it stays that way."""
        digest = hashlib.blake2b(self.prompt.encode(), digest_size=2).digest()
        return digest[0] % 10 < _HELD_OF_TEN


def read() -> list[Row]:
    """All rows."""
    return [Row(**json.loads(line)) for line in _FILE.read_text().splitlines()]


def kept(rows: Sequence[Row], scores: Sequence[float], share: float) -> float:
    """Right answers over those of the large model alone, when the share of the rows with the lowest
    scores goes to the small one."""
    order = sorted(range(len(rows)), key=scores.__getitem__)
    small = round(share * len(rows))
    right = sum(rows[index].small_ok for index in order[:small])
    right += sum(rows[index].large_ok for index in order[small:])
    return right / sum(row.large_ok for row in rows)
