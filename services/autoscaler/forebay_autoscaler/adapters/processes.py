"""Processes of this host, told apart for certain: by number, time of start, and boot (Linux).

A number alone says nothing, because numbers are used again. A process is signalled only through a
descriptor of it that was opened before its identity was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen

_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process, of one boot of this host."""

    pid: int
    started_ticks: int
    boot_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    session: int
    started_ticks: int

    @property
    def is_running(self) -> bool:
        return self.state not in "ZX"


@functools.cache
def boot_id() -> str:
    """This boot of the host."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def refer(pid: int) -> ProcessRef | None:
    """The process that has a number now; None when it has ended."""
    stat = _stat(pid)
    if stat is None or not stat.is_running:
        return None
    return ProcessRef(pid, stat.started_ticks, boot_id())


def is_running(ref: ProcessRef) -> bool:
    """Whether it is this very process that runs, and not a later one of the same number."""
    return refer(ref.pid) == ref


def spawn(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Popen[bytes]:
    """Start a process in a session of its own that writes to the end of `log`.

    Raises:
        OSError: it cannot be started.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return Popen(
            list(command),
            env=dict(environ),
            stdin=DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


class Watched:
    """One process whose end is noticed at once, whether it is a child of ours or not."""

    def __init__(self, ref: ProcessRef, child: Popen[bytes] | None = None) -> None:
        self.ref = ref
        self.ended = asyncio.Event()
        self._child = child
        self._descriptor = _open(ref)
        if self._descriptor is None:
            self._end()
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens when it has ended."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when it still runs after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def forget(self) -> None:
        """Notice nothing any more."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _end(self) -> None:
        self.forget()
        if self._child is not None:
            self._child.poll()
        self.ended.set()


def find_leftovers(sessions: Sequence[ProcessRef], variable: str, value: str) -> list[ProcessRef]:
    """Processes that were started by one of `sessions`, or that inherited a variable.

    The first finds those that have overwritten their environment, the second those that have left
    their session.
    """
    needle = f"{variable}={value}".encode()
    ours = {ref.pid for ref in sessions if _is_session_of(ref)}
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        stat = _stat(int(entry.name))
        if stat is None or not stat.is_running:
            continue
        if stat.session in ours or needle in _environment(entry):
            found.append(ProcessRef(int(entry.name), stat.started_ticks, boot_id()))
    return found


def kill(ref: ProcessRef) -> None:
    """Kill a process; nothing happens when it has ended."""
    descriptor = _open(ref)
    if descriptor is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _open(ref: ProcessRef) -> int | None:
    try:
        descriptor = os.pidfd_open(ref.pid)
    except OSError:
        return None
    if is_running(ref):
        return descriptor
    os.close(descriptor)
    return None


def _is_session_of(ref: ProcessRef) -> bool:
    """Whether the session of this number is still that of `ref`, which led it."""
    if ref.boot_id != boot_id():
        return False
    leader = _stat(ref.pid)
    return leader is None or leader.started_ticks == ref.started_ticks


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the name, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), started_ticks=int(fields[19]))


def _environment(process: Path) -> Sequence[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return ()
