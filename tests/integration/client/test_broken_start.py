"""Starts that cannot succeed end in bounded time, say why, and leave nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forebay_client.fleet.core.plan import FORK_SUPPORT, ModelPlan, Options
from forebay_client.fleet.core.state import Fleet, Process, ServiceState
from forebay_client.fleet.processes import is_alive, of_fleet, wait_gone

from tests.fleet_commands import BOUND_S, Commands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]
_DOWN_S = 15.0
_STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("thinking", flush=True)
time.sleep(600)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path / "state")
    commands.environ["PYTHONPATH"] = str(tmp_path / "shadows")
    yield commands
    assert of_fleet(commands.directory.path) == []


def shadow(tmp_path: Path, package: str, main: str | None = None) -> None:
    """Put a package before the real one: one that cannot be run, or that runs `main`."""
    path = tmp_path / "shadows" / package
    path.mkdir(parents=True)
    (path / "__init__.py").touch()
    if main is not None:
        (path / "__main__.py").write_text(main)


def failure(output: str) -> str:
    line = output.splitlines()[-1]
    assert line.startswith("Error: the fleet could not be started: ")
    return line


def test_a_service_that_keeps_dying_tells_its_last_words(
    commands: Commands, tmp_path: Path
) -> None:
    shadow(tmp_path, "forebay_autoscaler")
    line = failure(commands.up(status=1))
    assert "autoscaler exited with 1: " in line
    assert "forebay_autoscaler" in line.split("exited with 1: ")[1]


def test_replicas_that_keep_dying_tell_their_last_words(commands: Commands, tmp_path: Path) -> None:
    shadow(tmp_path, "forebay_engine")
    line = failure(commands.up("--warm", "0", status=1))
    assert "replicas ended at their start: " in line
    assert "forebay_engine" in line


def test_a_model_that_no_replica_can_run_tells_why(commands: Commands) -> None:
    assert "There is no such profile" in failure(commands.up("--profile", "nonsense", status=1))


def test_a_service_that_hangs_is_named_and_killed(commands: Commands, tmp_path: Path) -> None:
    shadow(tmp_path, "forebay_registry", _STUBBORN)
    commands.environ["FOREBAY_FLEET_READY_TIMEOUT_S"] = "3"
    began_s = time.monotonic()
    line = failure(commands.up(status=1))
    assert "registry was not ready within 3 s" in line
    assert "thinking" in line
    assert time.monotonic() - began_s < 3 + _DOWN_S


@contextlib.contextmanager
def supervisor(commands: Commands, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A supervisor that waits for its registry, started as a module, not by `forebay up`."""
    shadow(tmp_path, "forebay_registry", _STUBBORN)
    commands.directory.create()
    commands.directory.write_options(
        Options((ModelPlan("m", "simulated"),), 1, 1, 0, grpc_port=0, http_port=0)
    )
    state_dir = str(commands.directory.path)
    name = "forebay_client.fleet.supervisor"
    with commands.start_module(name, "--state-dir", state_dir) as process:
        yield process


def until_starting(commands: Commands, name: str) -> tuple[Fleet, Process]:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        fleet = commands.directory.read()
        service = fleet.service(name) if fleet else None
        if fleet and service and service.state is ServiceState.STARTING and service.process:
            return fleet, service.process
        time.sleep(0.02)
    raise AssertionError(f"{name} does not start")


def test_grpc_gets_no_fork_handlers_however_a_supervisor_is_started(
    commands: Commands, tmp_path: Path
) -> None:
    commands.environ[FORK_SUPPORT] = "1"
    commands.directory.create()
    commands.directory.spans.write_text("no database at all" * 100)
    with supervisor(commands, tmp_path) as process:
        _, registry = until_starting(commands, "registry")
        for pid in (process.pid, registry.pid):
            environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
            assert [one for one in environ if one.startswith(FORK_SUPPORT)] == [f"{FORK_SUPPORT}=0"]
        began_s = time.monotonic()
        assert "stopped in" in commands.run("down")
        assert time.monotonic() - began_s < _DOWN_S
        assert process.wait(BOUND_S) == 0
    # Nor does a span store that cannot be read hold it up.
    assert commands.directory.spans.with_name("spans.db.broken").exists()


def test_a_supervisor_that_hangs_is_ended_with_all_it_has_started(
    commands: Commands, tmp_path: Path
) -> None:
    with supervisor(commands, tmp_path) as process:
        fleet, registry = until_starting(commands, "registry")
        os.kill(fleet.supervisor.pid, signal.SIGSTOP)
        commands.environ["FOREBAY_FLEET_SILENCE_S"] = "2"
        assert "hangs: no word for 2 s" in commands.run("up", status=1)
        began_s = time.monotonic()
        assert "stopped in" in commands.run("down")
        assert time.monotonic() - began_s < _DOWN_S
        assert not is_alive(registry)
        assert process.wait(BOUND_S) == -signal.SIGKILL


def test_a_fleet_whose_directory_is_taken_away_ends_or_can_be_ended(
    commands: Commands, tmp_path: Path
) -> None:
    """A service may make the directory again before the supervisor looks; then it is found."""
    with supervisor(commands, tmp_path) as process:
        _, registry = until_starting(commands, "registry")
        shutil.rmtree(commands.directory.path, ignore_errors=True)
        ends_s = time.monotonic() + BOUND_S
        while process.poll() is None and time.monotonic() < ends_s:
            if commands.directory.last_beat():
                commands.run("down")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.poll() is not None
    assert wait_gone([registry], timeout_s=BOUND_S) == []


def test_a_supervisor_without_options_says_so(commands: Commands) -> None:
    name = "forebay_client.fleet.supervisor"
    with commands.start_module(name, "--state-dir", str(commands.directory.path)) as process:
        output, _ = process.communicate(timeout=BOUND_S)
    assert process.returncode == 1
    assert output.count("\n") == 1
    assert "`forebay up` writes it" in output
