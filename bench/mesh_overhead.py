"""What the mesh costs: tokens/s of concurrent chats on a real model, bare and through the mesh.

Both engines are loaded at once, on the same cores, with the same arguments; rounds alternate
between them, and the one whose turn it is not idles. The load generator of the mesh shares these
cores too, and its cost counts against the mesh.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from forebay.engine.v1 import engine_service_pb2 as engine
from google.protobuf import json_format

from bench.report import Report
from tests.conftest import EtcdProcess
from tests.mesh import Mesh, running

CHATS = 32
MAX_TOKENS = 96
ROUNDS = 7
GOAL = 0.95
MODEL = Path(".forebay/models/smollm2")
_LOAD_TIMEOUT_S = 240.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Child:
    """A process that answers a line of JSON with a line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise RuntimeError(f"{module} ended before it was ready")

    def round(self, number: int, max_tokens: int) -> dict[str, Any]:
        """Run one round; every prompt of every round is another one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        prompts = [f"Round {number}. Tell a story about a river, number {n}." for n in range(CHATS)]
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        # vLLM logs to standard output as well.
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.module} ended with status {self.process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main(report: Report) -> None:
    """Run the benchmark."""
    asyncio.run(_main(report))


async def _main(report: Report) -> None:
    spec = engine.ModelSpec(
        model_version="smollm2@1",
        backend=engine.BACKEND_VLLM,
        artifact_path=str(MODEL.resolve()),
        context_tokens=2048,
        max_sequences=64,
        kv_cache_bytes=1 << 30,
    )
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdProcess(Path(folder) / "etcd")
        etcd.start()
        bare = _Child("bench._bare_engine", json_format.MessageToJson(spec, indent=None))
        try:
            async with running(Path(folder), etcd.endpoint, "/bench", spec) as mesh:
                mesh.add_replica("r1", spec)
                await mesh.placeable("r1", timeout_s=_LOAD_TIMEOUT_S)
                load = _Child("bench._grpc_load", mesh.grpc, "smollm2")
                try:
                    await _rounds(report, bare, load, mesh)
                finally:
                    load.end()
        finally:
            bare.end()
            etcd.kill()


async def _rounds(report: Report, bare: _Child, load: _Child, mesh: Mesh) -> None:
    for child in (bare, load):
        child.round(0, 16)
    status = await mesh.engine_status("r1")
    watched = {
        "router": mesh.router.pid,
        "batcher": mesh.replicas["r1"].batcher.pid,
        "engine host": mesh.replicas["r1"].host.pid,
        "runner": status.runner_pid,
        "load generator": load.process.pid,
    }
    spent = dict.fromkeys(watched, 0.0)
    mesh_tokens = 0
    rows, ratios = [], []
    for number in range(1, ROUNDS + 1):
        # Whoever goes first in a pair changes, so that a drift of the machine cancels out.
        figures: dict[str, dict[str, Any]] = {}
        for name in ("bare", "mesh") if number % 2 else ("mesh", "bare"):
            if name == "bare":
                figures[name] = bare.round(number, MAX_TOKENS)
                continue
            before = {process: _cpu_s(pid) for process, pid in watched.items()}
            figures[name] = load.round(number, MAX_TOKENS)
            mesh_tokens += figures[name]["tokens"]
            for process, pid in watched.items():
                spent[process] += _cpu_s(pid) - before[process]
        rates = {name: figure["tokens"] / figure["seconds"] for name, figure in figures.items()}
        assert figures["bare"]["tokens"] == figures["mesh"]["tokens"] == CHATS * MAX_TOKENS
        ratios.append(rates["mesh"] / rates["bare"])
        rows.append(
            (
                number,
                rates["bare"],
                rates["mesh"],
                ratios[-1],
                1000 * figures["bare"]["ttft_p50_s"],
                1000 * figures["mesh"]["ttft_p50_s"],
            )
        )
    report.table(
        ("round", "bare tok/s", "mesh tok/s", "ratio", "bare TTFT p50 ms", "mesh TTFT p50 ms"), rows
    )
    per_token = {name: 1e6 * seconds / mesh_tokens for name, seconds in spent.items()}
    report.table(("process", "CPU µs per token"), sorted(per_token.items()))
    report.figure("chats", CHATS)
    report.figure("tokens_per_chat", MAX_TOKENS)
    report.figure("bare_tokens_per_s", [row[1] for row in rows])
    report.figure("mesh_tokens_per_s", [row[2] for row in rows])
    report.figure("ratios", ratios)
    report.figure("cpu_us_per_token", per_token)
    ratio = median(ratios)
    report.goal(
        f"tokens/s of {CHATS} chats through the mesh over bare AsyncLLM, median of {ROUNDS} pairs",
        ratio,
        f">= {GOAL}",
        ok=ratio >= GOAL,
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
