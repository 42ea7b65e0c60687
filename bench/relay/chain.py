"""CPU per token of the whole chain: router, batcher and runner, each a real process.

The runner simulates an engine that takes 10 ms per step, so what is measured is the serving of
tokens and the simulation, which costs little. The processes share the machine's cores as they like.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median

from bench.relay.shapes import TOKENS, Shape, run_load
from bench.report import Report
from tests.conftest import EtcdProcess
from tests.mesh import running, simulated

_ROUNDS = 3
_SHAPE = Shape("chain", "32 streams at 10 ms per token", 32, 10_000, False, True, 5.0)

BEFORE = {
    "commit": "3bb8b4a",
    "path": "grpc.aio at every hop",
    "cpu_us_per_token": {"router": 109.0, "batcher": 102.0, "runner": 91.0},
}
"""The same measurement of the last commit whose token path was grpc.aio, on two cores of an AMD
EPYC: the lowest of six within two hours; the highest was 134, 126 and 114."""


def main(report: Report, program: Path) -> None:
    """Measure the chain and show it beside what it was.

    Args:
        report: takes the figures.
        program: the gRPC load generator.
    """
    asyncio.run(_measure(report, program))


async def _measure(report: Report, program: Path) -> None:
    spec = simulated("sim@1", profile="paced")
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdProcess(Path(folder) / "etcd")
        etcd.start()
        try:
            async with running(Path(folder), etcd.endpoint, "/bench", spec) as mesh:
                mesh.add_replica("r1", spec)
                await mesh.placeable("r1")
                runner = (await mesh.engine_status("r1")).runner_pid
                watched = {
                    "router": mesh.router.pid,
                    "batcher": mesh.replicas["r1"].batcher.pid,
                    "runner": runner,
                }
                port = int(mesh.grpc.rpartition(":")[2])
                rounds = [
                    await asyncio.to_thread(_round, program, port, watched) for _ in range(_ROUNDS)
                ]
        finally:
            etcd.kill()
    after = {name: median(each[name] for each in rounds) for name in rounds[0]}
    before: dict[str, float] = BEFORE["cpu_us_per_token"]  # type: ignore[assignment]
    rows = [(name, before[name], after[name], before[name] / after[name]) for name in after]
    whole = (sum(before.values()), sum(after.values()))
    report.table(
        ("chain", "before, CPU µs per token", "after", "ratio"),
        [*rows, ("whole", *whole, whole[0] / whole[1])],
    )
    report.figure(
        "chain",
        {
            "load": f"{_SHAPE.meaning}, {TOKENS} tokens each",
            "before": BEFORE,
            "after_cpu_us_per_token": after,
            "rounds": rounds,
        },
    )


def _round(program: Path, port: int, watched: dict[str, int]) -> dict[str, float]:
    found = run_load(
        program,
        _SHAPE,
        port,
        watch=[[pid] for pid in watched.values()],
        options=("model=sim",),
    )
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} requests of the chain failed")
    print(f"chain: {found['tokens'] / found['seconds']:.0f} tokens/s", flush=True)
    return {
        name: 1e6 * seconds / found["tokens"]
        for name, seconds in zip(watched, found["watched_cpu_s"], strict=True)
    }
