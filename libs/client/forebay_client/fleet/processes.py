"""Processes as the system knows them: which one a number means, whose it is, how it is ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from forebay_client.fleet.core.plan import STATE_DIR_VARIABLE
from forebay_client.fleet.core.state import Process

_PROC = Path("/proc")


def identify(pid: int) -> Process | None:
    """The process that has this number now; None when there is none, or only its exit status."""
    if _PROC.is_dir():
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The command's name is in brackets and may hold anything, brackets too.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else Process(pid, fields[19])
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    started = listed.stdout.strip()
    return Process(pid, started) if started else None


def is_alive(process: Process | None) -> bool:
    """Whether this very process, not a later one with its number, still runs."""
    return process is not None and identify(process.pid) == process


def of_fleet(state_dir: Path) -> list[Process]:
    """Every process that a fleet in this directory has started and that still runs, children of
    theirs included. Linux only; elsewhere empty."""
    marker = f"{STATE_DIR_VARIABLE}={state_dir}".encode()
    marked: set[int] = set()
    parents = _parents()
    for pid in parents:
        with contextlib.suppress(OSError):
            if marker in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    # A process may have overwritten its environment with its title; its ancestors tell.
    return _identified(pid for pid in parents if _descends(pid, marked, parents))


def descendants(process: Process) -> list[Process]:
    """What a process that runs has started, and what that has. Linux only; elsewhere empty."""
    parents = _parents()
    found = _identified(pid for pid in parents if _descends(parents[pid], {process.pid}, parents))
    return found if is_alive(process) else []


def _identified(pids: Iterable[int]) -> list[Process]:
    found = (identify(pid) for pid in sorted(set(pids) - {os.getpid()}))
    return [process for process in found if process is not None]


def _parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    for pid in _pids():
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = (_PROC / str(pid) / "stat").read_text()
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _pids() -> Iterator[int]:
    if _PROC.is_dir():
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _descends(pid: int, from_pids: set[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in from_pids:
            return True
        pid = parents.get(pid, 0)
    return False


def end(processes: Iterable[Process], *, grace_s: float, kill_wait_s: float = 5.0) -> list[Process]:
    """Ask processes to end, then make them; returns those that still run, which is none as a rule.

    Args:
        processes: which; those that are gone or have become others are left alone.
        grace_s: how long they may take after SIGTERM, in seconds.
        kill_wait_s: how long the system may take after SIGKILL, in seconds.
    """
    left = list(processes)
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_wait_s)):
        for process in left:
            signal_process(process, number)
        left = wait_gone(left, timeout_s=wait_s)
        if not left:
            break
    return left


def signal_process(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; returns whether it was there."""
    if not hasattr(os, "pidfd_open"):
        alive = is_alive(process)
        if alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        return alive
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The handle is this number's process of now: if it is the right one, it stays it.
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_gone(processes: Iterable[Process], *, timeout_s: float) -> list[Process]:
    """Wait until processes have ended; returns those that have not."""
    until = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and (remaining_s := until - time.monotonic()) > 0:
        _wait_any(left[0].pid, min(remaining_s, 0.5))
        left = [process for process in left if is_alive(process)]
    return left


def _wait_any(pid: int, timeout_s: float) -> None:
    if not hasattr(os, "pidfd_open"):
        time.sleep(min(timeout_s, 0.05))
        return
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(handle)
