"""The bodies of the OpenAI protocol, and of Anthropic's messages, as far as they are looked at.

Fields that are not named here pass through untouched and are judged by the engine. What is only
looked at by its size, or only where there is a reason to, stays `Raw`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeAlias, cast

from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes
from msgspec import Meta, Raw, Struct

from forebay_router.core.wanted import MAX_MODEL_CHARS

ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
AboveZero: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1)]
Stops: TypeAlias = str | list[str]
Prompts: TypeAlias = str | list[str | int | list[int]]
"""One text, its token ids, or several of either."""

ABSENT = Raw(b"null")
"""What a raw field is that was not given."""


# What JSON makes holds no cycles, so the collector need not look at any of these.
class StreamOptions(Struct, gc=False):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, gc=False):
    """`structured_outputs`: what the answer must match."""

    json: Raw = ABSENT
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None


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

    @property
    def is_text(self) -> bool:
        """Whether no engine finds media in it."""
        return self.type in _TEXT_TYPES and self.uuid is None


_TEXT_TYPES = frozenset(
    (
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_reference",
    )
)

Content: TypeAlias = str | list[str | ContentPart]


class Message(Struct, gc=False):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1)]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[Raw] | None = None
    tool_call_id: str | None = None


class Ranked(Struct, gc=False):
    """An input of a score that has parts."""

    content: list[ContentPart]


class Sampling(Struct, kw_only=True, gc=False):
    """What all that generate have in common."""

    model: ModelName
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    kv_transfer_params: Raw = ABSENT
    ec_transfer_params: Raw = ABSENT


class Steering(Sampling, kw_only=True, gc=False):
    """What chat, completions and responses have in common."""

    seed: int | None = None
    stop: Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: AboveZero | None = None
    min_p: Share | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None


class Choosing(Steering, kw_only=True, gc=False):
    """What chat and completions have in common."""

    stream_options: StreamOptions | None = None
    n: AtLeastOne | None = None
    min_tokens: NotNegative | None = None
    prompt_logprobs: NotNegative | None = None
    allowed_token_ids: list[NotNegative] | None = None
    logprob_token_ids: list[NotNegative] | None = None
    bad_words: list[str] | None = None
    response_format: Raw = ABSENT


class ChatBody(Choosing, kw_only=True, gc=False):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NotNegative | None = None
    tools: list[Raw] | None = None
    parallel_tool_calls: bool | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        return chat_bytes(map(_turn, self.messages), tools=_tool_bytes(self.tools))

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _asked_last(self.messages)


class CompletionBody(Choosing, kw_only=True, gc=False):
    """`/v1/completions`."""

    prompt: Prompts
    max_tokens: NotNegative | None = None
    """0 asks for the prompt alone, with `echo`."""
    best_of: AtLeastOne | None = None
    logprobs: NotNegative | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return text_bytes(prompt)
        first = prompt[0]
        if isinstance(first, str):
            return text_bytes(first)
        return token_bytes(first if isinstance(first, list) else cast("list[int]", prompt))

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _prompt_texts(self.prompt)


class ResponseItem(Struct, gc=False):
    """An entry of `input`: a message, a call of a tool, or what came of it."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None
    arguments: str | None = None
    output: Raw = ABSENT


class ResponsesBody(Steering, kw_only=True, gc=False):
    """`/v1/responses`."""

    input: str | list[ResponseItem]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    top_logprobs: NotNegative | None = None
    tools: list[Raw] | None = None
    text: Raw = ABSENT
    previous_response_id: str | None = None
    background: bool | None = None

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        turns: list[tuple[str, Iterable[str]]] = []
        if self.instructions:
            turns.append(("system", (self.instructions,)))
        if isinstance(self.input, str):
            turns.append(("user", (self.input,)))
        else:
            turns += [(item.role or "", _item_texts(item)) for item in self.input]
        return chat_bytes(turns, tools=_tool_bytes(self.tools))

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return (self.input,) if isinstance(self.input, str) else _asked_last(self.input)


class MessagesBody(Sampling, kw_only=True, gc=False):
    """`/v1/messages`, and `/v1/messages/count_tokens` with a `max_tokens` of its own."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: AtLeastOne
    system: Content | None = None
    stop_sequences: list[str] | None = None
    tools: list[Raw] | None = None
    output_config: Raw = ABSENT

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        turns = list(map(_turn, self.messages))
        if self.system:
            turns.insert(0, ("system", _prefix_texts(self.system)))
        return chat_bytes(turns, tools=_tool_bytes(self.tools))

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _asked_last(self.messages)


class CountBody(MessagesBody, kw_only=True, gc=False):
    """`/v1/messages/count_tokens`."""

    max_tokens: AtLeastOne = 1


class _Unprefixed(Struct, gc=False):
    """What no engine keeps anything of."""

    def prefix_bytes(self) -> bytes:
        """See `forebay_router.core.wanted.Prompt`."""
        return b""


class PooledBody(_Unprefixed, kw_only=True, gc=False):
    """`/v1/embeddings`, `/pooling` and `/classify`: an input or a conversation."""

    model: ModelName
    input: Prompts | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    dimensions: AtLeastOne | None = None
    encoding_format: str | None = None
    user: str | None = None

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _asked_last(self.messages) if self.messages else _prompt_texts(self.input or "")


ScoreInput: TypeAlias = str | Ranked
ScoreInputs: TypeAlias = str | Ranked | list[str | Ranked]


class RerankBody(_Unprefixed, kw_only=True, gc=False):
    """`/rerank`, `/v1/rerank` and `/v2/rerank`."""

    model: ModelName
    query: ScoreInput
    documents: ScoreInputs
    top_n: NotNegative | None = None

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return score_texts(self.query)


class ScoreBody(_Unprefixed, kw_only=True, gc=False):
    """`/score` and `/v1/score`, in any of the four spellings that vLLM takes."""

    model: ModelName
    queries: ScoreInputs | None = None
    documents: ScoreInputs | None = None
    items: ScoreInputs | None = None
    data_1: ScoreInputs | None = None
    data_2: ScoreInputs | None = None
    text_1: ScoreInputs | None = None
    text_2: ScoreInputs | None = None

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return score_texts(self.queries or self.data_1 or self.text_1 or "")


class TokenizeBody(_Unprefixed, kw_only=True, gc=False):
    """`/tokenize`: a prompt or a conversation."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Raw] | None = None

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _asked_last(self.messages) if self.messages else (self.prompt or "",)


class DetokenizeBody(_Unprefixed, kw_only=True, gc=False):
    """`/detokenize`."""

    model: ModelName
    tokens: list[NotNegative]

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return ()


def is_given(raw: Raw) -> bool:
    """Whether a raw field holds something."""
    return raw is not ABSENT and bytes(raw) != b"null"


def content_texts(content: Content | None) -> Iterator[str]:
    """The texts of a message."""
    if isinstance(content, str):
        yield content
        return
    for part in content or ():
        if isinstance(part, str):
            yield part
        elif part.text is not None:
            yield part.text


def score_texts(inputs: ScoreInputs) -> Iterator[str]:
    """The texts of one side of a score."""
    for entry in inputs if isinstance(inputs, list) else (inputs,):
        if isinstance(entry, str):
            yield entry
        else:
            yield from (part.text for part in entry.content if part.text is not None)


def _asked_last(messages: Sequence[Message | ResponseItem]) -> Iterable[str]:
    for message in reversed(messages):
        if message.role == "user":
            return content_texts(message.content)
    return content_texts(messages[-1].content) if messages else ()


def _turn(message: Message) -> tuple[str, Iterable[str]]:
    """A message as prefixes are named.

    What is no text, and each call of a tool, stands as its JSON as the caller wrote it: who sends a
    conversation again writes it the same.
    """
    content = message.content
    if isinstance(content, str) and not message.tool_calls:
        return message.role, (content,)
    return message.role, (
        *_prefix_texts(content),
        *(bytes(call).decode() for call in message.tool_calls or ()),
    )


def _prefix_texts(content: Content | None) -> Iterator[str]:
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


def _tool_bytes(tools: list[Raw] | None) -> bytes:
    return b",".join(map(bytes, tools)) if tools else b""


def _item_texts(item: ResponseItem) -> Iterator[str]:
    yield from _prefix_texts(item.content)
    if item.arguments:
        yield item.arguments
    if is_given(item.output):
        yield bytes(item.output).decode()


def _prompt_texts(prompt: Prompts) -> Iterable[str]:
    if isinstance(prompt, str):
        return (prompt,)
    return (entry for entry in prompt if isinstance(entry, str))
