"""Names of model versions: `name@version`."""

import re

from forebay_engine.core.refusal import Refused

_MODEL_VERSION = re.compile(r"[a-z0-9._-]{1,64}@[a-z0-9._-]{1,64}")


def check_model_version(model_version: str) -> None:
    """Raise Refused INVALID_ARGUMENT unless the name is `name@version` of harmless characters."""
    if _MODEL_VERSION.fullmatch(model_version) is None:
        raise Refused(
            "INVALID_ARGUMENT",
            "A model version is `name@version`, each 1 to 64 of a-z, 0-9, '.', '_' and '-'.",
            param="model_version",
        )
