"""What a request asks for, once it has been checked. Nothing downstream checks it again."""

from __future__ import annotations

import dataclasses

MAX_MODEL_CHARS = 200
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_INPUTS = 2048
_CHARS_PER_TOKEN = 4


@dataclasses.dataclass(slots=True, eq=False)
class Wanted:
    """A checked request. Not frozen: every request makes one, in a third of the time."""

    model: str
    operation: str
    """As the attribute `gen_ai.operation.name` has it."""
    prompt_tokens: int
    """Estimated where the prompt is text."""


def estimate_tokens(characters: int) -> int:
    """Tokens of a text, by the usual four characters each; no tokenizer is at hand here."""
    return characters // _CHARS_PER_TOKEN + 1
