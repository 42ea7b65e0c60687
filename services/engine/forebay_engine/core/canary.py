"""Does a loaded model still give the answer it gave when it was first loaded here?

Generated tokens must be the same, greedily chosen. A vector may differ by rounding: its cosine with
the recorded one must be at least 0.999.
"""

import math
from collections.abc import Sequence

import msgspec

PROMPT = "The quick brown fox jumps over the lazy dog, and then"
TOKENS = 8
_LEAST_COSINE = 0.999


class Canary(msgspec.Struct, frozen=True):
    """An answer to the canary prompt: tokens of a text model, or a vector."""

    tokens: tuple[int, ...] = ()
    vector: tuple[float, ...] = ()


def is_answer(canary: Canary) -> bool:
    """Say whether there is an answer at all, and no NaN in it."""
    return bool(canary.tokens) or (bool(canary.vector) and all(map(math.isfinite, canary.vector)))


def agrees(recorded: Canary, answered: Canary) -> bool:
    """Say whether an answer is the recorded one."""
    if recorded.vector:
        return _cosine(recorded.vector, answered.vector) >= _LEAST_COSINE
    return recorded.tokens == answered.tokens


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return 0.0
    norms = sum(value * value for value in one) * sum(value * value for value in other)
    if norms <= 0:
        return 0.0
    return float(sum(a * b for a, b in zip(one, other, strict=True)) / norms**0.5)
