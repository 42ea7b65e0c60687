"""The step-time profiles that come with the package."""

import json
from importlib import resources

from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated.profile import Profile, parse_profile

_FOLDER = resources.files("forebay_engine") / "profiles"


def profile_names() -> list[str]:
    """Return the names that can be asked for."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _FOLDER.iterdir()
        if entry.name.endswith(".json")
    )


def load_profile(name: str) -> Profile:
    """Return a profile by name; an unknown one is Refused with the names there are."""
    names = profile_names()
    if name not in names:
        raise Refused(
            "INVALID_ARGUMENT",
            f"There is no such profile; there are: {', '.join(names)}.",
            param="profile",
        )
    return parse_profile(name, json.loads((_FOLDER / f"{name}.json").read_text("utf-8")))
