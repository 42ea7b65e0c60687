"""One choice of an answer: its tokens, its text, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a choice grew by."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
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
    _text: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._text = TextStream(self.stops)

    def take(self, emissions: Sequence[Emission]) -> ChoiceDelta:
        """Add tokens. A stop text ends the choice here; its sequence must then be aborted."""
        text = ""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for emission in emissions:
            if self.finish is not None or emission.token is None:
                break
            token = emission.token
            tokens.append(token)
            self.generated += 1
            if self.logprobs is not None:
                logprobs.append(self._logprob(emission.context, token))
            if token != END_OF_SEQUENCE:
                delta, stop = self._text.push(
                    decode_token(token), honour=self.generated > self.min_tokens
                )
                text += delta
                if stop is not None:
                    self.finish = Finish.STOP
                    break
            if emission.finish is not None:
                self.finish = emission.finish
                text += self._text.finish()
        return ChoiceDelta(self.index, text, tuple(tokens), tuple(logprobs), self.finish)

    def _logprob(self, context: language.Context, token: int) -> TokenLogprob:
        ranked = language.candidates(
            context, token, seed=self.seed, count=max(1, self.logprobs or 0)
        )
        top = tuple(ranked[: self.logprobs])
        return TokenLogprob(token, ranked[0][1], top)
