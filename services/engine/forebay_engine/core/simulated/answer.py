"""One choice of an answer: its tokens, its text, and why it ended.

What it grows by adds up until it is taken: a slow caller gets the same answer in fewer parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay_engine.core.simulated import language
from forebay_engine.core.simulated.planner import Emission, Finish
from forebay_engine.core.simulated.text import TextStream
from forebay_engine.core.simulated.tokenizer import END_OF_SEQUENCE, decode_token


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its rivals with natural log-probabilities, the chosen one first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class ChoiceDelta(NamedTuple):
    """What a choice grew by. A named tuple: there is one per token, and it costs a fifth."""

    choice: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: Finish | None


@dataclass(slots=True, eq=False)
class Choice:
    """A choice as it grows. `logprobs` is how many rivals are wanted; None wants none at all."""

    index: int
    seed: int
    stops: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    generated: int = 0
    finish: Finish | None = None
    _stream: TextStream = field(init=False)
    _texts: list[str] = field(default_factory=list, init=False)
    _tokens: list[int] = field(default_factory=list, init=False)
    _logprobs: list[TokenLogprob] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.stops)

    def add(self, emission: Emission) -> None:
        """Add a token. A stop text ends the choice here; its sequence must then be aborted."""
        token = emission.token
        if self.finish is not None:
            return
        if token is None:
            self.finish = emission.finish
            return
        self._tokens.append(token)
        self.generated += 1
        if self.logprobs is not None:
            self._logprobs.append(self._logprob(emission.context, token))
        if token != END_OF_SEQUENCE:
            text, stop = self._stream.push(
                decode_token(token), honour=self.generated > self.min_tokens
            )
            self._texts.append(text)
            if stop is not None:
                self.finish = Finish.STOP
                return
        if emission.finish is not None:
            self.finish = emission.finish
            self._texts.append(self._stream.finish())

    def take(self) -> ChoiceDelta:
        """Return what it grew by since the last time."""
        text = "".join(self._texts)
        delta = ChoiceDelta(self.index, text, self._tokens, self._logprobs or (), self.finish)
        self._texts, self._tokens = [], []
        if self._logprobs:
            self._logprobs = []
        return delta

    def _logprob(self, context: language.Context, token: int) -> TokenLogprob:
        ranked = language.candidates(
            context, token, seed=self.seed, count=max(1, self.logprobs or 0)
        )
        top = tuple(ranked[: self.logprobs])
        return TokenLogprob(token, ranked[0][1], top)
