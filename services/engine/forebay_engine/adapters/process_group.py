"""Ends every process of a group, and lets Python's resource trackers clean up behind them.

A tracker unlinks the shared memory that its processes leave; it ends by itself once they are gone.
Killed with them, it would leave that memory taken until the machine restarts.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PASSES = 3
_PROC = Path("/proc")


def kill_processes(group: int) -> None:
    """Kill a group's processes, except resource trackers and the caller itself."""
    # More than once: a process may start another between the listing and its own death.
    for _ in range(_PASSES):
        doomed = [pid for pid in _members(group) if pid != os.getpid() and not _is_tracker(pid)]
        if not doomed:
            return
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_everything(group: int) -> None:
    """Kill a whole group at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> Iterator[int]:
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; state, parent and group follow it.
            state, _, found = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                yield int(entry.name)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in (_PROC / str(pid) / "cmdline").read_bytes()
    return False
