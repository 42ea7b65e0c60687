"""From a caller's arguments to messages and metadata; what cannot be sent is refused here."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import Reason
from forebay_common.telemetry import inject
from opentelemetry.context import get_current

from forebay_client.errors import InvalidRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Plain text, token ids of the model's vocabulary, or a conversation."""

Conversation: TypeAlias = str | Sequence[Message] | Sequence[Mapping[str, str]]
"""A single question, or turns, oldest first; mappings have `role` and `content`."""

PriorityClass: TypeAlias = Literal["REALTIME", "BATCH", "BACKGROUND"]


class CallOptions(TypedDict, total=False):
    """How a request travels."""

    timeout_s: float | None
    """Seconds until DeadlineExceeded, for the whole answer; None: no deadline."""
    request_id: str
    """1 to 128 of `A-Za-z0-9._:-`; one is made when absent."""
    session: str
    """Requests of one session prefer one replica, whose cache knows their prefix."""
    priority_class: PriorityClass
    """REALTIME when absent."""
    traceparent: str
    """W3C trace context to continue; OpenTelemetry's current one when absent."""


class GenerateOptions(CallOptions, total=False):
    """How a request travels and how its tokens are sampled. Absent: the model's own default."""

    max_tokens: int
    """Most tokens to generate, 1 or more."""
    temperature: float
    """0 is greedy; at most 2."""
    top_p: float
    """Nucleus mass, above 0 and at most 1."""
    top_k: int
    """Candidates kept; 0 keeps all."""
    seed: int
    """Makes sampling repeatable on one replica."""
    stop: Sequence[str]
    """Texts that end the answer, at most 16; not part of it."""
    presence_penalty: float
    """-2 to 2."""
    frequency_penalty: float
    """-2 to 2."""
    repetition_penalty: float
    """Above 0; 1 is neutral."""
    min_tokens: int
    """Tokens to generate before a stop is honoured."""
    ignore_eos: bool
    """Go on after the end-of-sequence token."""
    logprobs: int
    """Log-probabilities of this many candidates per token, 0 (the chosen one alone) to 20."""


_CALL = frozenset(CallOptions.__annotations__)
_SAMPLING = frozenset(GenerateOptions.__annotations__) - _CALL


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a call carries beside its message."""

    request_id: str
    metadata: md.Metadata
    timeout_s: float | None


def key_metadata(api_key: str | None) -> md.Metadata:
    """How an API key travels.

    Raises:
        InvalidRequest: it cannot be one.
    """
    if api_key is None:
        return ()
    return ((md.AUTHORIZATION, f"Bearer {_header('api_key', api_key.strip())}"),)


def call_of(
    options: Mapping[str, Any],
    *,
    model: str,
    default_timeout_s: float | None,
    credentials: md.Metadata = (),
) -> Call:
    """Read how a request travels. `credentials` are of `key_metadata`.

    Raises:
        InvalidRequest: a value cannot be sent.
        TypeError: an option does not exist.
    """
    unknown = options.keys() - _CALL - _SAMPLING
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    request_id = options.get("request_id") or "req-" + secrets.token_hex(12)
    if md.request_id_from(request_id) != request_id:
        raise _invalid("request_id", "must be 1 to 128 of A-Z a-z 0-9 . _ : -")
    timeout_s = options.get("timeout_s", default_timeout_s)
    if timeout_s is not None and not timeout_s > 0:
        raise _invalid("timeout_s", "must be above 0 seconds")
    metadata = [(md.REQUEST_ID, request_id), *credentials]
    for option, key in (("session", md.SESSION), ("priority_class", md.CLASS)):
        if option in options:
            metadata.append((key, _header(option, options[option])))
    if "priority_class" in options and options["priority_class"] not in md.CLASSES:
        raise _invalid("priority_class", f"must be one of {', '.join(md.CLASSES)}")
    if not 1 <= len(model) <= 200:
        raise _invalid("model", "must have 1 to 200 characters")
    if "traceparent" in options:
        metadata.append((md.TRACEPARENT, _header("traceparent", options["traceparent"])))
    else:
        metadata.extend(inject(get_current()))
    return Call(request_id, tuple(metadata), timeout_s)


def _header(option: str, value: str) -> str:
    if not value or len(value) > 512 or not value.isascii() or not value.isprintable():
        raise _invalid(option, "must be 1 to 512 printable ASCII characters")
    return value


def generate_request(model: str, prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Build the message of `Generate`.

    Raises:
        InvalidRequest: the prompt is of no known form, or an option has no such value.
    """
    request = pb.GenerateRequest(model=model)
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise _invalid("prompt", "must not be empty")
    elif all(isinstance(part, Message) for part in prompt):
        request.messages.messages.extend(
            pb.ChatMessage(role=turn.role, content=turn.content)
            for turn in prompt
            if isinstance(turn, Message)
        )
    else:
        request.token_ids.ids.extend(_token_ids("prompt", prompt))
    sampling = {name: options[name] for name in _SAMPLING & options.keys()}
    for name, value in sampling.items():
        try:
            if name == "stop":
                request.sampling.stop.extend([value] if isinstance(value, str) else value)
            else:
                setattr(request.sampling, name, value)
        except (TypeError, ValueError):
            raise _invalid(name, f"has no such value: {value!r}") from None
    return request


def conversation(messages: Conversation) -> tuple[Message, ...]:
    """The turns of a conversation, however they were written.

    Raises:
        InvalidRequest: there is none, or one lacks `role` or `content`.
    """
    if isinstance(messages, str):
        return (Message("user", messages),)
    turns: list[Message] = []
    for turn in messages:
        if isinstance(turn, Message):
            turns.append(turn)
        elif isinstance(turn, Mapping) and turn.keys() == {"role", "content"}:
            turns.append(Message(turn["role"], turn["content"]))
        else:
            raise _invalid("messages", "each must be a Message, or have `role` and `content` only")
    if not turns:
        raise _invalid("messages", "must hold at least one")
    return tuple(turns)


def embed_request(model: str, inputs: str | Sequence[str | Sequence[int]]) -> pb.EmbedRequest:
    """Build the message of `Embed`.

    Raises:
        InvalidRequest: there is no input, or one is neither text nor token ids.
    """
    request = pb.EmbedRequest(model=model)
    for one in [inputs] if isinstance(inputs, str) else inputs:
        if isinstance(one, str):
            request.inputs.add(text=one)
        else:
            request.inputs.add(token_ids=pb.TokenIds(ids=_token_ids("inputs", one)))
    if not request.inputs:
        raise _invalid("inputs", "must hold at least one")
    return request


def _token_ids(param: str, ids: Any) -> list[int]:
    try:
        return list(pb.TokenIds(ids=ids).ids)
    except (TypeError, ValueError):
        raise _invalid(
            param, "must be text, token ids (whole numbers from 0), or messages"
        ) from None


def _invalid(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_ARGUMENT, f"{param}: {problem}", param=param)
