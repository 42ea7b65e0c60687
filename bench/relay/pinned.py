"""Processes that stay on one core, with all their children, and end when they are told to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_STOP_S = 3.0


def cores() -> tuple[int, int]:
    """The core of whoever is measured, and the core of everything else.

    Raises:
        RuntimeError: this process may use one core only.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise RuntimeError("two cores are needed: one for the router, one for the load")
    return usable[0], usable[1]


@contextlib.contextmanager
def on_core(*allowed: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(allowed))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Pinned:
    """A process on one core."""

    def __init__(
        self,
        command: Sequence[str],
        core: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its output goes to `log`; `environment` stands in place of this process's own."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output, on_core(core):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def pids(self) -> list[int]:
        """The process and all that descend from it."""
        return _with_descendants(self._process.pid)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it and its descendants: asked first, then forced."""
        pids = self.pids()
        _signal_all(pids, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        _signal_all(pids, signal.SIGKILL)
        self._process.wait()


def wait_for_line(process: Pinned, line: str, timeout_s: float = 10.0) -> None:
    """Wait until the process has written a line.

    Raises:
        RuntimeError: it ended, or took longer.
    """
    deadline = time.monotonic() + timeout_s
    while line not in process.log.read_text().splitlines():
        if not process.is_running() or time.monotonic() > deadline:
            raise RuntimeError(f"{process.log.stem} did not start: {process.log_tail()}")
        time.sleep(0.01)


class Bystanders:
    """How much of a core was used by processes that are not measured, nor part of the bench."""

    def __init__(self, core: int, pids: Sequence[int]) -> None:
        """Begins to watch; `pids` are the processes that belong on the core."""
        self._core = core
        self._pids = pids
        self._before = self._read()

    def use(self, ended_s: float = 0.0) -> float:
        """Share of the core since the beginning, 0 to 1; a tick of the kernel is its resolution.

        `ended_s` is the CPU time of processes that belonged there and have ended.
        """
        now = self._read()
        elapsed, busy, own = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        return max(0.0, busy - own - ended_s) / elapsed if elapsed else 0.0

    def _read(self) -> tuple[float, float, float]:
        own = 0.0
        for pid in self._pids:
            with contextlib.suppress(OSError):
                # The kernel's name for the CPU clock of another process.
                own += time.clock_gettime((~pid << 3) | 2)
        return time.monotonic(), _busy_s(self._core), own


def _busy_s(core: int) -> float:
    """Seconds that a core has worked for processes; user, nice and system of proc_stat(5)."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            return sum(map(int, line.split()[1:4])) / os.sysconf("SC_CLK_TCK")
    raise RuntimeError(f"the kernel does not know core {core}")


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _with_descendants(int(child))
    return found


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
