"""Keeps the runner out of the way of an engine that computes on the same CPU.

vLLM binds each worker's threads to cores of their own. Whatever else runs there takes time from
every step, and a runner has a little work for each token. Nor may the runner interrupt vLLM's core,
which wakes it just when the core plans the next step: a batch task runs as much as any other, but
never preempts the one that woke it.
"""

import contextlib
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)
_TASKS = Path("/proc/self/task")


def give_way(core_pids: list[int]) -> None:
    """Make this process's threads batch tasks, on cores that no worker is bound to.

    Args:
        core_pids: vLLM's core processes; the workers are their children.
    """
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
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
