"""The contracts, their stubs and the tables that people read agree with each other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forebay_common import errors, metadata
from google.protobuf import descriptor_pool

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
BIN = Path(sys.executable).parent


def _run(*command: str, cwd: Path = PROTOS) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_contracts_pass_buf_lint() -> None:
    _run(str(BIN / "buf"), "lint")


def test_contracts_are_formatted() -> None:
    _run(str(BIN / "buf"), "format", "--diff", "--exit-code")


def test_committed_stubs_are_what_the_contracts_give(tmp_path: Path) -> None:
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("forebay/**/*.proto"))
    plugins = {
        f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    }
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out", "mypy_out")] + [
        f"--mypy_grpc_out={tmp_path}"
    ]
    _run(sys.executable, "-m", "grpc_tools.protoc", "-I.", *sorted(plugins), *outputs, *files)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.py*")}
    kept = {
        p.relative_to(PROTOS / "python"): p.read_bytes()
        for p in (PROTOS / "python").rglob("*.py*")
        if "__pycache__" not in p.parts and p.name != "py.typed"
    }
    assert made.keys() == kept.keys()
    stale = [str(name) for name in made if made[name] != kept[name]]
    assert not stale, f"run `make protos`: {stale}"


def test_every_message_of_a_method_is_its_own() -> None:
    for path in PROTOS.glob("forebay/**/*.proto"):
        name = str(path.relative_to(PROTOS))
        __import__(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        file = descriptor_pool.Default().FindFileByName(name)
        for service in file.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"


def test_the_readme_lists_every_reason_as_the_table_has_it() -> None:
    text = (PROTOS / "README.md").read_text()
    for reason, status in errors.TABLE.items():
        code = f"`{status.openai_code}`" if status.openai_code else "–"
        row = (
            f"| `{reason}` | {status.grpc.name} | {status.http} | `{status.openai_type}` "
            f"| {code} | {'yes' if status.retryable else 'no'} |"
        )
        assert row in text


@pytest.mark.parametrize(
    "key",
    [
        value
        for name, value in vars(metadata).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("_")
    ],
)
def test_the_readme_lists_every_metadata_key(key: str) -> None:
    assert f"`{key}`" in (PROTOS / "README.md").read_text()


def test_importing_a_service_needs_no_other_service() -> None:
    assert shutil.which("lint-imports", path=str(BIN))
    _run(str(BIN / "lint-imports"), cwd=ROOT)
