"""Fit the router's `light` classifier: `python -m bench.classifier.train`.

A logistic regression with a penalty on large weights, on the rows that are not held, by Newton's
method: the same rows always give the same weights. Needs numpy; the router does not.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
from forebay_router.adapters.tier_models import LIGHT_FILE
from forebay_router.core.tiers import CHARACTERS, FEATURES, Light, features

from bench.classifier.labels import read

_PENALTY = 10.0
_STEPS = 30
_SOURCE = (
    "bench/classifier/train.py on bench/data/routing_labels.jsonl: lm-sys/RouteLLM (Apache-2.0), "
    "questions of GSM8K and MMLU (MIT)"
)


def main() -> None:
    """Fit, and write the router's file."""
    rows = [row for row in read() if not row.is_held]
    x = np.array([features(row.prompt[:CHARACTERS]) for row in rows])
    y = np.array([float(row.needs_large) for row in rows])
    means, deviations = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
    weights = _fit(np.hstack([(x - means) / deviations, np.ones((len(rows), 1))]), y)
    model = {
        "means": _rounded(means),
        # Never 0: of what no row has, nothing was learned.
        "deviations": [max(value, 1e-6) for value in _rounded(deviations)],
        "weights": _rounded(weights[:-1]),
        "bias": round(float(weights[-1]), 6),
    }
    scores = [Light(**model, threshold=0.5).score(row.prompt) for row in rows]
    # By itself it sends half of what it was trained on to the small tier.
    document = {
        "source": _SOURCE,
        "features": list(FEATURES),
        **model,
        "threshold": round(statistics.median(scores), 4),
    }
    Path(LIGHT_FILE).write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} rows, threshold {document['threshold']}, written to {LIGHT_FILE.name}")


def _fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    penalty = np.full(x.shape[1], _PENALTY)
    penalty[-1] = 0.0
    weights = np.zeros(x.shape[1])
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - y) + penalty * weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        weights -= np.linalg.solve(curvature, gradient)
    return weights


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


if __name__ == "__main__":
    main()
