"""One supervised service, as a real process."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forebay_client.fleet.core.restart import RestartPolicy
from forebay_client.fleet.core.state import Process, Service, ServiceState
from forebay_client.fleet.directory import trim
from forebay_client.fleet.processes import end, identify, is_alive
from forebay_client.fleet.service_loop import ServiceLoop

pytestmark = pytest.mark.integration
_BOUND_S = 10.0
_SLEEP = "import time; print('up', flush=True); time.sleep(60)"
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(60)"
)


class _Watched:
    """A service loop, and what it has reported."""

    def __init__(self, script: str, log: Path) -> None:
        self.services: list[Service] = []
        self._log = log
        self._changed = asyncio.Condition()
        self.loop = ServiceLoop(
            "thing",
            command=[sys.executable, "-c", script],
            environ=os.environ,
            address="127.0.0.1:1",
            log=log,
            policy=RestartPolicy(first_s=0.01, most_s=0.02, stable_s=60, start_attempts=3),
            probe=self._says_up,
            report=self.services.append,
        )
        self.task = asyncio.create_task(self.loop.run())

    async def _says_up(self) -> None:
        while "up" not in self._log.read_text():
            await asyncio.sleep(0.01)

    async def until(self, holds: Callable[[Sequence[Service]], bool]) -> Service:
        async with asyncio.timeout(_BOUND_S):
            while not holds(self.services):
                await asyncio.sleep(0.01)
        return self.services[-1]

    async def stop(self, timeout_s: float = _BOUND_S) -> None:
        await self.loop.stop(timeout_s=timeout_s, running=self.task)


def is_ready(services: Sequence[Service]) -> bool:
    return services[-1].state is ServiceState.READY


async def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    watched = _Watched(_SLEEP, tmp_path / "log")
    first = await watched.until(is_ready)
    assert first.process is not None
    assert first.started_in_s is not None
    os.kill(first.process.pid, signal.SIGKILL)
    again = await watched.until(lambda s: is_ready(s) and s[-1].restarts == 1)
    assert again.process != first.process
    died = next(s for s in watched.services if s.state is ServiceState.RESTARTING)
    assert died.detail == "was ended by SIGKILL: up"
    await watched.stop()
    assert watched.services[-1].state is ServiceState.STOPPED
    assert not is_alive(again.process)


async def test_a_service_that_never_gets_ready_is_given_up_with_its_reason(tmp_path: Path) -> None:
    watched = _Watched("import sys; sys.exit('no such port')", tmp_path / "log")
    await asyncio.wait_for(watched.task, _BOUND_S)
    assert watched.loop.failure == "thing exited with 1: no such port"
    assert watched.services[-1].state is ServiceState.FAILED
    assert watched.services[-1].restarts == 3


async def test_a_service_that_will_not_end_is_killed(tmp_path: Path) -> None:
    watched = _Watched(_STUBBORN, tmp_path / "log")
    process = (await watched.until(is_ready)).process
    await watched.stop(timeout_s=0.2)
    assert not is_alive(process)


async def test_a_service_can_be_stopped_before_it_runs(tmp_path: Path) -> None:
    watched = _Watched(_SLEEP, tmp_path / "log")
    await asyncio.wait_for(watched.stop(), _BOUND_S)
    assert watched.services[-1].state is ServiceState.STOPPED


def test_another_process_of_the_same_number_is_never_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", _SLEEP], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        real = identify(process.pid)
        assert real is not None
        assert end([Process(process.pid, "another time")], grace_s=0) == []
        assert is_alive(real)
        assert end([real], grace_s=_BOUND_S) == []
    assert not is_alive(real)


def test_a_log_that_grows_too_large_is_moved_aside_and_written_on(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"a" * 100)
        trim(log, bytes_max=100)
        assert log.stat().st_size == 100
        writer.write(b"b")
        trim(log, bytes_max=100)
        writer.write(b"c")
    assert log.read_bytes() == b"c"
    assert (tmp_path / "x.log.1").read_bytes() == b"a" * 99 + b"b"
    trim(tmp_path / "none.log", bytes_max=100)


async def test_what_cannot_be_started_is_given_up_with_its_reason(tmp_path: Path) -> None:
    watched = _Watched(_SLEEP, tmp_path / "nowhere" / "log")
    await asyncio.wait_for(watched.task, _BOUND_S)
    assert watched.loop.failure == "thing cannot be started: No such file or directory"


_HANGING_FORK = """
import asyncio, ctypes, os, pathlib, sys
import uvloop
from forebay_client.fleet.child import Child
libc = ctypes.CDLL(None)
never_returns = ctypes.cast(libc.pause, ctypes.c_void_p)
assert libc.__register_atfork(None, None, never_returns, None) == 0
async def main():
    child = Child([sys.executable, "-c", "print('ran')"], environ=os.environ,
                  log=pathlib.Path(sys.argv[1]))
    assert await child.started is not None
    assert await child.ended == 0
uvloop.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="handlers are put in by glibc's own name")
def test_a_library_whose_fork_handler_hangs_holds_up_no_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGING_FORK, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BOUND_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "ran\n"
