"""Names of models, versions and aliases: `[a-z0-9._-]{1,64}`, and not of dots alone.

They become parts of keys, of file names and of metadata, so nothing else gets in.
"""

from __future__ import annotations

import re

from forebay_registry.core.refusal import RefusedError

_NAME = re.compile(r"[a-z0-9._-]{1,64}")


def is_name(text: str) -> bool:
    """Whether a text can name a model, a version or an alias."""
    return _NAME.fullmatch(text) is not None and text.strip(".") != ""


def check_name(text: str, *, param: str) -> str:
    """The text itself; RefusedError with INVALID_ARGUMENT when it is no name."""
    if not is_name(text):
        raise RefusedError(
            "INVALID_ARGUMENT",
            f"{param} must be 1 to 64 of a-z, 0-9, '.', '_' and '-', and not only dots.",
            param=param,
        )
    return text


def split_target(target: str, *, param: str) -> tuple[str, str | None]:
    """The parts of `name` or `name@version`; RefusedError (INVALID_ARGUMENT) for other texts."""
    name, at, version = target.partition("@")
    check_name(name, param=param)
    if not at:
        return name, None
    return name, check_name(version, param=param)
