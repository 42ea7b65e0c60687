"""Checks bodies of the OpenAI protocol: types, required fields, and what a caller can make large.

Fields that are not named here pass through untouched and are judged by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes
from msgspec import Meta, Struct

from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import (
    MAX_CHOICES,
    MAX_INPUTS,
    MAX_LOGPROBS,
    MAX_MODEL_CHARS,
    MAX_STOPS,
    Wanted,
    estimate_tokens,
)

ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Logprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Stops: TypeAlias = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
AboveZero: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Prompts: TypeAlias = str | list[str | int | list[int]]
"""One text, its token ids, or several of either."""


# What JSON makes holds no cycles, so the collector need not look at any of these.
class StreamOptions(Struct, gc=False):
    """`stream_options`."""

    include_usage: bool | None = None


class Sampling(Struct, kw_only=True, gc=False):
    """What chat and completions have in common."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: AtLeastOne | None = None
    min_tokens: NotNegative | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: int | None = None
    stop: Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: AboveZero | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Logprobs | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class ContentPart(Struct, gc=False):
    """A part of a message; which fields it has depends on its type."""

    type: str | None = None
    text: str | None = None


class Message(Struct, gc=False):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(Sampling, kw_only=True, gc=False):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        tools = _ENCODER.encode(self.tools) if self.tools else b""
        return chat_bytes(
            ((message.role, _texts(message.content)) for message in self.messages), tools=tools
        )

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        for message in reversed(self.messages):
            if message.role == "user":
                return _texts(message.content)
        return _texts(self.messages[-1].content)


class CompletionBody(Sampling, kw_only=True, gc=False):
    """`/v1/completions`."""

    prompt: Prompts
    best_of: Choices | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        return _first_bytes(self.prompt)

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _prompt_texts(self.prompt)


class EmbeddingBody(Struct, kw_only=True, gc=False):
    """`/v1/embeddings`."""

    model: ModelName
    input: Prompts
    dimensions: AtLeastOne | None = None
    encoding_format: str | None = None
    user: str | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        return b""

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _prompt_texts(self.input)


Body: TypeAlias = ChatBody | CompletionBody | EmbeddingBody

_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "/v1/chat/completions": msgspec.json.Decoder(ChatBody),
    "/v1/completions": msgspec.json.Decoder(CompletionBody),
    "/v1/embeddings": msgspec.json.Decoder(EmbeddingBody),
}
PATHS = frozenset(_DECODERS)
_ENCODER = msgspec.json.Encoder()

_COMPLETION_TOKENS = 16
"""What OpenAI's protocol has a completion end at where it does not say."""

_TOKEN_MAX = (1 << 31) - 1

_PROBLEM = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")


def check_openai(path: str, body: bytes) -> Wanted:
    """Check a body.

    Raises:
        RefusedError: ROUTE_NOT_FOUND for a path that is not served; INVALID_ARGUMENT naming the
            field.
    """
    decoder = _DECODERS.get(path)
    if decoder is None:
        raise RefusedError("ROUTE_NOT_FOUND", "There is no such path here.", param="path")
    parsed = _decode(decoder, body)
    if isinstance(parsed, ChatBody):
        return _want_chat(parsed)
    if isinstance(parsed, CompletionBody):
        return _want_completion(parsed)
    _check_prompt(parsed.input, "input")
    return Wanted(parsed.model, "embeddings", _estimate(parsed.input), parsed)


def _want_chat(body: ChatBody) -> Wanted:
    characters = 0
    for message in body.messages:
        content = message.content
        characters += len(content) if isinstance(content, str) else _characters(content)
    streams = body.stream is True
    return Wanted(
        body.model,
        "chat",
        estimate_tokens(characters),
        body,
        body.max_completion_tokens or body.max_tokens,
        body.n or 1,
        streams,
        streams,
    )


def _want_completion(body: CompletionBody) -> Wanted:
    prompt = body.prompt
    _check_prompt(prompt, "prompt")
    streams = body.stream is True
    prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    return Wanted(
        body.model,
        "text_completion",
        _estimate(prompt),
        body,
        body.max_tokens or _COMPLETION_TOKENS,
        prompts * (body.n or 1),
        streams,
        streams,
    )


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Body:
    try:
        # The decoder skips unknown fields without reading their text, and the engine would choke.
        if not body.isascii():
            str(body, "utf-8")
        parsed: Body = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RefusedError("INVALID_ARGUMENT", "The body is not valid JSON in UTF-8.") from None
    except RecursionError:
        raise RefusedError("INVALID_ARGUMENT", "The body is nested too deeply.") from None
    return parsed


def _explain(problem: str) -> RefusedError:
    match = _PROBLEM.fullmatch(problem)
    assert match is not None, "the pattern matches every text"
    what, path = match["what"], match["path"] or ""
    missing = _MISSING.fullmatch(what)
    if missing is not None:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return RefusedError("INVALID_ARGUMENT", f"'{path}' is required.", param=path)
    if not path:
        return RefusedError("INVALID_ARGUMENT", "The body must be a JSON object.")
    what = what[:1].lower() + what[1:]
    return RefusedError("INVALID_ARGUMENT", f"'{path}' is wrong: {what}.", param=path)


def _check_prompt(prompt: Prompts, field: str) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        raise _wrong(field, "must not be empty")
    # A body can hold millions of tokens: those are checked as a whole.
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        odd = next(i for i, entry in enumerate(prompt) if type(entry) is not type(prompt[0]))
        raise _wrong(f"{field}[{odd}]", f"is of another type than '{field}[0]'")
    if kinds != {int} and len(prompt) > MAX_INPUTS:
        raise _wrong(field, f"holds more than {MAX_INPUTS} entries")
    for name, tokens in _token_lists(prompt, field):
        if not tokens:
            raise _wrong(name, "must not be empty")
        if min(tokens) < 0:
            raise _wrong(name, "holds a negative token")
        if max(tokens) > _TOKEN_MAX:
            raise _wrong(name, f"holds a token above {_TOKEN_MAX}")


def _token_lists(prompt: list[str | int | list[int]], field: str) -> list[tuple[str, list[int]]]:
    if isinstance(prompt[0], int):
        return [(field, cast("list[int]", prompt))]
    return [(f"{field}[{i}]", entry) for i, entry in enumerate(prompt) if isinstance(entry, list)]


def _wrong(param: str, problem: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{param}' {problem}.", param=param)


def _estimate(prompt: Prompts) -> int:
    if isinstance(prompt, str):
        return estimate_tokens(len(prompt))
    if isinstance(prompt[0], int):
        return len(prompt)
    return sum(
        len(entry) if isinstance(entry, list) else estimate_tokens(len(cast("str", entry)))
        for entry in prompt
    )


def _characters(parts: list[str | ContentPart] | None) -> int:
    return sum(len(part) if isinstance(part, str) else len(part.text or "") for part in parts or ())


def _texts(content: str | list[str | ContentPart] | None) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for part in content or ():
        if isinstance(part, str):
            yield part
        elif part.text is not None:
            yield part.text


def _prompt_texts(prompt: Prompts) -> Iterable[str]:
    if isinstance(prompt, str):
        return (prompt,)
    return (entry for entry in prompt if isinstance(entry, str))


def _first_bytes(prompt: Prompts) -> bytes:
    if isinstance(prompt, str):
        return text_bytes(prompt)
    first = prompt[0]
    if isinstance(first, str):
        return text_bytes(first)
    return token_bytes(first if isinstance(first, list) else cast("list[int]", prompt))
