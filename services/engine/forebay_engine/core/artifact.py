"""Which artifacts may be loaded: safetensors weights and plain configuration, no code.

A pickle runs code when it is read, and so do Python files that a configuration points to. Both are
refused by name, before anything opens them.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"})
_CODE = frozenset({".py", ".so", ".pyc"})
_REQUIRED = ("config.json",)


def find_problem(names: Iterable[str], config: Mapping[str, object] | None) -> str | None:
    """Return what is wrong with an artifact, or None.

    Args:
        names: every file's path inside the artifact.
        config: the parsed `config.json`, None when there is none or it is not an object.
    """
    listed = sorted(names)
    for name in listed:
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in _PICKLES:
            return f"It holds '{name}', which may run code when read. Use safetensors."
        if suffix in _CODE:
            return f"It holds '{name}'. Models that bring their own code are not loaded."
    for name in _REQUIRED:
        if name not in listed or config is None:
            return f"It has no readable '{name}'."
    if not any(name.endswith(".safetensors") for name in listed):
        return "It has no safetensors weights."
    if "auto_map" in config:  # type: ignore[operator]  # checked above: config is not None here
        return "Its configuration points to code ('auto_map'), which is not loaded."
    return None
