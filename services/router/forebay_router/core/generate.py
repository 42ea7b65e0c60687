"""Checks the messages of Generate and Embed against the bounds their contract names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from forebay.inference.v1.inference_service_pb2 import (
    ChatMessage,
    EmbedRequest,
    GenerateRequest,
    SamplingOptions,
)
from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes

from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import (
    MAX_INPUTS,
    MAX_LOGPROBS,
    MAX_MODEL_CHARS,
    MAX_STOPS,
    Wanted,
    estimate_tokens,
)

ROLES = frozenset({"system", "user", "assistant", "tool"})

# A comparison with NaN is false, so each bound says what is right instead of what is wrong.
_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "temperature": (lambda value: 0 <= value <= 2, "from 0 to 2"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "above 0"),
    "logprobs": (lambda value: value <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
}


class _GeneratePrompt:
    """See `forebay_router.core.wanted.Prompt`."""

    __slots__ = ("_request",)

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request

    def prefix_bytes(self) -> bytes:
        request = self._request
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return token_bytes(request.token_ids.ids)
        if kind == "messages":
            return chat_bytes(
                (message.role, (message.content,)) for message in request.messages.messages
            )
        return text_bytes(request.text)

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


def check_generate(request: GenerateRequest) -> Wanted:
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
        _check_messages(messages)
        tokens = estimate_tokens(sum([len(message.content) for message in messages]))
    else:
        tokens = estimate_tokens(len(request.text))
    max_tokens = None
    if request.HasField("sampling"):
        _check_sampling(request.sampling)
        # What was checked is never 0, which is what an absent one reads as.
        max_tokens = request.sampling.max_tokens or None
    prompt = _GeneratePrompt(request)
    return Wanted(model, "generate_content", tokens, prompt, max_tokens, 1, True, True)


def check_embed(request: EmbedRequest) -> Wanted:
    """Check an EmbedRequest.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field.
    """
    _check_model(request.model)
    if not request.inputs:
        raise _empty("inputs")
    if len(request.inputs) > MAX_INPUTS:
        message = f"'inputs' holds more than {MAX_INPUTS} entries."
        raise RefusedError("INVALID_ARGUMENT", message, param="inputs")
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


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise _empty("messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            param = f"messages[{index}].role"
            text = f"'{param}' must be one of {', '.join(sorted(ROLES))}."
            raise RefusedError("INVALID_ARGUMENT", text, param=param)


def _check_sampling(sampling: SamplingOptions) -> None:
    for field, value in sampling.ListFields():
        if field.name == "stop":
            _check_stops(value)
        elif field.name in _BOUNDS:
            is_right, bound = _BOUNDS[field.name]
            if not is_right(value):
                param = f"sampling.{field.name}"
                raise RefusedError("INVALID_ARGUMENT", f"'{param}' must be {bound}.", param=param)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        message = f"'sampling.stop' holds more than {MAX_STOPS} entries."
        raise RefusedError("INVALID_ARGUMENT", message, param="sampling.stop")
    for index, stop in enumerate(stops):
        if not stop:
            raise _empty(f"sampling.stop[{index}]")


def _empty(param: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{param}' must not be empty.", param=param)
