"""Reads what must be known of an artifact on disk before a runner opens it."""

import hashlib
import json
import os
from pathlib import Path

from forebay_engine.core.artifact import find_problem
from forebay_engine.core.refusal import Refused

_FILES_MAX = 10_000
_CONFIG_BYTES_MAX = 4 << 20


def check_artifact(path: str) -> str:
    """Return an artifact's identity, which changes when its files do.

    Blocks on the disk. Raises Refused ARTIFACT_INVALID; the message names no path outside of it.
    """
    root = Path(path)
    if not path or not root.is_dir():
        raise Refused("ARTIFACT_INVALID", "The artifact's directory does not exist on this host.")
    sizes: dict[str, int] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            file = Path(folder, name)
            sizes[file.relative_to(root).as_posix()] = file.stat().st_size
            if len(sizes) > _FILES_MAX:
                raise Refused("ARTIFACT_INVALID", f"The artifact has over {_FILES_MAX} files.")
    text = _read_config(root)
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if problem := find_problem(sizes, config if isinstance(config, dict) else None):
        raise Refused("ARTIFACT_INVALID", problem)
    digest = hashlib.sha256(text)
    for name in sorted(sizes):
        digest.update(f"\n{name}\t{sizes[name]}".encode())
    return digest.hexdigest()


def _read_config(root: Path) -> bytes:
    try:
        with (root / "config.json").open("rb") as file:
            return file.read(_CONFIG_BYTES_MAX)
    except OSError:
        return b""
