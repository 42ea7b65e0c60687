"""Run one benchmark: `python -m bench NAME`.

Each benchmark is a module or package `bench.NAME` with `def main(report: Report) -> None`. The
report prints the environment and a table, and writes `bench/results/NAME.json`. The exit status is
1 when a goal was missed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from bench.report import Report

_NOT_BENCHMARKS = {"report"}


def main(argv: list[str]) -> int:
    """Run the named benchmark, or list them."""
    folder = Path(__file__).parent
    names = sorted(
        module.name
        for module in pkgutil.iter_modules([str(folder)])
        if not module.name.startswith("_") and module.name not in _NOT_BENCHMARKS
    )
    if len(argv) != 1 or argv[0] not in names:
        print(f"usage: make bench NAME=…   one of: {', '.join(names)}", file=sys.stderr)
        return 2
    report = Report(argv[0], folder / "results")
    importlib.import_module(f"bench.{argv[0]}").main(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
