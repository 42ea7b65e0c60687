"""Has the engine say an answer again from its beginning, of which a caller has the first part.

Prefill: prompt and delivered tokens are the prompt, and the delivered ones are told with the first
result, as if generated. It is fast, and right where the next token depends on the tokens before it
alone. Otherwise, replay: the engine generates the delivered tokens once more, forced.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from forebay_common.errors import ForebayError, Reason
from vllm.utils.async_utils import merge_async_iterators

from forebay_engine.runner.backend import Mode, Resumption
from forebay_engine.runner.vllm.forced import FORCED

# Sampling options whose state a prefill does not restore, and their values that need none.
_STATELESS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n", (1,)),
    ("presence_penalty", (0, None)),
    ("frequency_penalty", (0, None)),
    ("repetition_penalty", (1, None)),
    ("min_tokens", (0, None)),
    ("stop", ([], None)),
    ("logprobs", (None,)),
    ("prompt_logprobs", (None,)),
    ("bad_words", ([], None)),
    ("structured_outputs", (None,)),
    ("thinking_token_budget", (None,)),
    ("repetition_detection", (None,)),
    ("detokenize", (True,)),
)
_INTERNAL = frozenset({FORCED, "kv_cache_report_mode"})
_GREEDY_BELOW = 1e-5
_INCOMPLETE = "\ufffd"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request of the engine: the arguments of `AsyncLLM.generate`."""

    prompt: Any
    params: Any
    request_id: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def results(self, engine: Any) -> AsyncGenerator[Any, None]:
        """Return the engine's results."""
        outputs: AsyncGenerator[Any, None] = engine.generate(
            self.prompt, self.params, self.request_id, **self.options
        )
        return outputs


def take_up(
    engine: Any, resumption: Resumption, asked: Asked, *, first: int
) -> AsyncGenerator[Any, None]:
    """Return the results of one request of a call that is taken up, from its first token.

    Args:
        first: the choice that the request's first one is, among the call's.

    Raises:
        ForebayError: UNSUPPORTED, INVALID_ARGUMENT.
    """
    params = asked.params
    choices = [list(resumption.tokens.get(first + n, ())) for n in range(params.n)]
    _check_vocabulary(engine, choices)
    text = resumption.texts.get(first, "")
    mode = Mode.PREFILL
    if any(choices):
        mode = _choose_mode(engine, resumption, asked, choices, text)
    resumption.mode = Mode.REPLAY if resumption.mode is Mode.REPLAY else mode
    if not any(choices):
        return asked.results(engine)
    if mode is Mode.PREFILL:
        return _prefill(engine, asked, choices[0], text)
    if params.n == 1:
        return dataclasses.replace(asked, params=_forced(params, choices[0])).results(engine)
    return _replay_choices(engine, asked, choices)


def without_internals(params: Any) -> Any:
    """Return sampling options without what is not for callers to say, though they may set it:
    tokens that are forced, and blocks of the cache that are told twice."""
    extra = getattr(params, "extra_args", None)
    if not extra or extra.keys().isdisjoint(_INTERNAL):
        return params
    cleaned = params.clone()
    cleaned.extra_args = {k: v for k, v in extra.items() if k not in _INTERNAL}
    return cleaned


def _choose_mode(
    engine: Any, resumption: Resumption, asked: Asked, choices: Sequence[list[int]], text: str
) -> Mode:
    prompt, params = asked.prompt, asked.params
    if resumption.asked is Mode.REPLAY:
        return Mode.REPLAY
    can = (
        params.n == 1
        and isinstance(prompt, dict)
        and prompt.get("type") == "token"
        and len(choices[0]) < params.max_tokens
    )
    if resumption.asked is Mode.PREFILL:
        if not can:
            raise ForebayError(
                Reason.UNSUPPORTED, "This answer cannot be resumed by prefill.", param="resume"
            )
        return Mode.PREFILL
    is_seeded = params.seed is not None and params.temperature >= _GREEDY_BELOW
    is_stateless = not is_seeded and all(
        getattr(params, name, None) in values for name, values in _STATELESS
    )
    if can and is_stateless and resumption.is_plain and _says(engine, params, choices[0], text):
        return Mode.PREFILL
    return Mode.REPLAY


def _says(engine: Any, params: Any, tokens: Sequence[int], text: str) -> bool:
    """Say whether these tokens are exactly this text, with no end and no half character in it."""
    tokenizer = engine.get_tokenizer()
    if tokens[-1] in tokenizer.all_special_ids or tokens[-1] in (params.stop_token_ids or ()):
        return False
    said: str = tokenizer.decode(
        tokens, skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return said == text and not said.endswith(_INCOMPLETE)


async def _prefill(
    engine: Any, asked: Asked, delivered: list[int], text: str
) -> AsyncGenerator[Any, None]:
    prompt_ids = asked.prompt["prompt_token_ids"]
    longer = {**asked.prompt, "prompt_token_ids": [*prompt_ids, *delivered]}
    # These two are of the shorter prompt.
    longer.pop("prompt", None)
    longer.pop("prompt_token_offsets", None)
    rest = asked.params.clone()
    rest.max_tokens -= len(delivered)
    rest.min_tokens = max(0, rest.min_tokens - len(delivered))
    begun = False
    outputs = dataclasses.replace(asked, prompt=longer, params=rest).results(engine)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            output.prompt_token_ids = prompt_ids
            if not begun:
                begun = True
                output.num_cached_tokens = min(output.num_cached_tokens or 0, len(prompt_ids))
                (completion,) = output.outputs
                completion.token_ids = [*delivered, *completion.token_ids]
                completion.text = text + completion.text
            yield output


async def _replay_choices(
    engine: Any, asked: Asked, choices: Sequence[list[int]]
) -> AsyncGenerator[Any, None]:
    """Generate each choice as a request of its own: the choices of one share what forces them."""
    streams = [
        dataclasses.replace(
            asked,
            params=_choice_of(asked.params, index, forced),
            request_id=f"{asked.request_id}-{index}",
        ).results(engine)
        for index, forced in enumerate(choices)
    ]
    merged = merge_async_iterators(*streams)
    async with contextlib.aclosing(merged):
        async for index, output in merged:
            for completion in output.outputs:
                completion.index = index
            yield output


def _choice_of(params: Any, index: int, forced: list[int]) -> Any:
    """Return the options of one choice, as vLLM itself makes them of those of several."""
    choice = _forced(params, forced)
    choice.n = 1
    if choice.seed is not None:
        choice.seed += index
    return choice


def _forced(params: Any, tokens: list[int]) -> Any:
    forced = params.clone()
    if tokens:
        forced.extra_args = {**(params.extra_args or {}), FORCED: tokens}
    return forced


def _check_vocabulary(engine: Any, choices: Sequence[Sequence[int]]) -> None:
    # The engine would die of an index that is out of range.
    size = engine.model_config.get_vocab_size()
    if any(token >= size for tokens in choices for token in tokens):
        raise ForebayError(
            Reason.INVALID_ARGUMENT,
            "'resume' has a token id outside the vocabulary.",
            param="resume",
        )
