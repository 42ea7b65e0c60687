"""How long answers are that no request bounds, learned by model; and what a request will cost.

A reservation is the prompt's estimate and the most that may be generated. Where a request names no
such bound, twice the mean of the model's recent answers is reserved: what is too much comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay_common.metadata import Usage

from forebay_router.core.meter import Meter

_WEIGHT = 0.05
_ROOM = 2.0


class OutputGuess:
    """Mean lengths of answers, in tokens."""

    def __init__(self, *, default: int, most: int = 1024) -> None:
        """
        Args:
            default: tokens of an answer of a model that has not answered yet.
            most: models remembered; the oldest is forgotten.
        """
        self._default = default
        self._most = most
        self._means: dict[str, float] = {}

    def expected(self, model: str) -> int:
        """Tokens to reserve for one answer."""
        mean = self._means.get(model)
        return self._default if mean is None else int(mean * _ROOM) + 1

    def learn(self, model: str, tokens: int) -> None:
        """An answer that no bound cut short had so many tokens."""
        mean = self._means.get(model)
        if mean is None:
            while len(self._means) >= self._most:
                del self._means[next(iter(self._means))]
            self._means[model] = float(tokens)
        else:
            self._means[model] = mean + _WEIGHT * (tokens - mean)


def estimate(
    prompt_tokens: int, answers: int, max_tokens: int | None, guess: int, meters: Sequence[Meter]
) -> int:
    """Tokens to reserve. A guess never makes a request larger than a bucket holds."""
    if max_tokens is not None:
        return prompt_tokens + answers * max_tokens
    wanted = prompt_tokens + answers * guess
    for meter in meters:
        if meter.token_burst < wanted:
            wanted = max(prompt_tokens, int(meter.token_burst))
    return wanted


def used_tokens(usage: Usage | None, prompt_tokens: int, messages: int) -> int:
    """Tokens that a request which was sent has cost.

    Args:
        usage: what its runner counted, where it told.
        prompt_tokens: the estimate, where it did not.
        messages: of the answer: each holds a token at least.
    """
    if usage is not None:
        return usage.prompt_tokens + usage.completion_tokens
    return prompt_tokens + messages
