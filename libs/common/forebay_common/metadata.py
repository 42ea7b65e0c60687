"""The metadata keys that travel with a request, as `protos/README.md` lists them."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Iterable
from typing import TypeAlias

REQUEST_ID = "x-request-id"
SHADOW = "forebay-shadow"
"""Marks a copy whose answer nobody reads."""
MODEL = "forebay-model"
CLASS = "forebay-class"
TENANT = "forebay-tenant"
SESSION = "forebay-session"
ATTEMPT = "forebay-attempt"
PROMPT_TOKENS = "forebay-prompt-tokens"
AUTHORIZATION = "authorization"
PROGRESS = "forebay-progress"
USAGE = "forebay-usage"
REPLICA = "forebay-replica"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

CLASSES = ("REALTIME", "BATCH", "BACKGROUND")

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_USAGE_CHARS_MAX = 64

# Ids have to be unique among processes, not secret, and the system's entropy is a system call each
# time. A forked process would repeat its parent's.
_ids = random.Random()  # noqa: S311
os.register_at_fork(after_in_child=_ids.seed)


@dataclasses.dataclass(slots=True)
class Usage:
    """Tokens a request cost. Not frozen: each request makes one, in a third of the time."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def encode(self) -> str:
        """The value of the trailing `forebay-usage`."""
        return f"{self.prompt_tokens},{self.completion_tokens},{self.cached_tokens}"

    @classmethod
    def decode(cls, value: str) -> Usage | None:
        """Read `forebay-usage`; None when it is malformed."""
        parts = value.split(",")
        if len(parts) != 3 or len(value) > _USAGE_CHARS_MAX:
            return None
        prompt, completion, cached = parts
        if not (prompt.isdecimal() and completion.isdecimal() and cached.isdecimal()):
            return None
        return cls(int(prompt), int(completion), int(cached))


def texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The text entries of a call's metadata; the last of a repeated key wins."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def request_id_from(value: str | None) -> str:
    """The caller's request id where it is harmless to repeat and to log, otherwise a new one."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return f"req-{_ids.getrandbits(96):024x}"
