"""Checks bodies of the OpenAI protocol: types, required fields, what a caller can make large."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from forebay_common.prompts import ABSENT, Content, ContentPart, Prompts, is_given
from msgspec import Raw

from forebay_router.core.bodies import (
    ChatBody,
    Choosing,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    Message,
    MessagesBody,
    PooledBody,
    RerankBody,
    ResponsesBody,
    Sampling,
    ScoreBody,
    ScoreInputs,
    Steering,
    Stops,
    TokenizeBody,
    is_text,
    score_texts,
)
from forebay_router.core.bounds import BOUNDS, Bounds
from forebay_router.core.constraints import check_schema, check_structured_outputs
from forebay_router.core.media import MediaCheck
from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import Wanted, estimate_tokens

_COMPLETION_TOKENS = 16
"""What OpenAI's protocol has a completion end at where it does not say."""
_TOKEN_MAX = (1 << 31) - 1
_SCORED = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)

_PROBLEM = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")

_Fields: TypeAlias = dict[str, Any]
_decode_any = msgspec.json.Decoder().decode


class _Function(msgspec.Struct, gc=False):
    parameters: Raw = ABSENT


class _Tool(msgspec.Struct, gc=False):
    """A tool, in any of the three protocols."""

    function: _Function | None = None
    parameters: Raw = ABSENT
    input_schema: Raw = ABSENT


class _Schema(msgspec.Struct, gc=False):
    schema: Raw = ABSENT


class _Format(msgspec.Struct, gc=False):
    """`response_format`, and the `format` of the other two protocols."""

    type: str | None = None
    json_schema: _Schema | None = None
    schema: Raw = ABSENT


class _Held(msgspec.Struct, gc=False):
    """`text` of responses, and `output_config` of Anthropic's messages."""

    format: Raw = ABSENT


_decode_tool = msgspec.json.Decoder(_Tool).decode
_decode_format = msgspec.json.Decoder(_Format).decode
_decode_held = msgspec.json.Decoder(_Held).decode


def check_openai(path: str, body: bytes, bounds: Bounds = BOUNDS) -> Wanted:
    """Check a body.

    Raises:
        RefusedError: ROUTE_NOT_FOUND for a path that is not served; INVALID_ARGUMENT naming the
            field, and the limit where it has one; UNSUPPORTED for what would need a memory here.
    """
    served = _SERVED.get(path)
    if served is None:
        raise RefusedError("ROUTE_NOT_FOUND", "There is no such path here.", param="path")
    decoder, want = served
    parsed = _decode(decoder, body)
    wanted: Wanted = want(parsed, body, bounds)
    return wanted


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        # The decoder skips unknown fields without reading their text, and the engine would choke.
        if not body.isascii():
            str(body, "utf-8")
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RefusedError("INVALID_ARGUMENT", "The body is not valid JSON in UTF-8.") from None
    except RecursionError:
        raise RefusedError("INVALID_ARGUMENT", "The body is nested too deeply.") from None


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


def _want_chat(body: ChatBody, raw: bytes, bounds: Bounds) -> Wanted:
    characters = _check_messages(body.messages, raw, bounds)
    _check_choosing(body, bounds)
    max_tokens = body.max_completion_tokens or body.max_tokens
    _check_generated(
        max_tokens, "max_completion_tokens" if body.max_completion_tokens else "max_tokens", bounds
    )
    if body.top_logprobs is not None:
        _check_most(body.top_logprobs, "top_logprobs", bounds.logprobs)
    if body.min_tokens:
        _check_min_tokens(body.min_tokens, max_tokens)
    if body.tools:
        _check_tools(body.tools, bounds)
    streams = body.stream is True
    return Wanted(
        body.model,
        "chat",
        estimate_tokens(characters),
        body,
        max_tokens,
        body.n or 1,
        streams,
        streams,
    )


def _want_completion(body: CompletionBody, _: bytes, bounds: Bounds) -> Wanted:
    prompt = body.prompt
    _check_prompt(prompt, "prompt", bounds)
    _check_choosing(body, bounds)
    max_tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_generated(max_tokens, "max_tokens", bounds)
    if body.best_of is not None:
        _check_most(body.best_of, "best_of", bounds.choices)
    if body.logprobs is not None:
        _check_most(body.logprobs, "logprobs", bounds.logprobs)
    if body.min_tokens:
        _check_min_tokens(body.min_tokens, max_tokens)
    answers = body.n or 1
    if not isinstance(prompt, str) and not isinstance(prompt[0], int):
        answers *= len(prompt)
        _check_most(answers, "n", bounds.answers, of="prompts times choices")
    streams = body.stream is True
    return Wanted(
        body.model,
        "text_completion",
        _estimate(prompt),
        body,
        max_tokens,
        answers,
        streams,
        streams,
    )


def _want_responses(body: ResponsesBody, raw: bytes, bounds: Bounds) -> Wanted:
    if body.previous_response_id is not None:
        raise _no_memory("previous_response_id", "Answers are not kept here; send the whole input.")
    if body.background:
        raise _no_memory("background", "Answers are not kept here; ask for a stream instead.")
    _check_steering(body, bounds)
    _check_generated(body.max_output_tokens, "max_output_tokens", bounds)
    if body.top_logprobs is not None:
        _check_most(body.top_logprobs, "top_logprobs", bounds.logprobs)
    if body.tools:
        _check_tools(body.tools, bounds)
    if is_given(body.text):
        _check_held(body.text, "text", bounds)
    characters = len(body.instructions or "")
    if isinstance(body.input, str):
        characters += len(body.input)
    else:
        _check_count(len(body.input), "input", bounds.messages)
        holds_media = False
        for index, item in enumerate(body.input):
            counted, more = _count(item.content, f"input[{index}].content", bounds)
            characters += counted + len(item.arguments or "")
            holds_media |= more
            if is_given(item.output):
                output = bytes(item.output)
                characters += len(output)
                holds_media |= output[:1] != b'"'
        if holds_media:
            check = MediaCheck(bounds)
            for index, entry in enumerate(_decode_any(raw)["input"]):
                check.contents(entry.get("content"), f"input[{index}].content")
                check.contents(entry.get("output"), f"input[{index}].output")
    return Wanted(
        body.model,
        "chat",
        estimate_tokens(characters),
        body,
        body.max_output_tokens,
        1,
        body.stream is True,
    )


def _want_messages(body: MessagesBody, raw: bytes, bounds: Bounds) -> Wanted:
    characters = _check_messages(body.messages, raw, bounds)
    if body.system is not None:
        counted, holds_media = _count(body.system, "system", bounds)
        characters += counted
        if holds_media:
            MediaCheck(bounds).contents(_decode_any(raw)["system"], "system")
    _check_sampling(body)
    _check_generated(body.max_tokens, "max_tokens", bounds)
    if body.stop_sequences:
        _check_stops(body.stop_sequences, "stop_sequences", bounds)
    if body.tools:
        _check_tools(body.tools, bounds)
    if is_given(body.output_config):
        _check_held(body.output_config, "output_config", bounds)
    tokens = estimate_tokens(characters)
    return Wanted(body.model, "chat", tokens, body, body.max_tokens, 1, body.stream is True)


def _want_count(body: CountBody, raw: bytes, bounds: Bounds) -> Wanted:
    _want_messages(body, raw, bounds)
    return Wanted(body.model, "tokenize", 1, body)


def _want_pooled(operation: str) -> Callable[[PooledBody, bytes, Bounds], Wanted]:
    def want(body: PooledBody, raw: bytes, bounds: Bounds) -> Wanted:
        if body.messages is not None:
            tokens = estimate_tokens(_check_messages(body.messages, raw, bounds))
        elif body.input is not None:
            _check_prompt(body.input, "input", bounds)
            tokens = _estimate(body.input)
        else:
            raise RefusedError("INVALID_ARGUMENT", "'input' is required.", param="input")
        return Wanted(body.model, operation, tokens, body)

    return want


def _want_rerank(body: RerankBody, raw: bytes, bounds: Bounds) -> Wanted:
    query = _check_scored(body.query, "query", raw, bounds)
    documents = _check_scored(body.documents, "documents", raw, bounds)
    # Each document is read together with the query.
    count = len(body.documents) if isinstance(body.documents, list) else 1
    return Wanted(body.model, "rerank", estimate_tokens(query * count + documents), body)


def _want_score(body: ScoreBody, raw: bytes, bounds: Bounds) -> Wanted:
    for left, right in _SCORED:
        first, second = getattr(body, left), getattr(body, right)
        if first is None or second is None:
            continue
        characters = 0
        longer = max(len(side) if isinstance(side, list) else 1 for side in (first, second))
        for name, side in ((left, first), (right, second)):
            repeated = 1 if isinstance(side, list) else longer
            characters += repeated * _check_scored(side, name, raw, bounds)
        return Wanted(body.model, "score", estimate_tokens(characters), body)
    # Of a pair that is begun, the other half; else of the first.
    halves = (pair if getattr(body, pair[0]) else pair[::-1] for pair in _SCORED)
    missing = next((second for first, second in halves if getattr(body, first)), "queries")
    raise RefusedError("INVALID_ARGUMENT", f"'{missing}' is required.", param=missing)


def _want_tokenize(body: TokenizeBody, raw: bytes, bounds: Bounds) -> Wanted:
    if body.messages is not None:
        _check_messages(body.messages, raw, bounds)
    elif body.prompt is None:
        raise RefusedError("INVALID_ARGUMENT", "'prompt' is required.", param="prompt")
    if body.tools:
        _check_tools(body.tools, bounds)
    return Wanted(body.model, "tokenize", 1, body)


def _want_detokenize(body: DetokenizeBody, _: bytes, bounds: Bounds) -> Wanted:
    if body.tokens and max(body.tokens) > _TOKEN_MAX:
        raise _wrong("tokens", f"holds a token above {_TOKEN_MAX}")
    return Wanted(body.model, "detokenize", 1, body)


_SERVED: dict[str, tuple[msgspec.json.Decoder[Any], Callable[[Any, bytes, Bounds], Wanted]]] = {
    "/v1/chat/completions": (msgspec.json.Decoder(ChatBody), _want_chat),
    "/v1/completions": (msgspec.json.Decoder(CompletionBody), _want_completion),
    "/v1/responses": (msgspec.json.Decoder(ResponsesBody), _want_responses),
    "/v1/messages": (msgspec.json.Decoder(MessagesBody), _want_messages),
    "/v1/messages/count_tokens": (msgspec.json.Decoder(CountBody), _want_count),
    "/v1/embeddings": (msgspec.json.Decoder(PooledBody), _want_pooled("embeddings")),
    "/pooling": (msgspec.json.Decoder(PooledBody), _want_pooled("pooling")),
    "/classify": (msgspec.json.Decoder(PooledBody), _want_pooled("classify")),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"), (msgspec.json.Decoder(RerankBody), _want_rerank)
    ),
    **dict.fromkeys(("/score", "/v1/score"), (msgspec.json.Decoder(ScoreBody), _want_score)),
    "/tokenize": (msgspec.json.Decoder(TokenizeBody), _want_tokenize),
    "/detokenize": (msgspec.json.Decoder(DetokenizeBody), _want_detokenize),
}
PATHS = frozenset(_SERVED)


def _check_messages(messages: list[Message], raw: bytes, bounds: Bounds) -> int:
    """Returns the characters of a conversation."""
    if len(messages) > bounds.messages:
        _check_count(len(messages), "messages", bounds.messages)
    characters = 0
    holds_media = False
    for message in messages:
        content = message.content
        if isinstance(content, str):
            characters += len(content)
        elif content:
            counted, more = _count(content, "messages[...].content", bounds)
            characters += counted
            holds_media |= more
        if message.tool_calls:
            characters += sum([len(bytes(call)) for call in message.tool_calls])
    if holds_media:
        check = MediaCheck(bounds)
        for index, entry in enumerate(_decode_any(raw)["messages"]):
            check.contents(entry.get("content"), f"messages[{index}].content")
    return characters


def _count(content: Content | None, field: str, bounds: Bounds) -> tuple[int, bool]:
    """The characters of a content, and whether an engine may find media in it."""
    if content is None:
        return 0, False
    if isinstance(content, str):
        return len(content), False
    _check_count(len(content), field, bounds.messages)
    characters = 0
    holds_media = False
    for part in content:
        if isinstance(part, str):
            characters += len(part)
            continue
        characters += len(part.text or "")
        holds_media |= not is_text(part)
    return characters, holds_media


def _check_sampling(body: Sampling) -> None:
    # They tell an engine which other host to fetch from.
    if is_given(body.kv_transfer_params):
        raise _wrong("kv_transfer_params", "is not for callers")
    if is_given(body.ec_transfer_params):
        raise _wrong("ec_transfer_params", "is not for callers")


def _check_steering(body: Steering, bounds: Bounds) -> None:
    if body.kv_transfer_params is not ABSENT or body.ec_transfer_params is not ABSENT:
        _check_sampling(body)
    if body.stop:
        _check_stops(body.stop, "stop", bounds)
    if body.logit_bias is not None:
        _check_count(len(body.logit_bias), "logit_bias", bounds.listed_tokens)
    if body.stop_token_ids is not None:
        _check_count(len(body.stop_token_ids), "stop_token_ids", bounds.listed_tokens)
    if body.structured_outputs is not None:
        check_structured_outputs(body.structured_outputs, "structured_outputs", bounds)


def _check_choosing(body: Choosing, bounds: Bounds) -> None:
    _check_steering(body, bounds)
    if body.n is not None:
        _check_most(body.n, "n", bounds.choices)
    if body.prompt_logprobs is not None:
        _check_most(body.prompt_logprobs, "prompt_logprobs", bounds.logprobs)
    if body.allowed_token_ids is not None:
        _check_count(len(body.allowed_token_ids), "allowed_token_ids", bounds.listed_tokens)
    if body.logprob_token_ids is not None:
        _check_count(len(body.logprob_token_ids), "logprob_token_ids", bounds.listed_tokens)
    if body.bad_words is not None:
        _check_count(len(body.bad_words), "bad_words", bounds.listed_tokens)
    if body.response_format is not ABSENT and is_given(body.response_format):
        _check_format(body.response_format, "response_format", bounds)


def _check_stops(stops: Stops, field: str, bounds: Bounds) -> None:
    if isinstance(stops, str):
        stops = [stops]
    _check_count(len(stops), field, bounds.stops)
    if max(map(len, stops)) > bounds.stop_chars:
        raise _wrong(field, f"holds a text of more than {bounds.stop_chars} characters")


def _check_tools(tools: Sequence[Raw], bounds: Bounds) -> None:
    _check_count(len(tools), "tools", bounds.tools)
    if sum([len(bytes(tool)) for tool in tools]) > bounds.tools_bytes:
        raise _wrong("tools", f"has more than {bounds.tools_bytes} bytes")
    for index, raw in enumerate(tools):
        field = f"tools[{index}]"
        try:
            tool = _decode_tool(raw)
        except msgspec.ValidationError as error:
            raise _within(field, str(error)) from None
        function = tool.function.parameters if tool.function is not None else ABSENT
        for schema in (function, tool.parameters, tool.input_schema):
            if is_given(schema):
                check_schema(schema, field, bounds)


def _check_held(raw: Raw, field: str, bounds: Bounds) -> None:
    try:
        held = _decode_held(raw)
    except msgspec.ValidationError as error:
        raise _within(field, str(error)) from None
    if is_given(held.format):
        _check_format(held.format, f"{field}.format", bounds)


def _check_format(raw: Raw, field: str, bounds: Bounds) -> None:
    try:
        given = _decode_format(raw)
    except msgspec.ValidationError as error:
        raise _within(field, str(error)) from None
    if given.json_schema is not None and is_given(given.json_schema.schema):
        check_schema(given.json_schema.schema, f"{field}.json_schema.schema", bounds)
    if is_given(given.schema):
        check_schema(given.schema, f"{field}.schema", bounds)
    if given.type == "structural_tag":
        check_schema(raw, field, bounds, within=True)


def _check_scored(inputs: ScoreInputs, field: str, raw: bytes, bounds: Bounds) -> int:
    """Returns the characters of one side of a score."""
    if isinstance(inputs, str):
        return len(inputs)
    entries = inputs if isinstance(inputs, list) else [inputs]
    _check_count(len(entries), field, bounds.inputs)
    parts: Iterable[ContentPart] = (
        part for entry in entries if not isinstance(entry, str) for part in entry.content
    )
    if any(not is_text(part) for part in parts):
        given = _decode_any(raw)[field]
        check = MediaCheck(bounds)
        for entry in given if isinstance(given, list) else [given]:
            if isinstance(entry, dict):
                check.contents(entry.get("content"), f"{field}.content")
    return sum(map(len, score_texts(inputs)))


def _check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise _wrong("min_tokens", f"must be at most the {max_tokens} tokens that are asked for")


def _check_generated(tokens: int | None, field: str, bounds: Bounds) -> None:
    if tokens is not None and tokens > bounds.generated_tokens:
        _check_most(tokens, field, bounds.generated_tokens)


def _check_most(value: int, field: str, most: int, *, of: str = "") -> None:
    if value > most:
        raise _wrong(field, f"may make at most {most} {of}" if of else f"must be at most {most}")


def _check_count(count: int, field: str, most: int) -> None:
    if count > most:
        raise _wrong(field, f"holds more than {most} entries")


def _check_prompt(prompt: Prompts, field: str, bounds: Bounds) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        raise _wrong(field, "must not be empty")
    # A body can hold millions of tokens: those are checked as a whole.
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        odd = next(i for i, entry in enumerate(prompt) if type(entry) is not type(prompt[0]))
        raise _wrong(f"{field}[{odd}]", f"is of another type than '{field}[0]'")
    if kinds != {int}:
        _check_count(len(prompt), field, bounds.inputs)
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


def _no_memory(param: str, remedy: str) -> RefusedError:
    return RefusedError("UNSUPPORTED", f"'{param}' is not offered. {remedy}", param=param)


def _within(field: str, problem: str) -> RefusedError:
    """The refusal of what was kept raw."""
    inner = _explain(problem)
    if inner.param is None:
        return _wrong(field, "must be an object")
    path = f"{field}.{inner.param}"
    message = inner.message.replace(f"'{inner.param}'", f"'{path}'", 1)
    return RefusedError("INVALID_ARGUMENT", message, param=path)


def _estimate(prompt: Prompts) -> int:
    if isinstance(prompt, str):
        return estimate_tokens(len(prompt))
    if isinstance(prompt[0], int):
        return len(prompt)
    return sum(
        len(entry) if isinstance(entry, list) else estimate_tokens(len(cast("str", entry)))
        for entry in prompt
    )
