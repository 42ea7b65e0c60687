"""The OpenAI protocol for the simulated engine, field for field.

A body becomes a validated request, and an answer becomes the documents and events of the protocol.

The refused are named by their field; a refusal never repeats the caller's input.
"""

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import tokenizer
from forebay_engine.core.simulated.answer import ChoiceDelta, TokenLogprob
from forebay_engine.core.simulated.planner import Finish

_CHOICES_MAX = 16
_STOPS_MAX = 16
_LOGPROBS_MAX = 20
_INPUTS_MAX = 2048
# What vLLM's app has, and this engine has not.
_NOT_OFFERED = frozenset(
    ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/pooling", "/classify")
)
_DONE = b"data: [DONE]\n\n"
_NULL = b"null"
_encode = msgspec.json.Encoder().encode


class Kind(Enum):
    """Which answer a path gives."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    EMBEDDING = "/v1/embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A chat or completion request that needs no further checks."""

    kind: Kind
    prompts: tuple[tuple[int, ...], ...]
    choices_per_prompt: int
    max_tokens: int | None
    min_tokens: int
    ignore_end: bool
    seed: int
    stops: tuple[str, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """An embedding request that needs no further checks."""

    inputs: tuple[tuple[int, ...], ...]
    as_base64: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every document and event of one answer repeats."""

    kind: Kind
    request_id: str
    model: str
    fingerprint: str
    created_unix_s: int

    def common(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that come first."""
        chat = self.kind is Kind.CHAT
        prefix = "chatcmpl" if chat else "cmpl"
        name = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": f"{name}.chunk" if chat and chunk else name,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """Return the prompt of a conversation: the simulated model's chat template."""
    turns = "".join(f"<|{role}|>\n{content}\n" for role, content in messages)
    return f"{turns}<|assistant|>\n"


def parse_request(path: str, body: bytes) -> TextRequest | EmbeddingRequest:
    """Return the request of a body.

    Raises Refused: ROUTE_NOT_FOUND, INVALID_ARGUMENT with the field, UNSUPPORTED with the field.
    """
    try:
        kind = Kind(path)
    except ValueError:
        if path in _NOT_OFFERED:
            raise Refused("UNSUPPORTED", "The simulated engine does not offer that path.") from None
        raise Refused("ROUTE_NOT_FOUND", "No such path in the simulated engine.") from None
    fields = fields_of(body)
    if kind is Kind.EMBEDDING:
        return _parse_embedding(fields)
    return _parse_text(kind, fields)


def fields_of(body: bytes) -> dict[str, Any]:
    """Return what a body holds.

    Raises Refused: INVALID_ARGUMENT.
    """
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise Refused("INVALID_ARGUMENT", "The body is not valid JSON.") from None
    except RecursionError:
        raise Refused("INVALID_ARGUMENT", "The body is nested too deeply.") from None
    if not isinstance(fields, dict):
        raise Refused("INVALID_ARGUMENT", "The body must be a JSON object.")
    return fields


def _parse_text(kind: Kind, fields: Mapping[str, Any]) -> TextRequest:
    for name, neutral in _UNSUPPORTED.items():
        if fields.get(name) not in (None, *neutral):
            raise Refused(
                "UNSUPPORTED", f"The simulated engine does not offer '{name}'.", param=name
            )
    if kind is Kind.CHAT:
        prompts: tuple[tuple[int, ...], ...] = (tuple(tokenizer.encode(chat_prompt(fields))),)
        limit_names = ["max_completion_tokens", "max_tokens"]
        wanted = _flag(fields, "logprobs")
        top = _integer(fields, "top_logprobs", 0, _LOGPROBS_MAX)
        if top is not None and not wanted:
            raise _invalid("top_logprobs", "needs 'logprobs' to be true")
        logprobs = (top or 0) if wanted else None
    else:
        prompts = _token_inputs(fields, "prompt")
        limit_names = ["max_tokens"]
        logprobs = _integer(fields, "logprobs", 0, _LOGPROBS_MAX)
    limits = [_integer(fields, name, 1, 1 << 31) for name in limit_names]
    max_tokens = next((limit for limit in limits if limit is not None), None)
    if max_tokens is None and kind is Kind.COMPLETION:
        max_tokens = 16
    _number(fields, "temperature", 0, 2)
    _number(fields, "top_p", 0, 1)
    _number(fields, "presence_penalty", -2, 2)
    _number(fields, "frequency_penalty", -2, 2)
    stream = _flag(fields, "stream")
    return TextRequest(
        kind=kind,
        prompts=prompts,
        choices_per_prompt=_integer(fields, "n", 1, _CHOICES_MAX) or 1,
        max_tokens=max_tokens,
        min_tokens=_integer(fields, "min_tokens", 0, 1 << 31) or 0,
        ignore_end=_flag(fields, "ignore_eos"),
        seed=_integer(fields, "seed", -(1 << 63), (1 << 63) - 1) or 0,
        stops=_stops(fields),
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


# Fields that would change the answer's shape, and the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "structured_outputs": (),
}


def chat_prompt(fields: Mapping[str, Any]) -> str:
    """Return the prompt of a body's `messages`.

    Raises Refused: INVALID_ARGUMENT and UNSUPPORTED with the field.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "must be a list of at least one message")
    turns: list[tuple[str, str]] = []
    for position, message in enumerate(messages):
        name = f"messages.{position}"
        if not isinstance(message, dict):
            raise _invalid(name, "must be an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _invalid(f"{name}.role", "must be a text")
        turns.append((role, _content(message.get("content"), f"{name}.content")))
    return render_chat(turns)


def _content(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(name, "must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Refused("UNSUPPORTED", "Only parts of type 'text' are offered.", param=name)
        if not isinstance(part.get("text"), str):
            raise _invalid(name, "has a text part without 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _parse_embedding(fields: Mapping[str, Any]) -> EmbeddingRequest:
    encoding = fields.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise _invalid("encoding_format", "must be 'float' or 'base64'")
    if fields.get("dimensions") is not None:
        raise Refused(
            "UNSUPPORTED", "The simulated engine does not offer 'dimensions'.", param="dimensions"
        )
    return EmbeddingRequest(inputs=_token_inputs(fields, "input"), as_base64=encoding == "base64")


def _token_inputs(fields: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of a text, of token ids, or of a list of either."""
    value = fields.get(name)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _invalid(name, "must be a text, a list of texts, or token ids")
    if all(isinstance(item, int) for item in value):
        value = [value]
    if len(value) > _INPUTS_MAX:
        raise _invalid(name, f"may have at most {_INPUTS_MAX} entries")
    inputs: list[tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str):
            tokens = tokenizer.encode(item)
        elif isinstance(item, list) and all(type(token) is int for token in item):
            tokens = item
            if not tokenizer.is_vocabulary(tokens):
                raise _invalid(name, "has a token id outside the vocabulary")
        else:
            raise _invalid(name, "must be a text, a list of texts, or token ids")
        if not tokens:
            raise _invalid(name, "must not be empty")
        inputs.append(tuple(tokens))
    return tuple(inputs)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop")
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _invalid("stop", "must be a text or a list of texts")
    if len(stops) > _STOPS_MAX:
        raise _invalid("stop", f"may have at most {_STOPS_MAX} entries")
    return tuple(stops)


def _include_usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise _invalid("stream_options", "needs 'stream' to be true")
    if not isinstance(options, dict):
        raise _invalid("stream_options", "must be an object")
    return _flag(options, "include_usage", name="stream_options.include_usage")


def _flag(fields: Mapping[str, Any], key: str, *, name: str | None = None) -> bool:
    value = fields.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _invalid(name or key, "must be true or false")
    return value


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise _invalid(name, "must be a whole number")
    if not least <= value <= most:
        raise _invalid(name, f"must be from {least} to {most}")
    return value


def _number(fields: Mapping[str, Any], name: str, least: float, most: float) -> None:
    value = fields.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(name, "must be a number")
    if not least <= value <= most:
        raise _invalid(name, f"must be from {least:g} to {most:g}")


def _invalid(name: str, problem: str) -> Refused:
    return Refused("INVALID_ARGUMENT", f"'{name}' {problem}.", param=name)


def usage_document(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class EventWriter:
    """Writes the events of one streamed answer.

    What the events of a choice have in common is rendered once: a delta costs the encoding of its
    text and a few joins.
    """

    def __init__(self, head: AnswerHead, request: TextRequest) -> None:
        self._chat = head.kind is Kind.CHAT
        self._logprobs = request.logprobs is not None
        self._include_usage = request.include_usage
        # The object is left open: `choices` follows.
        self._start = b"data: " + _encode(head.common(chunk=True))[:-1]
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._fronts: dict[int, bytes] = {}

    def opening(self, choices: int) -> bytes:
        """Return the events before any text: a chat names its role per choice."""
        if not self._chat:
            return b""
        return b"".join(
            b'%s,"choices":[{"index":%d,"delta":{"role":"assistant","content":""},%s%s'
            % (self._start, index, b'"logprobs":null,"finish_reason":null}]', self._end)
            for index in range(choices)
        )

    def deltas(self, deltas: Iterable[ChoiceDelta]) -> bytes:
        """Return the events for what the choices grew by."""
        return b"".join(map(self._chat_delta if self._chat else self._text_delta, deltas))

    def closing(self, usage: dict[str, Any]) -> bytes:
        """Return the events after all text: usage when it was asked for, and the end."""
        if not self._include_usage:
            return _DONE
        return b"".join((self._start, b',"choices":[],"usage":', _encode(usage), b"}\n\n", _DONE))

    def _front(self, index: int) -> bytes:
        front = self._fronts.get(index)
        if front is None:
            field = b'"delta":{"content":' if self._chat else b'"text":'
            front = b'%s,"choices":[{"index":%d,%s' % (self._start, index, field)
            self._fronts[index] = front
        return front

    def _chat_delta(self, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.text or delta.logprobs:
            logprobs = _encode(_chat_logprobs(delta.logprobs)) if self._logprobs else _NULL
            events = b"".join(
                (
                    self._front(delta.choice),
                    _encode(delta.text),
                    b'},"logprobs":',
                    logprobs,
                    b',"finish_reason":null}]',
                    self._end,
                )
            )
        if delta.finish is not None:
            events += b'%s,"choices":[{"index":%d,"delta":{},"logprobs":null,%s' % (
                self._start,
                delta.choice,
                self._finish(delta.finish),
            )
        return events

    def _text_delta(self, delta: ChoiceDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish):
            return b""
        logprobs = _encode(_legacy_logprobs(delta.logprobs)) if self._logprobs else _NULL
        parts = (
            self._front(delta.choice),
            _encode(delta.text),
            b',"logprobs":',
            logprobs,
            b",",
            self._finish(delta.finish),
        )
        return b"".join(parts)

    def _finish(self, finish: Finish | None) -> bytes:
        reason = _NULL if finish is None else b'"%s"' % finish.value.encode()
        return b'"finish_reason":%s}]%s' % (reason, self._end)


def answer_document(
    head: AnswerHead,
    request: TextRequest,
    choices: Iterable[ChoiceDelta],
    usage: dict[str, Any],
) -> bytes:
    """Return the one document of an answer that is not streamed. Each choice is one whole delta."""
    rendered: list[dict[str, Any]] = []
    for whole in choices:
        assert whole.finish is not None
        choice: dict[str, Any] = {"index": whole.choice}
        if head.kind is Kind.CHAT:
            choice["message"] = {"role": "assistant", "content": whole.text, "refusal": None}
            wanted = None if request.logprobs is None else _chat_logprobs(whole.logprobs)
        else:
            choice["text"] = whole.text
            wanted = None if request.logprobs is None else _legacy_logprobs(whole.logprobs)
        choice["logprobs"] = wanted
        choice["finish_reason"] = whole.finish.value
        rendered.append(choice)
    return _encode({**head.common(chunk=False), "choices": rendered, "usage": usage})


def embedding_document(
    model: str, vectors: Sequence[Sequence[float]], *, as_base64: bool, prompt_tokens: int
) -> bytes:
    """Return the document of an embedding answer."""
    entries = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64_vector(vector) if as_base64 else list(vector),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode({"object": "list", "data": entries, "model": model, "usage": usage})


def _base64_vector(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_logprob(entry.token, entry.logprob),
                "top_logprobs": [_chat_logprob(token, value) for token, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_logprob(token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.decode_token(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _legacy_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    texts = [tokenizer.decode((entry.token,)) for entry in entries]
    offsets: list[int] = []
    position = 0
    for text in texts:
        offsets.append(position)
        position += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {tokenizer.decode((token,)): value for token, value in entry.top} for entry in entries
        ],
        "text_offset": offsets,
    }
