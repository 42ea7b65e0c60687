"""What a relayed request costs: CPU and added latency of this router and of others.

Rounds are interleaved: each measures every contender once, anew started. Figures are medians of the
valid and undisturbed ones. `FOREBAY_BENCH_ROUNDS`, `FOREBAY_BENCH_ONLY` (contenders) and
`FOREBAY_BENCH_SHAPES` shorten a run, and such a run stores no result. See README.md.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.relay import chain
from bench.relay.contenders import CONTENDERS, Contender, Lane, Serving
from bench.relay.native import build
from bench.relay.shapes import SHAPES, Sample, Shape, measure
from bench.relay.site import Site, open_site
from bench.report import Report

_ROUNDS = 3
_LITELLM_S = 8.0
_ATTEMPTS = 2
"""Of one measurement, while others disturb it."""

Samples = dict[tuple[str, str], list[Sample]]
"""By lane and shape."""


def main(report: Report) -> None:
    """Measure, and hold against the goals."""
    wanted = _words("FOREBAY_BENCH_ONLY")
    known = {contender.name for contender in CONTENDERS} | {"chain"}
    if unknown := wanted - known:
        raise SystemExit(f"FOREBAY_BENCH_ONLY: {unknown} not among {', '.join(sorted(known))}")
    shapes = _words("FOREBAY_BENCH_SHAPES") or set(SHAPES)
    rounds = int(os.environ.get("FOREBAY_BENCH_ROUNDS", _ROUNDS))
    if wanted or shapes != set(SHAPES) or rounds < _ROUNDS:
        report.keep_stored("a part of the benchmark was run")
    programs = build()
    skipped: dict[str, str] = {}
    contenders = []
    for contender in CONTENDERS:
        if wanted and contender.name not in wanted:
            skipped[contender.name] = "not asked for"
        elif contender.package and (problem := contender.package.install()):
            print(f"skipped {contender.name}: {problem}")
            skipped[contender.name] = problem
        else:
            contenders.append(contender)
    samples = _measure_all(contenders, shapes, rounds, programs, skipped) if contenders else {}
    report.figure("rounds", rounds)
    report.figure("skipped", skipped)
    report.figure(
        "peers",
        {
            contender.package.distribution: contender.package.version()
            for contender in contenders
            if contender.package
        },
    )
    figures = {key: _middle(found) for key, found in samples.items()}
    _show(report, samples, figures)
    _hold_against_goals(report, figures)
    if not wanted or "chain" in wanted:
        chain.main(report, programs["grpc_load"])


def _words(variable: str) -> set[str]:
    return {word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()}


def _measure_all(
    contenders: Sequence[Contender],
    shapes: set[str],
    rounds: int,
    programs: Mapping[str, Path],
    skipped: dict[str, str],
) -> Samples:
    samples: Samples = defaultdict(list)
    with open_site(programs) as site:
        for number in range(1, rounds + 1):
            for contender in contenders:
                if contender.name in skipped or number > (contender.rounds_max or rounds):
                    continue
                print(f"round {number} of {rounds}: {contender.name}", flush=True)
                try:
                    with contender.serve(site) as serving:
                        _measure_one(
                            contender,
                            serving,
                            site,
                            shapes=shapes,
                            programs=programs,
                            samples=samples,
                        )
                except RuntimeError as error:
                    if contender.package is None:
                        raise
                    print(f"skipped {contender.name} from here on: {error}")
                    skipped[contender.name] = str(error)
    return samples


def _measure_one(
    contender: Contender,
    serving: Serving,
    site: Site,
    *,
    shapes: set[str],
    programs: Mapping[str, Path],
    samples: Samples,
) -> None:
    for lane in contender.lanes:
        back = site.back_end(lane.protocol, listed=contender.listed)
        for shape in _shapes_of(lane, shapes):
            for _ in range(_ATTEMPTS):
                sample = measure(
                    programs[f"{lane.protocol}_load"],
                    shape,
                    serving.ports[lane.protocol],
                    cores=site.cores,
                    subject=serving.pids,
                    back=back.process.pids(),
                    measure_s=_LITELLM_S if contender.name == "litellm" else None,
                )
                print(f"  {lane.name} {shape.name}: {_line(sample)}", flush=True)
                samples[lane.name, shape.name].append(sample)
                if sample.is_calm:
                    break


def _shapes_of(lane: Lane, wanted: set[str]) -> Iterable[Shape]:
    return (SHAPES[name] for name in lane.shapes if name in wanted)


def _line(sample: Sample) -> str:
    verdict = "" if sample.is_calm else ", disturbed"
    verdict += "" if sample.is_valid else ", INVALID"
    return (
        f"{sample.cpu_ms:.4f} ms CPU, TTFT {sample.ttft_us:.0f} µs "
        f"({sample.reach_us:.0f} to the back end), "
        f"token {sample.token_us_p50:.0f}/{sample.token_us_p99:.0f} µs, "
        f"{sample.requests_per_s:.0f} requests/s, use {sample.subject_use:.2f}, "
        f"strangers {sample.bystanders_use:.2f}, "
        f"load + back end {sample.load_use:.2f} + {sample.back_use:.2f}, "
        f"{sample.errors} errors{verdict}"
    )


def _middle(samples: Sequence[Sample]) -> Sample | None:
    """The median of each figure over the valid rounds, the calm ones if there are any; None when
    none is valid."""
    valid = [sample for sample in samples if sample.is_valid]
    valid = [sample for sample in valid if sample.is_calm] or valid
    if not valid:
        return None
    names = [field.name for field in dataclasses.fields(Sample)]
    return Sample(**{name: median(getattr(sample, name) for sample in valid) for name in names})


Figures = Mapping[tuple[str, str], Sample | None]


def _show(report: Report, samples: Samples, figures: Figures) -> None:
    lanes = [lane for contender in CONTENDERS for lane in contender.lanes]
    rows = []
    for lane in lanes:
        if not any(key[0] == lane.name for key in figures):
            continue
        cpu = [_cell(figures, lane.name, shape, "cpu_ms") for shape in "ISPU"]
        added = _added_ttft_us(figures, lane)
        rows.append(
            (
                lane.name,
                *(cpu if lane.name.partition(" ")[0] != "direct" else ["–"] * 4),
                _cell(figures, lane.name, "P", "ttft_us"),
                "–" if added is None else added,
                _cell(figures, lane.name, "S", "token_us_p50"),
                _cell(figures, lane.name, "S", "token_us_p99"),
            )
        )
    report.table(
        (
            *("relay", "I cpu ms", "S cpu ms", "P cpu ms", "U cpu ms"),
            *("P TTFT µs", "added µs", "S token p50 µs", "p99 µs"),
        ),
        rows,
    )
    disturbed = [" ".join(key) for key, found in figures.items() if found and not found.is_calm]
    if disturbed:
        print(f"never measured without others on the same cores: {', '.join(disturbed)}")
    report.figure("disturbed", disturbed)
    report.figure("shapes", {shape.name: shape.meaning for shape in SHAPES.values()})
    report.figure(
        "lanes",
        {
            lane.name: {
                shape: {
                    "median": None if middle is None else dataclasses.asdict(middle),
                    "rounds": [dataclasses.asdict(sample) for sample in samples[lane.name, shape]],
                }
                for (name, shape), middle in figures.items()
                if name == lane.name
            }
            for lane in lanes
            if any(key[0] == lane.name for key in figures)
        },
    )


def _cell(figures: Figures, lane: str, shape: str, figure: str) -> float | str:
    if (lane, shape) not in figures:
        return "–"
    sample = figures[lane, shape]
    return "invalid" if sample is None else float(getattr(sample, figure))


def _added_ttft_us(figures: Figures, lane: Lane) -> float | None:
    """Time to first token beyond what the same protocol takes without a router."""
    through, direct = figures.get((lane.name, "P")), figures.get((f"direct {lane.protocol}", "P"))
    if through is None or direct is None or lane.name.startswith("direct"):
        return None
    return through.ttft_us - direct.ttft_us


def _hold_against_goals(report: Report, figures: Figures) -> None:
    missing = []

    def cpu(name: str, ours: tuple[str, str], peer: tuple[str, str], at_most: float) -> None:
        one, other = figures.get(ours), figures.get(peer)
        ratio = one.cpu_ms / other.cpu_ms if one and other else math.nan
        hold(f"CPU, {name}: {ours[0]} over {peer[0]}", ratio, at_most)

    def hold(name: str, ratio: float, at_most: float) -> None:
        if math.isnan(ratio):
            missing.append(name)
        else:
            report.goal(name, ratio, f"<= {at_most:.3g}", ok=ratio <= at_most)

    for peer in ("smg", "vllm-router"):
        cpu("shape S", ("ours grpc", "S"), (peer, "S"), 1 / 6)
    cpu("shape S", ("ours grpc", "S"), ("envoy grpc", "S"), 2 / 3)
    cpu("shape I", ("ours sse", "I"), ("vllm-router", "I"), 1 / 4)
    cpu("shape I", ("ours sse", "I"), ("smg", "I"), 1 / 5)
    cpu("shape S", ("ours sse", "S"), ("vllm-router", "S"), 2 / 3)
    cpu("not streamed", ("ours sse", "U"), ("vllm-router", "U"), 1.0)
    lanes = {lane.name: lane for contender in CONTENDERS for lane in contender.lanes}
    theirs = _added_ttft_us(figures, lanes["vllm-router"])
    for name in ("ours grpc", "ours sse"):
        own = _added_ttft_us(figures, lanes[name])
        ratio = own / theirs if own is not None and theirs else math.nan
        hold(f"added TTFT p50, 50 paced streams: {name} over vllm-router", ratio, 0.6)
    for name in missing:
        print(f"not measured: {name}")
    report.figure("not_measured", missing)
