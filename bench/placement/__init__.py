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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from bench.placement.traces import TRACES, Planned, Trace, plan
from bench.relay.pinned import Bystanders, cores, on_core
from bench.report import Report
from tests.conftest import EtcdProcess

LOAD = 0.8
ROUNDS = int(os.environ.get("FOREBAY_BENCH_ROUNDS", "2"))
_ONLY = tuple(filter(None, os.environ.get("FOREBAY_BENCH_ONLY", "").split(",")))
_TRACES = tuple(filter(None, os.environ.get("FOREBAY_BENCH_TRACES", "").split(",")))
_WARM_UP = 0.15
"""Share of the requests, the first, that do not count: caches and what is learned are empty."""
_BUSY_MOST = 0.85
"""Of a core; beyond, the machine and not the engines decides how long things take."""
_STRANGERS_MOST = 0.15
"""Beyond, a run counts as disturbed, and is made once more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What all contenders get alike."""

    trace: Trace
    planned: Sequence[Planned]
    made: Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One contender on one trace."""

    first_ms: Sequence[float]
    hit_share: float
    failed: int
    busy: tuple[float, float]
    """Shares of their cores that the router, and engines and load, have used."""
    strangers: float
    """Share of a core that others used, on the worse of both."""
    late_ms: float


def main(report: Report) -> None:
    """See the package."""
    contenders = [one for one in CONTENDERS if not _ONLY or one.name in _ONLY]
    for contender in list(contenders):
        if contender.package is not None and (why := contender.package.install()):
            print(f"left out {contender.name}: {why}")
            contenders.remove(contender)
    traces = [trace for trace in TRACES if not _TRACES or trace.name in _TRACES]
    if len(contenders) < len(CONTENDERS) or len(traces) < len(TRACES) or ROUNDS < 2:
        report.keep_stored("not everything was measured")
    router_core, other_core = cores()
    with tempfile.TemporaryDirectory() as folder, on_core(other_core):
        etcd = EtcdProcess(Path(folder) / "etcd")
        etcd.start()
        try:
            for trace in traces:
                _measure_trace(report, trace, contenders, etcd.endpoint, (router_core, other_core))
        finally:
            etcd.kill()


def _measure_trace(
    report: Report,
    trace: Trace,
    contenders: Sequence[Contender],
    etcd: str,
    on: tuple[int, int],
) -> None:
    capacity = _capacity(trace)
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(ROUNDS):
        planned = plan(trace, rate=LOAD * capacity, seed=number)
        load = Load(trace, planned, bodies(trace, planned))
        for contender in contenders:
            run = _run(contender, load, etcd, on)
            if run.strangers > _STRANGERS_MOST:
                again = _run(contender, load, etcd, on)
                run = min(run, again, key=lambda one: one.strangers)
            runs[contender.name].append(run)
            print(
                f"{trace.name} round {number + 1} {contender.name}: "
                f"p50 {_quantile(run.first_ms, 0.5):.0f} ms, "
                f"p99 {_quantile(run.first_ms, 0.99):.0f} ms, hit {run.hit_share:.3f}, "
                f"failed {run.failed}, cores {run.busy[0]:.2f} {run.busy[1]:.2f}, "
                f"strangers {run.strangers:.2f}, late {run.late_ms:.1f} ms",
                flush=True,
            )
    report.figure(f"{trace.name}_capacity_requests_per_s", capacity)
    rows = []
    for name, found in runs.items():
        first_ms = [value for run in found for value in run.first_ms]
        p50, p90, p99 = (_quantile(first_ms, share) for share in (0.5, 0.9, 0.99))
        hit = statistics.mean(run.hit_share for run in found)
        failed = sum(run.failed for run in found)
        busy = [max(run.busy[core] for run in found) for core in (0, 1)]
        rows.append((name, p50, p90, p99, hit, failed, *busy))
        report.figure(
            f"{trace.name}: {name}",
            {
                "ttft_ms": {"p50": p50, "p90": p90, "p99": p99},
                "hit_share": hit,
                "failed": failed,
                "rounds_p99_ms": [_quantile(run.first_ms, 0.99) for run in found],
                "busy_shares_of_cores": busy,
                "strangers_share_of_a_core": max(run.strangers for run in found),
                "late_ms_p99": max(run.late_ms for run in found),
            },
        )
    report.table(
        (trace.name, "p50 ms", "p90 ms", "p99 ms", "hit share", "failed", "router", "others"), rows
    )
    _set_goals(report, trace, rows, [run for found in runs.values() for run in found])


def _set_goals(
    report: Report, trace: Trace, rows: Sequence[tuple[Any, ...]], runs: Sequence[Run]
) -> None:
    p99 = {row[0]: row[3] for row in rows}
    if "ours" in p99:
        for name in p99.keys() - {"ours"}:
            ratio = p99["ours"] / p99[name]
            report.goal(f"{trace.name}: p99 TTFT against {name}", ratio, "< 1", ok=ratio < 1.0)
    failed = sum(run.failed for run in runs)
    report.goal(f"{trace.name}: failed requests", failed, "0", ok=failed == 0)
    busiest = max(share for run in runs for share in run.busy)
    report.goal(
        f"{trace.name}: busiest core", busiest, f"<= {_BUSY_MOST:g}", ok=busiest <= _BUSY_MOST
    )


def _run(contender: Contender, load: Load, etcd: str, on: tuple[int, int]) -> Run:
    with running_engines(load.trace, on[1]) as engines:
        asyncio.run(list_replicas(etcd, engines))
        with contender.serve(Site(etcd, on[0], engines)) as serving:
            own = (serving.process.pids(), [*engines.process.pids(), os.getpid()])
            watched = [Bystanders(core, pids) for core, pids in zip(on, own, strict=True)]
            before_s, began_s = [_cpu_s(pids) for pids in own], time.monotonic()
            answers = asyncio.run(replay(serving.port, load.trace, load.planned, load.made))
            took_s = time.monotonic() - began_s
            busy = [(_cpu_s(own[n]) - before_s[n]) / took_s for n in (0, 1)]
            strangers = max(watch.use() for watch in watched)
        caches = engines.end()
    counted = answers[round(_WARM_UP * len(answers)) :]
    queried = sum(caches["queried_tokens"])
    problems = [answer.problem for answer in answers if answer.problem]
    if problems:
        print(f"{contender.name}: {len(problems)} failed, such as {problems[0]!r}")
    return Run(
        first_ms=[1000 * one.first_s for one in counted if one.first_s is not None],
        hit_share=sum(caches["hit_tokens"]) / queried if queried else 0.0,
        failed=len(problems),
        busy=(busy[0], busy[1]),
        strangers=strangers,
        late_ms=_quantile([1000 * one.late_s for one in answers], 0.99),
    )


def _cpu_s(pids: Sequence[int]) -> float:
    # The kernel's name for the CPU clock of another process.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _capacity(trace: Trace) -> float:
    """Requests per second that the engines do when they never lack any, dealt out in turn.

    In virtual time, by the engines' own core: what the middle half of the requests takes.
    """
    profile = load_profile(PROFILE)
    limits = Limits(
        max_sequences=trace.max_sequences,
        context_tokens=profile.context_tokens,
        kv_blocks=profile.kv_cache_tokens // 16,
        waiting_max=10**6,
    )
    planned = plan(trace, rate=1.0, seed=0)
    ends: list[float] = []
    for number in range(REPLICAS):
        engine = Engine(profile, limits)
        for place, one in enumerate(planned[number::REPLICAS]):
            blocks = (token for block in one.blocks for token in [block] * trace.block_tokens)
            prompt = tuple(
                token for token, _ in zip(blocks, range(one.prompt_tokens), strict=False)
            )
            engine.add(
                SequenceRequest(
                    sequence_id=place,
                    prompt=prompt or (0,),
                    max_tokens=one.output_tokens,
                    ignore_end=True,
                )
            )
        now = 0.0
        while (step := engine.plan_step(now)) is not None:
            now = step.ends_at
            ends += [now for emission in engine.apply_step() if emission.finish is not None]
    ends.sort()
    quarter = len(ends) // 4
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
