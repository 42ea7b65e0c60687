"""API keys: how they look, and how they are hashed.

A key is `fb-ID.SECRET`. The id is public and finds the record; what is stored of the secret is a
hash, keyed with a secret that every router reads from a file and no store holds. So a copy of the
store lets nobody in, and no record can be made without the file. The file is worth an admin's key.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

PREFIX = "fb-"
_ID_BYTES = 8
_SECRET_BYTES = 32
_SECRET_CHARS_MIN = 32
_TEXT = re.compile(r"fb-([a-z2-7]{13})\.([A-Za-z0-9_-]{43})")
_ROUTERS = b"forebay: spoken among routers"
_OPERATOR = b"forebay: whoever holds the file"
OPERATOR_PREFIX = "fbo-"


@dataclasses.dataclass(frozen=True, slots=True)
class KeySecret:
    """What hashes are keyed with."""

    secret_id: str
    """Names it in records without telling it."""
    value: bytes = dataclasses.field(repr=False)

    def hash(self, text: str) -> bytes:
        """The hash of a key's text, 32 bytes."""
        return hashlib.blake2b(text.encode(), digest_size=32, key=self.value).digest()


class KeySecrets:
    """The secrets of a fleet: the first makes new hashes, all of them check."""

    def __init__(self, secrets_: Sequence[KeySecret]) -> None:
        self._by_id = {secret.secret_id: secret for secret in secrets_}
        self.newest = secrets_[0]

    def find(self, secret_id: str) -> KeySecret | None:
        """The secret of that name."""
        return self._by_id.get(secret_id)

    def router_token(self) -> str:
        """What routers show to one another."""
        return _token("fbr-", _ROUTERS, self.newest)

    def is_router_token(self, text: str) -> bool:
        """Whether a router of this fleet made it."""
        return self._is_token(text, "fbr-", _ROUTERS)

    def operator_token(self) -> str:
        """What whoever holds the file shows to make the first keys: it may do what an admin's key
        may, but ask no model. It is stored nowhere, and ends with the secret it is made of."""
        return _token(OPERATOR_PREFIX, _OPERATOR, self.newest)

    def is_operator_token(self, text: str) -> bool:
        """Whether a holder of the file made it."""
        return self._is_token(text, OPERATOR_PREFIX, _OPERATOR)

    def _is_token(self, text: str, prefix: str, purpose: bytes) -> bool:
        given = text.encode()
        matches = False
        for secret in self._by_id.values():
            matches |= hmac.compare_digest(given, _token(prefix, purpose, secret).encode())
        return matches


def read_secrets(text: str) -> KeySecrets:
    """Read a file of secrets: one per line, the newest first; lines that begin with # are skipped.

    Raises:
        ValueError: there is none, or one is shorter than 32 characters.
    """
    lines = [line.strip() for line in text.splitlines()]
    values = [line for line in lines if line and not line.startswith("#")]
    if not values:
        raise ValueError("holds no secret")
    if any(len(value) < _SECRET_CHARS_MIN for value in values):
        raise ValueError(f"holds a secret of fewer than {_SECRET_CHARS_MIN} characters")
    return KeySecrets([_secret(value) for value in values])


def new_secret() -> str:
    """A line for a file of secrets."""
    return secrets.token_urlsafe(48)


def _token(prefix: str, purpose: bytes, secret: KeySecret) -> str:
    digest = hashlib.blake2b(purpose, digest_size=32, key=secret.value).digest()
    return prefix + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _secret(value: str) -> KeySecret:
    # BLAKE2b takes keys of up to 64 bytes.
    key = hashlib.blake2b(value.encode(), digest_size=64).digest()
    return KeySecret(hashlib.blake2b(b"forebay: id", digest_size=6, key=key).hexdigest(), key)


def new_key() -> tuple[str, str]:
    """A new key: its id, and its text."""
    key_id = base64.b32encode(secrets.token_bytes(_ID_BYTES)).rstrip(b"=").lower().decode()
    return key_id, f"{PREFIX}{key_id}.{secrets.token_urlsafe(_SECRET_BYTES)}"


def key_id_of(text: str) -> str | None:
    """The id in a key's text; None for what is no key."""
    match = _TEXT.fullmatch(text)
    return match[1] if match is not None else None
