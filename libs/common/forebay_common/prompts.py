"""What a request's prompt is, written out as `prefixes` names it: the same at every hop.

A router has parsed the body already and calls the functions with its parts; a runner calls
`openai_prompt` with the body. What is no text (media, tools, calls of them) stands as its JSON just
as the caller wrote it: who sends a conversation again writes it the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from forebay.inference.v1.inference_service_pb2 import GenerateRequest
from msgspec import Raw, Struct

from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes

ABSENT = Raw(b"null")
"""What a raw field is that was not given."""


# What JSON makes holds no cycles, so the collector need not look at any of these.
class ContentPart(Struct, gc=False):
    """A part of a message; which fields it has depends on its type."""

    type: str | None = None
    text: str | None = None
    uuid: str | None = None
    """Names media that the engine may have already, and makes it look for media in any part."""
    image_url: Raw = ABSENT
    audio_url: Raw = ABSENT
    video_url: Raw = ABSENT
    input_audio: Raw = ABSENT
    file: Raw = ABSENT
    source: Raw = ABSENT
    input: Raw = ABSENT
    content: Raw = ABSENT


Content: TypeAlias = str | list[str | ContentPart]
Prompts: TypeAlias = str | list[str | int | list[int]]
"""One text, its token ids, or several of either."""


class Turn(Struct, gc=False):
    """A message of a conversation, as far as it makes the prompt."""

    role: str
    content: Content | None = None
    tool_calls: list[Raw] | None = None


class ResponseItem(Struct, gc=False):
    """An entry of `input`: a message, a call of a tool, or what came of it."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None
    arguments: str | None = None
    output: Raw = ABSENT


def is_given(raw: Raw) -> bool:
    """Whether a raw field holds something."""
    return raw is not ABSENT and bytes(raw) != b"null"


def generate_prompt(request: GenerateRequest) -> bytes:
    """The prompt of a call of Generate."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return token_bytes(request.token_ids.ids)
    if kind == "messages":
        return chat_bytes(
            (message.role, (message.content,)) for message in request.messages.messages
        )
    return text_bytes(request.text)


def chat_prompt(messages: Iterable[Turn], tools: Sequence[Raw] | None) -> bytes:
    """The prompt of `/v1/chat/completions`."""
    return chat_bytes(map(_turn, messages), tools=_tool_bytes(tools))


def completion_prompt(prompt: Prompts) -> bytes:
    """The prompt of `/v1/completions`; of several, the first."""
    if isinstance(prompt, str):
        return text_bytes(prompt)
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return text_bytes(first)
    return token_bytes(first if isinstance(first, list) else cast("list[int]", prompt))


def responses_prompt(
    items: str | Sequence[ResponseItem], instructions: str | None, tools: Sequence[Raw] | None
) -> bytes:
    """The prompt of `/v1/responses`, whose `input` the items are."""
    turns: list[tuple[str, Iterable[str]]] = []
    if instructions:
        turns.append(("system", (instructions,)))
    if isinstance(items, str):
        turns.append(("user", (items,)))
    else:
        turns += [(item.role or "", _item_texts(item)) for item in items]
    return chat_bytes(turns, tools=_tool_bytes(tools))


def messages_prompt(
    messages: Iterable[Turn], system: Content | None, tools: Sequence[Raw] | None
) -> bytes:
    """The prompt of Anthropic's `/v1/messages`."""
    turns = list(map(_turn, messages))
    if system:
        turns.insert(0, ("system", _texts(system)))
    return chat_bytes(turns, tools=_tool_bytes(tools))


def openai_prompt(path: str, body: bytes) -> bytes:
    """The prompt of a body of one of these paths; empty for another path, and for a body that none
    of them takes."""
    read = _READ.get(path)
    if read is None:
        return b""
    decode, write = read
    try:
        # Fields that stay raw are not looked into by the decoder.
        if not body.isascii():
            str(body, "utf-8")
        return write(decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
        return b""


def _turn(message: Turn) -> tuple[str, Iterable[str]]:
    content = message.content
    if isinstance(content, str) and not message.tool_calls:
        return message.role, (content,)
    return message.role, (
        *_texts(content),
        *(bytes(call).decode() for call in message.tool_calls or ()),
    )


def _texts(content: Content | None) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for part in content or ():
        if isinstance(part, str):
            yield part
            continue
        if part.text is not None:
            yield part.text
        for field in _OTHER_FIELDS:
            raw: Raw = getattr(part, field)
            if raw is not ABSENT:
                yield bytes(raw).decode()


_OTHER_FIELDS = ContentPart.__struct_fields__[3:]


def _tool_bytes(tools: Sequence[Raw] | None) -> bytes:
    return b",".join(map(bytes, tools)) if tools else b""


def _item_texts(item: ResponseItem) -> Iterator[str]:
    yield from _texts(item.content)
    if item.arguments:
        yield item.arguments
    if is_given(item.output):
        yield bytes(item.output).decode()


class _Chat(Struct, gc=False):
    messages: list[Turn]
    tools: list[Raw] | None = None


class _Completion(Struct, gc=False):
    prompt: Prompts


class _Responses(Struct, gc=False):
    input: str | list[ResponseItem]
    instructions: str | None = None
    tools: list[Raw] | None = None


class _Messages(Struct, gc=False):
    messages: list[Turn]
    system: Content | None = None
    tools: list[Raw] | None = None


_READ: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "/v1/chat/completions": (
        msgspec.json.Decoder(_Chat).decode,
        lambda body: chat_prompt(body.messages, body.tools),
    ),
    "/v1/completions": (
        msgspec.json.Decoder(_Completion).decode,
        lambda body: completion_prompt(body.prompt),
    ),
    "/v1/responses": (
        msgspec.json.Decoder(_Responses).decode,
        lambda body: responses_prompt(body.input, body.instructions, body.tools),
    ),
    "/v1/messages": (
        msgspec.json.Decoder(_Messages).decode,
        lambda body: messages_prompt(body.messages, body.system, body.tools),
    ),
}
