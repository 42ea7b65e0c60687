"""How long the steps of a simulated engine take, and how much it holds.

One step costs `base + sequence * decoding + prefill_token * prefilled + context_token * attended`
milliseconds: `decoding` sequences grow by a token, `prefilled` prompt tokens are computed, and
`attended` is the total context of the decoding sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Step times and sizes of one model on one device."""

    name: str
    source: str
    licence: str
    base_ms: float
    sequence_ms: float
    prefill_token_ms: float
    context_token_ms: float
    step_tokens: int
    max_sequences: int
    context_tokens: int
    kv_cache_tokens: int
    kv_token_bytes: int
    embedding_dimensions: int
    process_ms: float
    import_ms: float
    engine_init_ms: float
    weights_ms: float
    warm_up_ms: float
    sleep_ms: float
    wake_ms: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_ms") and not value >= 0:
                raise ValueError(f"{self.name}: {field.name} must be 0 or more")
        for name in ("step_tokens", "max_sequences", "context_tokens", "kv_cache_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} must be 1 or more")

    def step_ms(self, *, decoding: int, prefilled: int, attended: int) -> float:
        """Return how long one step takes."""
        return (
            self.base_ms
            + self.sequence_ms * decoding
            + self.prefill_token_ms * prefilled
            + self.context_token_ms * attended
        )


def parse_profile(name: str, values: Mapping[str, object]) -> Profile:
    """Return a profile from its JSON object; a missing or unknown field is a ValueError."""
    expected = {field.name for field in fields(Profile)} - {"name"}
    if missing := expected - values.keys():
        raise ValueError(f"{name}: missing {', '.join(sorted(missing))}")
    if unknown := values.keys() - expected:
        raise ValueError(f"{name}: unknown {', '.join(sorted(unknown))}")
    return Profile(name=name, **values)  # type: ignore[arg-type]
