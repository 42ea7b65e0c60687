"""What it costs to choose a replica: 10 to 1,000 replicas, prompts of 1k to 100k tokens.

A decision is what the router does between a checked request and a sent one: name the prompt's
prefixes, compare replicas, choose, and take the place. Each figure is of requests in a steady
state: caches are full, half of each prompt is one of a few common ones, replicas report, requests
begin and end. One process, the router's own cores, real chat bodies.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

from forebay_common.prefixes import prefix_hashes
from forebay_router.core.openai import check_openai
from forebay_router.core.place import Ask, Exclusions, ModelLoad, Options, Placer, Replica, Ticket
from forebay_router.core.wanted import Wanted

from bench.report import Report

REPLICAS = (10, 100, 1000)
PROMPT_TOKENS = (1_000, 16_000, 100_000)
DECISIONS = 2_000
ROUNDS = 3
GOAL_RATIO, GOAL_LONGEST_US = 2.0, 1000.0
_MODEL = "chat@1"
_BODIES = 40
_WORDS = "the river rises over stone and mill while rain keeps falling on the old wooden bridge"


def main(report: Report) -> None:
    """See the module."""
    found: dict[tuple[int, int], list[float]] = {}
    rng = random.Random(7)
    bodies = {tokens: _bodies(tokens, rng) for tokens in PROMPT_TOKENS}
    # Rounds are interleaved, so that a busy moment of the machine does not meet one line alone.
    for _ in range(ROUNDS):
        for tokens in PROMPT_TOKENS:
            for replicas in REPLICAS:
                took = _measure(replicas, bodies[tokens], rng)
                found.setdefault((replicas, tokens), []).extend(took)
    rows = []
    for (replicas, tokens), took in sorted(found.items()):
        naming = _naming_us(bodies[tokens])
        p50, p99 = _quantile(took, 0.5), _quantile(took, 0.99)
        rows.append((replicas, tokens, p50, p99, naming))
        report.figure(
            f"{replicas}_replicas_{tokens}_tokens_us", {"p50": p50, "p99": p99, "naming": naming}
        )
    report.table(("replicas", "prompt tokens", "p50 us", "p99 us", "of it naming p50 us"), rows)
    by = {(row[0], row[1]): row for row in rows}
    for tokens in PROMPT_TOKENS:
        ratio = by[1000, tokens][2] / by[10, tokens][2]
        report.goal(
            f"1,000 replicas against 10, p50, {tokens} tokens",
            ratio,
            f"<= {GOAL_RATIO:g}",
            ok=ratio <= GOAL_RATIO,
        )
    longest = by[1000, 100_000][3]
    report.goal(
        "p99 in us, 1,000 replicas, 100,000 tokens",
        longest,
        f"<= {GOAL_LONGEST_US:g}",
        ok=longest <= GOAL_LONGEST_US,
    )


def _bodies(tokens: int, rng: random.Random) -> list[Wanted]:
    """Checked requests; half of each prompt is one of four common beginnings."""
    commons = [_text(2 * tokens, rng) for _ in range(4)]
    found = []
    for _ in range(_BODIES):
        text = rng.choice(commons) + _text(2 * tokens, rng)
        body = {"model": "chat", "messages": [{"role": "user", "content": text}], "stream": True}
        found.append(check_openai("/v1/chat/completions", json.dumps(body).encode()))
    return found


def _text(characters: int, rng: random.Random) -> str:
    words = _WORDS.split()
    text = " ".join(rng.choice(words) for _ in range(characters // 4))
    return text[:characters].ljust(characters)


def _measure(replicas: int, bodies: list[Wanted], rng: random.Random) -> list[float]:
    """Microseconds of each decision."""
    placer = Placer(Options())
    now = 0.0
    for number in range(replicas):
        placer.update(_report(number, rng), now)
    names = [prefix_hashes(wanted.prompt.prefix_bytes()) for wanted in bodies]
    # Every other engine tells what it has cached; of the rest it is known by what was sent there.
    for number in range(0, replicas, 2):
        for stored in rng.sample(names, k=len(names) // 4):
            placer.cached(f"r{number}", _MODEL, stored=stored, removed=(), reset=False)
    now = 1000.0
    running: deque[Ticket] = deque()
    for wanted in bodies * 2:
        running.append(_decide(placer, wanted, now, rng))
    took: list[float] = []
    gc.collect()
    gc.freeze()
    for number in range(DECISIONS):
        now += 1.0 / (5 * replicas)
        wanted = bodies[number % len(bodies)]
        began_s = time.perf_counter()
        ticket = _decide(placer, wanted, now, rng)
        took.append(1e6 * (time.perf_counter() - began_s))
        placer.first(ticket, now + 0.05)
        running.append(ticket)
        if len(running) > 2 * replicas:
            placer.end(running.popleft(), now, succeeded=True)
        for _ in range(2):
            placer.update(_report(rng.randrange(replicas), rng), now)
    gc.unfreeze()
    return took


def _decide(placer: Placer, wanted: Wanted, now: float, rng: random.Random) -> Ticket:
    ask = Ask(_MODEL, wanted.prompt_tokens, wanted.prompt.prefix_bytes, "REALTIME")
    placement = placer.choose(ask, now, rng, Exclusions())
    return placer.begin(ask, placement, now)


def _report(number: int, rng: random.Random) -> Replica:
    load = ModelLoad(
        active=True, in_flight=rng.randrange(40), slots=64, waiting_tokens=rng.randrange(20_000)
    )
    return Replica(f"r{number}", f"r{number}:1", True, False, {_MODEL: load})


def _naming_us(bodies: Sequence[Wanted]) -> float:
    took = []
    for wanted in (*bodies, *bodies, *bodies):
        began_s = time.perf_counter()
        prefix_hashes(wanted.prompt.prefix_bytes())
        took.append(1e6 * (time.perf_counter() - began_s))
    return statistics.median(took)


def _quantile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=1000)[round(share * 1000) - 1]
