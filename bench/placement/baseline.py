"""This router with another rule of placement: `python -m bench.placement.baseline RULE`.

What is compared is then the rule alone: the same relay, the same reports, the same back ends.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

from forebay_router import __main__ as router
from forebay_router import app
from forebay_router.core.place import NOTHING, Ask, Draw, Exclusions, Placement, Placer

Rule = Callable[[Placer, Sequence[str], Draw], str]


def _round_robin() -> Rule:
    turns = itertools.count()
    return lambda placer, names, draw: names[next(turns) % len(names)]


def _least_loaded() -> Rule:
    def choose(placer: Placer, names: Sequence[str], draw: Draw) -> str:
        least = min(placer.in_flight(name) for name in names)
        able = [name for name in names if placer.in_flight(name) == least]
        return able[draw.randrange(len(able))]

    return choose


RULES: dict[str, Callable[[], Rule]] = {
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
}


def placer_of(rule: Rule) -> type[Placer]:
    """A placer that chooses by a rule among those that can take the request."""

    class Ruled(Placer):
        def choose(
            self, ask: Ask, now: float, draw: Draw, exclusions: Exclusions = NOTHING
        ) -> Placement:
            # Without a prompt, there are no prefixes to look for.
            ask.names = ()
            usual = super().choose(ask, now, draw, exclusions)
            able = sorted(one.replica_id for one in usual.candidates if one.excluded is None)
            if not able:
                return usual
            name = rule(self, able, draw)
            tried = tuple(other for other in able if other != name)
            return super().choose(ask, now, draw, Exclusions(tried=tried))

    return Ruled


def main(name: str) -> None:
    """Run the router with a rule."""
    vars(app)["Placer"] = placer_of(RULES[name]())
    router.main()


if __name__ == "__main__":
    main(sys.argv[1])
