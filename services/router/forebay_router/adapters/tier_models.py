"""The classifiers of tiers that come with the router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from forebay_router.core.tiers import FEATURES, Classifier, Light, Rules

LIGHT_FILE = Path(__file__).parents[1] / "data" / "tiers_light.json"


def load_classifiers() -> Mapping[str, Classifier]:
    """All of them by name.

    Raises:
        ValueError: the trained model's file does not fit this router.
    """
    document = json.loads(LIGHT_FILE.read_text())
    if tuple(document["features"]) != FEATURES:
        raise ValueError(f"{LIGHT_FILE.name} was made for other features")
    fields = ("means", "deviations", "weights", "bias", "threshold")
    light = Light(**{field: document[field] for field in fields})
    return {"rules": Rules(), "light": light}
