"""What a tiered alias saves and keeps: quality against the share of the small tier, and the time.

Of held rows that no training saw. Quality is the number of right answers over that of the large
model alone. A classifier that knows nothing keeps what `random` keeps; `oracle` knows the answers.
The rows are few, so what one classifier keeps more than another has an interval, by drawing rows
anew: one that holds 0 says that these rows do not tell them apart.
The time is that of a whole decision on a checked request, its text taken out of the message.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence

from forebay_router.adapters.tier_models import load_classifiers
from forebay_router.core.openai import check_openai
from forebay_router.core.tiers import CHARACTERS, Classifier, Tier, Tiers, choose
from forebay_router.core.wanted import Wanted

from bench.classifier.labels import Row, kept, read
from bench.report import Report

SHARES = (0.2, 0.4, 0.5, 0.6, 0.8)
SIZES = {"1 KB": 1_000, "10 KB": 10_000, "100 KB": 100_000}
DRAWS = 300
RESAMPLES = 1000
DECISIONS = 400
GOAL_P99_MS = 5.0
_CHINESE = "请分析这个系统的架构，并逐步推导它的复杂度。河水流过石桥，雨还在下。"
_HOSTILE = (".", "?", "1,", "; ", "\n(a", "prove ", "```", "not ", "\u6cb3", "A", "function ")
"""What is repeated to make patterns look at it again and again."""
_GARBAGE: tuple[object, ...] = (
    "",
    " \n\t ",
    "\x00" * 5000,
    "🌊" * 100_000,
    "a" * 1_000_000,
    "((((" * 10_000,
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
)


def main(report: Report) -> None:
    """See the module."""
    rows = [row for row in read() if row.is_held]
    classifiers = load_classifiers()
    report.figure("held_rows", len(rows))
    averages = _judge(report, rows, classifiers)
    slowest_ms = _time(report, classifiers)
    wrong = _feed_garbage(classifiers)
    report.figure("garbage_not_answered_by_the_default_tier", wrong)
    hostile_ms = _time_hostile(report, classifiers)
    surely = _compare(report, rows, classifiers)
    report.goal(
        "right answers kept by light, mean over shares, less those of random",
        averages["light"] - averages["random"],
        "> 0.01",
        ok=averages["light"] - averages["random"] > 0.01,
    )
    report.goal("the same, lower end of its 95 % interval", surely, "> 0", ok=surely > 0)
    report.goal(
        "right answers kept by light, mean over shares, less those of rules",
        averages["light"] - averages["rules"],
        "> 0",
        ok=averages["light"] > averages["rules"],
    )
    for name, value in (("at 100 KB", slowest_ms), ("of hostile prompts", hostile_ms)):
        report.goal(
            f"slowest p99 {name}, ms", value, f"<= {GOAL_P99_MS:g}", ok=value <= GOAL_P99_MS
        )
    report.goal("prompts without text sent elsewhere", float(len(wrong)), "0", ok=not wrong)


def _judge(
    report: Report, rows: Sequence[Row], classifiers: Mapping[str, Classifier]
) -> dict[str, float]:
    rng = random.Random(1)
    draws = [[rng.random() for _ in rows] for _ in range(DRAWS)]
    lines = {
        name: [kept(rows, scores, share) for share in SHARES]
        for name, scores in (
            (name, [each.score(row.prompt[:CHARACTERS]) for row in rows])
            for name, each in classifiers.items()
        )
    }
    lines["random"] = [
        statistics.fmean(kept(rows, scores, share) for scores in draws) for share in SHARES
    ]
    oracle = [float(row.large_ok) - float(row.small_ok) for row in rows]
    lines["oracle"] = [kept(rows, oracle, share) for share in SHARES]
    table = []
    averages = {}
    for name, values in lines.items():
        averages[name] = statistics.fmean(values)
        report.figure(
            f"kept_{name}",
            {f"{share:g}": round(v, 4) for share, v in zip(SHARES, values, strict=True)},
        )
        table.append((name, *(f"{100 * value:.1f} %" for value in (*values, averages[name]))))
    for name, each in classifiers.items():
        small = [each.score(row.prompt[:CHARACTERS]) < each.threshold for row in rows]
        report.figure(f"share_small_at_own_threshold_{name}", round(sum(small) / len(rows), 3))
    heads = [f"{100 * share:.0f} % small" for share in SHARES]
    report.table(("right answers kept", *heads, "mean"), table)
    return averages


def _compare(report: Report, rows: Sequence[Row], classifiers: Mapping[str, Classifier]) -> float:
    """What light keeps more than the others, with intervals. Returns what it surely keeps more
    than random does, as a mean over shares."""
    scores = {
        name: [each.score(row.prompt[:CHARACTERS]) for row in rows]
        for name, each in classifiers.items()
    }
    rng = random.Random(3)
    found: dict[str, list[float]] = {
        f"light_less_{other}_{where}": []
        for other in ("random", "rules")
        for where in ("mean", "at_half")
    }
    half = SHARES.index(0.5)
    for _ in range(RESAMPLES):
        drawn = rng.choices(range(len(rows)), k=len(rows))
        again = [rows[index] for index in drawn]
        lines = {
            name: [kept(again, [each[index] for index in drawn], share) for share in SHARES]
            for name, each in scores.items()
        }
        lines["random"] = [_expected(again, share) for share in SHARES]
        for other in ("random", "rules"):
            more = [a - b for a, b in zip(lines["light"], lines[other], strict=True)]
            found[f"light_less_{other}_mean"].append(statistics.fmean(more))
            found[f"light_less_{other}_at_half"].append(more[half])
    table = []
    for name, values in found.items():
        cuts = statistics.quantiles(values, n=40)
        low, high = cuts[0], cuts[-1]
        report.figure(f"{name}_95", [round(low, 4), round(high, 4)])
        table.append((name, f"{100 * low:.1f} %", f"{100 * high:.1f} %"))
    report.table(("kept more, 95 %", "from", "to"), table)
    return statistics.quantiles(found["light_less_random_mean"], n=40)[0]


def _expected(rows: Sequence[Row], share: float) -> float:
    """What a choice by chance keeps on the average."""
    part = round(share * len(rows)) / len(rows)
    small, large = sum(row.small_ok for row in rows), sum(row.large_ok for row in rows)
    return part * small / large + 1 - part


def _time_hostile(report: Report, classifiers: Mapping[str, Classifier]) -> float:
    """The slowest p99 over what is made to be slow."""
    slowest = dict.fromkeys(classifiers, 0.0)
    for each in _HOSTILE:
        asked = [_request((each * CHARACTERS)[: CHARACTERS - 1] + "x")]
        for name in classifiers:
            took = _decisions_ms(asked, name, classifiers)
            slowest[name] = max(slowest[name], statistics.quantiles(took, n=100)[98])
    for name, value in slowest.items():
        report.figure(f"{name}_hostile_p99_ms", value)
    return max(slowest.values())


def _time(report: Report, classifiers: Mapping[str, Classifier]) -> float:
    rng = random.Random(2)
    texts = " ".join(row.prompt for row in read())
    table, slowest_ms = [], 0.0
    for language in ("English", "Chinese"):
        for size, count in SIZES.items():
            asked = [_request(_cut(texts, language, count, rng)) for _ in range(40)]
            for name in classifiers:
                took = _decisions_ms(asked, name, classifiers)
                p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
                report.figure(f"{name}_{language}_{size}_ms", {"p50": p50, "p99": p99})
                table.append((name, language, size, p50, p99))
                if size == "100 KB":
                    slowest_ms = max(slowest_ms, p99)
    report.table(("classifier", "text", "prompt", "p50 ms", "p99 ms"), table)
    return slowest_ms


def _cut(texts: str, language: str, count: int, rng: random.Random) -> str:
    if language == "Chinese":
        return (_CHINESE * (count // len(_CHINESE.encode()) + 1))[: count // 3]
    start = rng.randrange(len(texts) - count)
    return texts[start : start + count]


def _request(content: object) -> Wanted:
    body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
    return check_openai("/v1/chat/completions", json.dumps(body).encode())


def _decisions_ms(
    asked: Sequence[Wanted], name: str, classifiers: Mapping[str, Classifier]
) -> list[float]:
    tiers = Tiers("small", "large", name)
    took = []
    gc.collect()
    for number in range(DECISIONS):
        wanted = asked[number % len(asked)]
        began_s = time.perf_counter()
        choose(tiers, wanted, classifiers)
        took.append(1000 * (time.perf_counter() - began_s))
    return took


def _feed_garbage(classifiers: Mapping[str, Classifier]) -> list[str]:
    """What raised, or, being without text, was not answered by the default tier."""
    wrong = []
    for name in (*classifiers, "unknown"):
        for default in Tier:
            tiers = Tiers("small", "large", name, default=default)
            for content in _GARBAGE:
                wanted = _request(content)
                try:
                    tier = choose(tiers, wanted, classifiers).tier
                except Exception as failure:
                    wrong.append(f"{name}: {type(failure).__name__}")
                    continue
                is_textless = not isinstance(content, str) or not content.strip()
                if (is_textless or name == "unknown") and tier is not default:
                    wrong.append(f"{name}: {tier}")
    return wrong
