"""Names for the beginnings of prompts, made of their text: router and runner agree on them, and the
router needs no tokenizer.

A prompt is written out as bytes in one fixed way, and the hash of everything up to each of some
fixed lengths is the name of that prefix. Two prompts share a name exactly as far as they share
their text, so the deepest common one is found by bisection. Nothing secret hangs on a name: who
makes two prompts collide only misleads the router's estimate of his own prompt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import xxhash

_SPANS = ((16 << 10, 256), (128 << 10, 1 << 10), (1 << 20, 4 << 10))
"""Up to so many bytes, a prefix ends every so many: fine where prompts differ, and few in all."""


def _lengths() -> tuple[int, ...]:
    lengths: list[int] = []
    length = 0
    for end, step in _SPANS:
        while length < end:
            length += step
            lengths.append(length)
    return tuple(lengths)


LENGTHS: Sequence[int] = _lengths()
"""Bytes of prompt at which prefixes end, growing. What lies beyond the last is not told apart."""

_ROLE, _TEXT, _TOOLS = b"\x01", b"\x02", b"\x03"


def text_bytes(text: str) -> bytes:
    """A prompt that is plain text."""
    return text.encode("utf-8", "surrogatepass")


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """A prompt that is token ids: four bytes each, so that none is cut at a prefix's end."""
    return array("I", token_ids).tobytes()


def chat_bytes(messages: Iterable[tuple[str, Iterable[str]]], *, tools: bytes = b"") -> bytes:
    """A conversation.

    Args:
        messages: role and texts of each message, oldest first. A part that is no text stands as
            whatever names it, such as its URL.
        tools: the tools as compact JSON, which templates put before everything else.
    """
    parts: list[bytes] = [_TOOLS, tools] if tools else []
    for role, texts in messages:
        parts += (_ROLE, text_bytes(role), _TEXT, *map(text_bytes, texts))
    return b"".join(parts)


def prefix_hashes(prompt: bytes) -> list[int]:
    """The names of a prompt's prefixes, shortest first: one for each of `LENGTHS` that it reaches.

    Costs about 0.3 µs per prefix and 0.1 ms per MiB.
    """
    running = xxhash.xxh3_64()
    view = memoryview(prompt)
    hashes: list[int] = []
    start = 0
    for end in LENGTHS[: bisect_right(LENGTHS, len(prompt))]:
        running.update(view[start:end])
        hashes.append(running.intdigest())
        start = end
    return hashes
