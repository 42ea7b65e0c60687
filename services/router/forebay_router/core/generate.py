"""Checks the messages of Generate and Embed against the ranges that their contract names, and the
bounds on what a caller can make large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from forebay.inference.v1.inference_service_pb2 import (
    ChatMessage,
    EmbedRequest,
    GenerateRequest,
    SamplingOptions,
)
from forebay_common.prompts import generate_prompt

from forebay_router.core.bounds import BOUNDS, Bounds
from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import MAX_MODEL_CHARS, Wanted, estimate_tokens

ROLES = frozenset({"system", "user", "assistant", "tool"})

# A comparison with NaN is false, so each bound says what is right instead of what is wrong.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "temperature": (lambda value: 0 <= value <= 2, "from 0 to 2"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "above 0"),
}


class _GeneratePrompt:
    """See `forebay_router.core.wanted.Prompt`."""

    __slots__ = ("_request",)

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request

    def prefix_bytes(self) -> bytes:
        return generate_prompt(self._request)

    def texts(self) -> Iterable[str]:
        request = self._request
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return ()
        if kind == "messages":
            messages = request.messages.messages
            asked = next((m for m in reversed(messages) if m.role == "user"), messages[-1])
            return (asked.content,)
        return (request.text,)


class _EmbedPrompt:
    """See `forebay_router.core.wanted.Prompt`."""

    __slots__ = ("_request",)

    def __init__(self, request: EmbedRequest) -> None:
        self._request = request

    def prefix_bytes(self) -> bytes:
        return b""

    def texts(self) -> Iterable[str]:
        return (entry.text for entry in self._request.inputs if entry.HasField("text"))


def check_generate(request: GenerateRequest, bounds: Bounds = BOUNDS) -> Wanted:
    """Check a GenerateRequest.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field.
    """
    model = request.model
    _check_model(model)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise RefusedError("INVALID_ARGUMENT", "A prompt is required.", param="prompt")
    if kind == "token_ids":
        tokens = len(request.token_ids.ids)
        if not tokens:
            raise _empty("token_ids.ids")
    elif kind == "messages":
        messages = request.messages.messages
        _check_messages(messages, bounds)
        tokens = estimate_tokens(sum([len(message.content) for message in messages]))
    else:
        tokens = estimate_tokens(len(request.text))
    max_tokens = None
    if request.HasField("sampling"):
        _check_sampling(request.sampling, bounds)
        # What was checked is never 0, which is what an absent one reads as.
        max_tokens = request.sampling.max_tokens or None
    prompt = _GeneratePrompt(request)
    return Wanted(model, "generate_content", tokens, prompt, max_tokens, 1, True, True)


def check_embed(request: EmbedRequest, bounds: Bounds = BOUNDS) -> Wanted:
    """Check an EmbedRequest.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field.
    """
    _check_model(request.model)
    if not request.inputs:
        raise _empty("inputs")
    _check_count(len(request.inputs), "inputs", bounds.inputs)
    tokens = 0
    for index, entry in enumerate(request.inputs):
        kind = entry.WhichOneof("input")
        if kind is None or (kind == "token_ids" and not entry.token_ids.ids):
            raise _empty(f"inputs[{index}]")
        tokens += (
            len(entry.token_ids.ids) if kind == "token_ids" else estimate_tokens(len(entry.text))
        )
    return Wanted(request.model, "embeddings", tokens, _EmbedPrompt(request))


def _check_model(model: str) -> None:
    if not 1 <= len(model) <= MAX_MODEL_CHARS:
        message = f"'model' must have 1 to {MAX_MODEL_CHARS} characters."
        raise RefusedError("INVALID_ARGUMENT", message, param="model")


def _check_messages(messages: Sequence[ChatMessage], bounds: Bounds) -> None:
    if not messages:
        raise _empty("messages")
    _check_count(len(messages), "messages", bounds.messages)
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            param = f"messages[{index}].role"
            raise _wrong(param, f"must be one of {', '.join(sorted(ROLES))}")


def _check_sampling(sampling: SamplingOptions, bounds: Bounds) -> None:
    for field, value in sampling.ListFields():
        name = field.name
        if name == "stop":
            _check_stops(value, bounds)
        elif name == "logprobs" and value > bounds.logprobs:
            raise _wrong("sampling.logprobs", f"must be at most {bounds.logprobs}")
        elif name in _RANGES:
            is_right, allowed = _RANGES[name]
            if not is_right(value):
                raise _wrong(f"sampling.{name}", f"must be {allowed}")
    most = sampling.max_tokens
    if most > bounds.generated_tokens:
        raise _wrong("sampling.max_tokens", f"must be at most {bounds.generated_tokens}")
    if sampling.min_tokens > most and most:
        raise _wrong("sampling.min_tokens", "must be at most 'sampling.max_tokens'")


def _check_stops(stops: Sequence[str], bounds: Bounds) -> None:
    _check_count(len(stops), "sampling.stop", bounds.stops)
    for index, stop in enumerate(stops):
        if not stop:
            raise _empty(f"sampling.stop[{index}]")
        if len(stop) > bounds.stop_chars:
            raise _wrong(f"sampling.stop[{index}]", f"has more than {bounds.stop_chars} characters")


def _check_count(count: int, param: str, most: int) -> None:
    if count > most:
        raise _wrong(param, f"holds more than {most} entries")


def _wrong(param: str, problem: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{param}' {problem}.", param=param)


def _empty(param: str) -> RefusedError:
    return _wrong(param, "must not be empty")
