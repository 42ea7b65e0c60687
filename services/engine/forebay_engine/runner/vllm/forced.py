"""Runs inside vLLM's workers, which load it as a logits processor: makes them say given tokens.

All other tokens get the logit -inf, after every other processor and before the sampler: so whatever
depends on the tokens, the steps or the draws of a seeded generator becomes what it was when they
were first said.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "forebay_forced"
"""The key in a request's `extra_args`, whose value is a list of token ids."""


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM has no type information
    """Lets only the next of the given tokens through while there is one."""

    def is_argmax_invariant(self) -> bool:
        """It is not: greedy requests are forced as well."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Any], Any] | None:
        """Return what forces a request; None for nearly all of them."""
        forced = (params.extra_args or {}).get(FORCED)
        return _forcing(forced) if forced else None


def _forcing(forced: list[int]) -> Callable[[list[int], Any], Any]:
    def force(said: list[int], logits: Any) -> Any:
        at = len(said)
        if at < len(forced):
            logits.fill_(float("-inf"))
            logits[forced[at]] = 0.0
        return logits

    return force
