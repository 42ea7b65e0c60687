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
class Trace:
    """A recording, and how it is replayed."""

    name: str
    file: str
    block_tokens: int
    step_ms: float
    """Resolution of its timestamps; requests of one step are spread over it."""
    copies: int
    """How often it is replayed, one after the other, each time with other texts."""
    max_sequences: int
    """Slots of each engine."""
    time_scale: float
    """How much longer everything takes than it says, so that the machine keeps up. Figures are of
    the engines' time."""
    requests: int
    """Of it are replayed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A request to send."""

    at_s: float
    """In the engines' time, from the beginning."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Numbers of its blocks; prompts share their text as far as they share these."""

    def prompt(self, block_tokens: int) -> str:
        """Its text: one word of at most four letters per token."""
        text = "".join(_block(number, block_tokens) for number in self.blocks)
        return text[: _end_of(text, self.prompt_tokens)]


MOONCAKE = Trace(
    "mooncake", "mooncake_conversation_600.jsonl", 512, 3000.0, 1, 256, 1.0, requests=420
)
SHAREGPT = Trace("sharegpt", "sharegpt_300.jsonl", 16, 0.0, 2, 16, 2.0, requests=480)
TRACES = (MOONCAKE, SHAREGPT)


def plan(trace: Trace, *, rate: float, seed: int) -> list[Planned]:
    """The trace's requests, with their recorded arrivals stretched to so many per second."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in (_FOLDER / trace.file).read_text().splitlines()]
    rows = rows[: -(-trace.requests // trace.copies)]
    times = sorted(row["timestamp"] + rng.uniform(0.0, trace.step_ms) for row in rows)
    start = times[0]
    length_s = len(rows) / rate
    stretch = length_s / (times[-1] - start)
    numbers = 1 + max(number for row in rows for number in row["hash_ids"])
    return [
        Planned(
            at_s=copy * length_s + (at - start) * stretch,
            prompt_tokens=row["input_length"],
            output_tokens=max(1, row["output_length"]),
            blocks=[copy * numbers + number for number in row["hash_ids"]],
        )
        for copy in range(trace.copies)
        for at, row in zip(times, rows, strict=True)
    ][: trace.requests]


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
