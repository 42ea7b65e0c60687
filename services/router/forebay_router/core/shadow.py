"""Copies of requests for a version that is being tried: which, and how its answers compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from forebay.inference.v1 import inference_service_pb2 as pb
from google.protobuf.message import DecodeError

SUCCEEDED = "succeeded"
_DRAWS = 1 << 32
# Another hash than that of splits: copies are drawn from all versions alike.
_KEY = b"shadow"


@dataclasses.dataclass(frozen=True, slots=True)
class Shadow:
    """What a model's requests are copied to."""

    model_version: str
    """`name@version`."""
    share: float
    """Of the requests, 0 to 1."""

    def takes(self, request_id: str) -> bool:
        """Whether a request is copied: every router says the same."""
        digest = hashlib.blake2b(request_id.encode(), digest_size=4, key=_KEY).digest()
        return int.from_bytes(digest, "big") < self.share * _DRAWS


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """How one version answered a request."""

    outcome: str
    """`succeeded`, or the reason of the error."""
    took_s: float
    first_s: float | None = None
    """To the first message."""
    completion_tokens: int | None = None
    tokens: Mapping[int, Sequence[int]] | None = None
    """By choice; None where the answer does not tell them."""


def compare(primary: Answered, copy: Answered) -> Iterator[tuple[str, bool]]:
    """In what two answers can be compared, and whether they are the same in it."""
    yield "outcome", primary.outcome == copy.outcome
    if primary.outcome != SUCCEEDED or copy.outcome != SUCCEEDED:
        return
    if primary.completion_tokens is not None and copy.completion_tokens is not None:
        yield "completion_tokens", primary.completion_tokens == copy.completion_tokens
    if primary.tokens and copy.tokens:
        yield "tokens", primary.tokens == copy.tokens


def tokens_of(
    messages: Sequence[bytes] | None, *, is_openai: bool
) -> Mapping[int, Sequence[int]] | None:
    """The tokens of an answer by choice; None where it does not tell them.

    Args:
        messages: all of its encoded messages, where they were kept.
        is_openai: they are of CallOpenAI; else of Generate.
    """
    if not messages:
        return None
    found: dict[int, list[int]] = {}
    try:
        for message in messages:
            if is_openai:
                for choice in pb.CallOpenAIResponse.FromString(message).tokens:
                    found.setdefault(choice.index, []).extend(choice.token_ids)
            else:
                found.setdefault(0, []).extend(pb.GenerateResponse.FromString(message).token_ids)
    except DecodeError:
        return None
    return {index: tuple(tokens) for index, tokens in found.items() if tokens} or None
