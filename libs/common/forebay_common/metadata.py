"""The metadata keys that travel with a request, as `protos/README.md` lists them."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterable
from typing import TypeAlias

REQUEST_ID = "x-request-id"
MODEL = "forebay-model"
CLASS = "forebay-class"
TENANT = "forebay-tenant"
SESSION = "forebay-session"
ATTEMPT = "forebay-attempt"
PROMPT_TOKENS = "forebay-prompt-tokens"
USAGE = "forebay-usage"
REPLICA = "forebay-replica"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

CLASSES = ("REALTIME", "BATCH", "BACKGROUND")

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request cost."""

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
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            return None
        return cls(*map(int, parts))


def texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The text entries of a call's metadata; the last of a repeated key wins."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def request_id_from(value: str | None) -> str:
    """The caller's request id where it is harmless to repeat and to log, otherwise a new one."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return "req-" + secrets.token_hex(12)
