"""What a caller can make large, and how large it may be. Each is refused by name, with its limit.

The body's own size bounds all that is not named here: it costs time in proportion to its bytes.
What is named costs more than that: sequences, memory per token, or the compiling of a grammar.
"""

from __future__ import annotations

import dataclasses
import re

_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most of each that a request may hold."""

    choices: int = 16
    """Of `n` and `best_of`."""
    answers: int = 2048
    """Prompts times choices."""
    inputs: int = 2048
    """Prompts of a completion; inputs of embeddings and the like; documents to rank."""
    messages: int = 2048
    """Of a conversation, and parts of one message."""
    generated_tokens: int = 1 << 20
    """Of `max_tokens` and what means the same."""
    logprobs: int = 20
    """Candidates per token."""
    stops: int = 16
    """Stop texts."""
    stop_chars: int = 1024
    """Of one stop text."""
    listed_tokens: int = 1024
    """Entries of `logit_bias`, `stop_token_ids`, `allowed_token_ids`, `logprob_token_ids` and
    `bad_words`."""
    tools: int = 128
    """Tools of one request."""
    tools_bytes: int = 256 << 10
    """Of all tools together, as JSON."""
    schema_bytes: int = 128 << 10
    """Of a JSON schema, or whatever else of JSON an answer is held to."""
    schema_depth: int = 64
    """JSON levels of a schema; engines take the square of it in time."""
    schema_properties: int = 512
    """Properties of all objects of a schema together; of optional ones, too, the square."""
    choice_entries: int = 2048
    """Texts of a `choice`, and values of all `enum`s of a schema together."""
    grammar_chars: int = 16 << 10
    """Of a grammar."""
    pattern_chars: int = 2048
    """Of one regular expression."""
    pattern_repeats: int = 10_000
    """What the quantifiers of a regular expression or grammar come to, multiplied where they nest;
    and the largest `maxLength`, `minItems` and the like of a schema."""
    media_hosts: frozenset[str] = frozenset()
    """Hosts, `name` or `name:port`, that a URL of an image, a sound or a video may name; by none,
    only `data:` URLs are taken."""
    media_bytes: int = 12 << 20
    """Of one `data:` URL or of data that stands for itself, in characters."""


BOUNDS = Bounds()
"""The defaults."""


def listed_hosts(text: str) -> frozenset[str]:
    """Hosts from a list with commas, such as `images.example.com, files.example.com:8443`.

    Raises:
        ValueError: an entry is no host.
    """
    hosts = frozenset(filter(None, (entry.strip().lower() for entry in text.split(","))))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"'{host}' is not a host or host:port")
    return hosts
