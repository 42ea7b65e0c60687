"""Keeps the runner off the CPU cores that vLLM's workers compute on.

vLLM binds each worker's threads to cores of their own. Whatever else runs there takes time from
every step, and a runner has a little work for each token.
"""

import contextlib
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)
_TASKS = Path("/proc/self/task")


def leave_worker_cores(core_pids: list[int]) -> None:
    """Move this process's threads to the cores that no worker is bound to, if there are any."""
    ours = os.sched_getaffinity(0)
    bound: set[int] = set()
    for worker in (child for pid in core_pids for child in _children(pid)):
        with contextlib.suppress(OSError):
            cores = os.sched_getaffinity(worker)
            bound |= cores if cores < ours else set()
    free = ours - bound
    if not free or free == ours:
        return
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), free)
    _log.info(
        "the engine computes on cores %s, the runner keeps to %s", sorted(bound), sorted(free)
    )


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children
