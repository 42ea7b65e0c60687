"""The load generators and back ends: C programs, compiled when they are older than their source."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
FOLDER = Path(".forebay/bench")
"""Everything the benchmark makes; git ignores it."""
_PROGRAMS = ("grpc_load", "grpc_backend", "sse_load", "sse_backend")
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-D_GNU_SOURCE")


def build() -> dict[str, Path]:
    """Compile what is out of date; the programs by name.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the load generators need a C compiler (gcc)")
    folder = FOLDER / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(source.stat().st_mtime for source in SOURCES.glob("*.[ch]"))
    built = {}
    for name in _PROGRAMS:
        program = built[name] = (folder / name).resolve()
        if program.exists() and program.stat().st_mtime > newest:
            continue
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(program), str(SOURCES / f"{name}.c")],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or done.stderr:
            raise RuntimeError(f"{name}.c does not compile cleanly:\n{done.stderr}")
    return built
