"""The bodies of the OpenAI protocol, and of Anthropic's messages, as far as they are looked at.

Fields that are not named here pass through untouched and are judged by the engine. What is only
looked at by its size, or only where there is a reason to, stays `Raw`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeAlias

from forebay_common.prompts import (
    ABSENT,
    Content,
    ContentPart,
    Prompts,
    ResponseItem,
    Turn,
    chat_prompt,
    completion_prompt,
    messages_prompt,
    responses_prompt,
)
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


class Message(Turn, gc=False):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1)]
    name: str | None = None
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
        return chat_prompt(self.messages, self.tools)

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
        return completion_prompt(self.prompt)

    def texts(self) -> Iterable[str]:
        """See `forebay_router.core.wanted.Prompt`."""
        return _prompt_texts(self.prompt)


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
        return responses_prompt(self.input, self.instructions, self.tools)

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
        return messages_prompt(self.messages, self.system, self.tools)

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


def is_text(part: ContentPart) -> bool:
    """Whether no engine finds media in a part."""
    return part.type in _TEXT_TYPES and part.uuid is None


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


def _prompt_texts(prompt: Prompts) -> Iterable[str]:
    if isinstance(prompt, str):
        return (prompt,)
    return (entry for entry in prompt if isinstance(entry, str))
