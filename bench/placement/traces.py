"""Recorded traffic as requests with text: who asks when, how long, and what begins like what."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "data"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A recording, and how much of it is replayed."""

    name: str
    file: str
    block_tokens: int
    step_ms: float
    """Resolution of its timestamps; requests of one step are spread over it."""
    requests: int
    first_number: int
    """Added to the numbers of its blocks, so that no two recordings share any."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A request to send."""

    source: Source
    at_s: float
    """From the beginning."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Numbers of its blocks; prompts share their text as far as they share these."""

    def prompt(self) -> str:
        """Its text: one word of at most four letters per token."""
        text = "".join(_block(number, self.source.block_tokens) for number in self.blocks)
        return text[: _end_of(text, self.prompt_tokens)]


MOONCAKE = Source("mooncake", "mooncake_conversation_600.jsonl", 512, 3000.0, 200, 0)
SHAREGPT = Source("sharegpt", "sharegpt_300.jsonl", 16, 0.0, 200, 1 << 40)
SOURCES = (MOONCAKE, SHAREGPT)


def plan(*, rate: float, seed: int) -> list[Planned]:
    """The requests of all recordings together, their recorded arrivals stretched to so many per
    second in all."""
    length_s = sum(source.requests for source in SOURCES) / rate
    planned = [one for source in SOURCES for one in _stretched(source, length_s, seed)]
    return sorted(planned, key=lambda one: one.at_s)


def _stretched(source: Source, length_s: float, seed: int) -> list[Planned]:
    rng = random.Random(seed)
    lines = (_FOLDER / source.file).read_text().splitlines()[: source.requests]
    rows = [json.loads(line) for line in lines]
    times = sorted(row["timestamp"] + rng.uniform(0.0, source.step_ms) for row in rows)
    stretch = length_s / (times[-1] - times[0])
    return [
        Planned(
            source,
            at_s=(at - times[0]) * stretch,
            prompt_tokens=row["input_length"],
            output_tokens=max(1, row["output_length"]),
            blocks=[source.first_number + number for number in row["hash_ids"]],
        )
        for at, row in zip(times, rows, strict=True)
    ]


@functools.lru_cache(maxsize=1 << 17)
def _block(number: int, tokens: int) -> str:
    rng = random.Random(number)
    letters = "".join(rng.choices(_LETTERS, k=4 * tokens))
    # Words of two to four letters, so that text and tokens do not keep step.
    sizes = rng.choices((2, 3, 4), k=tokens)
    return "".join(f" {letters[4 * place : 4 * place + size]}" for place, size in enumerate(sizes))


def _end_of(text: str, tokens: int) -> int:
    """Where so many words end."""
    place = 0
    for _ in range(tokens):
        place = text.find(" ", place) + 1
        if place == 0:
            return len(text)
    end = text.find(" ", place)
    return len(text) if end < 0 else end
