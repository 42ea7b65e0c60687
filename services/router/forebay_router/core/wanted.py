"""What a request asks for, once it has been checked. Nothing downstream checks it again.

What few requests need, or only after a failure, is made when it is asked for, from the parsed
request that is kept here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Protocol

MAX_MODEL_CHARS = 200
_CHARS_PER_TOKEN = 4
_DIGEST_BYTES = 16


class Prompt(Protocol):
    """What a request gives the model to read."""

    def prefix_bytes(self) -> bytes:
        """The prompt as `forebay_common.prefixes` names it; empty where no engine keeps any of it.

        Of several prompts, the first.
        """

    def texts(self) -> Iterable[str]:
        """The texts of what was asked last: a conversation's last message of the user, or the whole
        prompt. None where it is token ids."""


@dataclasses.dataclass(slots=True, eq=False)
class Wanted:
    """A checked request. Not frozen: every request makes one, in a third of the time."""

    model: str
    operation: str
    """As the attribute `gen_ai.operation.name` has it."""
    prompt_tokens: int
    """Estimated where the prompt is text. Of all prompts together, each once."""
    prompt: Prompt
    max_tokens: int | None = 0
    """Most tokens of each answer; None where only the model's context bounds it, 0 where nothing is
    generated."""
    answers: int = 1
    """How many are generated: prompts times choices."""
    streams: bool = False
    is_resumable: bool = False
    """Its answer tells the tokens it holds, so that another replica can go on from them."""

    def question(self, characters: int) -> str:
        """What was asked last, for a classifier.

        Of a text longer than `characters`, its first and its last half of them: what is wanted
        stands at the beginning or at the end.
        """
        text = "\n".join(self.prompt.texts())
        if len(text) <= characters:
            return text
        half = characters // 2
        return text[:half] + text[len(text) - (characters - half) :]


def estimate_tokens(characters: int) -> int:
    """Tokens of a text, by the usual four characters each; no tokenizer is at hand here."""
    return characters // _CHARS_PER_TOKEN + 1


def digest_of(message: bytes, model_version: str, *, key: bytes) -> bytes:
    """A name for a request that ends runners, 16 bytes, for what sends the same again.

    Args:
        message: the encoded request.
        model_version: what was to answer it: the same may do no harm to another version.
        key: 16 to 64 bytes that callers do not know, so that none makes another's name.
    """
    digest = hashlib.blake2b(model_version.encode(), key=key, digest_size=_DIGEST_BYTES)
    digest.update(b"\x00")
    digest.update(message)
    return digest.digest()
