"""Recorded canary answers: one small file per artifact and engine."""

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from forebay_engine.core.canary import Canary


class CanaryStore:
    """The answers that this host recorded. Its methods block on the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, identity: str) -> Canary | None:
        """Return the recorded answer; None when there is none, or none that can be read."""
        try:
            return msgspec.json.decode(self._path(identity).read_bytes(), type=Canary)
        except (OSError, msgspec.DecodeError):
            return None

    def record(self, identity: str, canary: Canary) -> None:
        """Keep an answer: whole or not at all."""
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._directory)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(canary))
        Path(name).replace(self._path(identity))

    def _path(self, identity: str) -> Path:
        return self._directory / f"{identity}.json"


def identify(parts: Iterable[str]) -> str:
    """Return one name for everything that decides what a model answers."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def default_directory() -> Path:
    """Return where answers are kept unless configured."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "forebay" / "canaries"
