"""How soon first tokens come, by who places requests: same engines, same requests, same times.

Eight simulated engines with measured H100 step times answer recorded traffic at 80 % of what they
can do. See README.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay_engine.adapters.profiles import load_profile
from forebay_engine.core.simulated.planner import Engine, Limits, SequenceRequest

from bench.placement.contenders import (
    CONTENDERS,
    PROFILE,
    REPLICAS,
    Contender,
    Site,
    list_replicas,
    running_engines,
)
from bench.placement.load import bodies, replay
from bench.placement.traces import SOURCES, Planned, plan
from bench.relay.pinned import Bystanders, cores, on_core
from bench.report import Report
from tests.conftest import EtcdProcess

LOAD = 0.8
ROUNDS = int(os.environ.get("FOREBAY_BENCH_ROUNDS", "2"))
_ONLY = tuple(filter(None, os.environ.get("FOREBAY_BENCH_ONLY", "").split(",")))
_CAPACITY_ROUNDS = 8
_WARM_UP = 0.15
"""Share of the requests, the first, that do not count: caches and what is learned are empty."""
_BUSY_MOST = 0.85
"""Of a core; beyond, the machine and not the engines decides how long things take."""
_STRANGERS_MOST = 0.15
"""Beyond, a run counts as disturbed, and is made once more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What all contenders of a round get alike."""

    planned: Sequence[Planned]
    made: Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One contender in one round."""

    first_ms: Mapping[str, Sequence[float]]
    """Of the requests that count, by their source."""
    hit_share: float
    failed: int
    busy: tuple[float, float]
    """Shares of their cores that the router, and engines and load, have used."""
    strangers: float
    """Share of a core that others used, on the worse of both."""
    late_ms: float

    def all_first_ms(self) -> list[float]:
        """Of all sources."""
        return [value for values in self.first_ms.values() for value in values]


def main(report: Report) -> None:
    """See the package."""
    contenders = [one for one in CONTENDERS if not _ONLY or one.name in _ONLY]
    for contender in list(contenders):
        if contender.package is not None and (why := contender.package.install()):
            print(f"left out {contender.name}: {why}")
            contenders.remove(contender)
    if len(contenders) < len(CONTENDERS) or ROUNDS < 2:
        report.keep_stored("not everything was measured")
    capacity = _capacity()
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    on = cores()
    with tempfile.TemporaryDirectory() as folder, on_core(on[1]):
        etcd = EtcdProcess(Path(folder) / "etcd")
        etcd.start()
        try:
            for number in range(ROUNDS):
                planned = plan(rate=LOAD * capacity, seed=number)
                load = Load(planned, bodies(planned))
                # Others come first in each round, so that none always meets the same moment.
                for contender in (*contenders[number:], *contenders[:number]):
                    run = _calm_run(contender, load, etcd.endpoint, on)
                    runs[contender.name].append(run)
                    print(f"round {number + 1} {contender.name}: {_line(run)}", flush=True)
        finally:
            etcd.kill()
    report.figure("capacity_requests_per_s", capacity)
    report.figure("load_share", LOAD)
    report.figure("requests_per_round", len(plan(rate=1.0, seed=0)))
    _show(report, runs)


def _line(run: Run) -> str:
    first_ms = run.all_first_ms()
    return (
        f"p50 {_quantile(first_ms, 0.5):.0f} ms, p99 {_quantile(first_ms, 0.99):.0f} ms, "
        f"hit {run.hit_share:.3f}, failed {run.failed}, "
        f"cores {run.busy[0]:.2f} {run.busy[1]:.2f}, strangers {run.strangers:.2f}, "
        f"late {run.late_ms:.1f} ms"
    )


def _show(report: Report, runs: Mapping[str, Sequence[Run]]) -> None:
    kinds = ("all", *(source.name for source in SOURCES))
    rows = []
    p99: dict[tuple[str, str], float] = {}
    for name, found in runs.items():
        figures: dict[str, object] = {}
        row: list[object] = [name]
        for kind in kinds:
            values = [
                value
                for run in found
                for value in (run.all_first_ms() if kind == "all" else run.first_ms[kind])
            ]
            quantiles = {f"p{share}": _quantile(values, share / 100) for share in (50, 90, 99)}
            figures[f"ttft_ms_{kind}"] = quantiles
            p99[name, kind] = quantiles["p99"]
            row += quantiles.values()
        hit = statistics.mean(run.hit_share for run in found)
        failed = sum(run.failed for run in found)
        rows.append((*row, hit, failed))
        report.figure(
            name,
            {
                **figures,
                "hit_share": hit,
                "failed": failed,
                "rounds_p99_ms": [_quantile(run.all_first_ms(), 0.99) for run in found],
                "busy_shares_of_cores": [max(run.busy[core] for run in found) for core in (0, 1)],
                "strangers_share_of_a_core": max(run.strangers for run in found),
                "late_ms_p99": max(run.late_ms for run in found),
            },
        )
    header = [f"{kind} p{share}" for kind in kinds for share in (50, 90, 99)]
    report.table(("TTFT in ms", *header, "hit share", "failed"), rows)
    for name in runs:
        if name != "ours" and "ours" in runs:
            for kind in kinds:
                ratio = p99["ours", kind] / p99[name, kind]
                report.goal(f"p99 TTFT, {kind}, against {name}", ratio, "< 1", ok=ratio < 1.0)
    every = [run for found in runs.values() for run in found]
    failed = sum(run.failed for run in every)
    report.goal("failed requests", failed, "0", ok=failed == 0)
    busiest = max(share for run in every for share in run.busy)
    report.goal("busiest core", busiest, f"<= {_BUSY_MOST:g}", ok=busiest <= _BUSY_MOST)
    strangers = max(run.strangers for run in every)
    if strangers > _STRANGERS_MOST:
        report.keep_stored(f"others used {strangers:.2f} of a core")


def _calm_run(contender: Contender, load: Load, etcd: str, on: tuple[int, int]) -> Run:
    run = _run(contender, load, etcd, on)
    if run.strangers <= _STRANGERS_MOST:
        return run
    return min(run, _run(contender, load, etcd, on), key=lambda one: one.strangers)


def _run(contender: Contender, load: Load, etcd: str, on: tuple[int, int]) -> Run:
    with running_engines(on[1]) as engines:
        asyncio.run(list_replicas(etcd, engines))
        with contender.serve(Site(etcd, on[0], engines)) as serving:
            own = (serving.process.pids(), [*engines.process.pids(), os.getpid()])
            watched = [Bystanders(core, pids) for core, pids in zip(on, own, strict=True)]
            before_s, began_s = [_cpu_s(pids) for pids in own], time.monotonic()
            answers = asyncio.run(replay(serving.port, load.planned, load.made))
            took_s = time.monotonic() - began_s
            busy = [(_cpu_s(own[n]) - before_s[n]) / took_s for n in (0, 1)]
            strangers = max(watch.use() for watch in watched)
        caches = engines.end()
    problems = [answer.problem for answer in answers if answer.problem]
    if problems:
        print(f"{contender.name}: {len(problems)} failed, such as {problems[0]!r}")
    first_ms: dict[str, list[float]] = {source.name: [] for source in SOURCES}
    warm = round(_WARM_UP * len(answers))
    for one, answer in zip(load.planned[warm:], answers[warm:], strict=True):
        if answer.first_s is not None:
            first_ms[one.source.name].append(1000 * answer.first_s)
    queried = sum(caches["queried_tokens"])
    return Run(
        first_ms=first_ms,
        hit_share=sum(caches["hit_tokens"]) / queried if queried else 0.0,
        failed=len(problems),
        busy=(busy[0], busy[1]),
        strangers=strangers,
        late_ms=_quantile([1000 * one.late_s for one in answers], 0.99),
    )


def _cpu_s(pids: Sequence[int]) -> float:
    # The kernel's name for the CPU clock of another process.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _capacity() -> float:
    """Requests per second that the engines do when they never lack any.

    In virtual time, by the engines' own core: one engine gets its share of the requests, dealt out
    in turn, again and again with other texts, all at once. What counts is how long the middle half
    of them takes.
    """
    profile = load_profile(PROFILE)
    limits = Limits(
        max_sequences=profile.max_sequences,
        context_tokens=profile.context_tokens,
        kv_blocks=profile.kv_cache_tokens // 16,
        waiting_max=10**6,
    )
    engine = Engine(profile, limits)
    requests = 0
    for again in range(_CAPACITY_ROUNDS):
        planned = plan(rate=1.0, seed=again)
        # Every request is dealt to this engine once.
        for one in planned[again % REPLICAS :: REPLICAS]:
            numbers = [(again << 50) + block for block in one.blocks]
            tokens = [number for number in numbers for _ in range(one.source.block_tokens)]
            requests += 1
            engine.add(
                SequenceRequest(
                    sequence_id=requests,
                    prompt=tuple(tokens[: one.prompt_tokens]) or (0,),
                    max_tokens=one.output_tokens,
                    ignore_end=True,
                )
            )
    now = 0.0
    ends: list[float] = []
    while (step := engine.plan_step(now)) is not None:
        now = step.ends_at
        ends += [now for emission in engine.apply_step() if emission.finish is not None]
    quarter = len(ends) // 4
    return REPLICAS * 2 * quarter / (ends[3 * quarter] - ends[quarter])


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
