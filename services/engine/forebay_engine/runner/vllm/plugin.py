"""Runs inside vLLM's own processes, which load it as a `vllm.general_plugins` entry point.

It does two things there. It tells the runner when the weights begin and end, which only the worker
knows; and it ends the process when its parent dies, so that no engine survives its runner. Outside
a runner it does nothing.
"""

import contextlib
import functools
import os
import select
import signal
import socket
import threading
from typing import Any

PHASE_SOCKET = "FOREBAY_ENGINE_PHASE_SOCKET"
RUNNER_PID = "FOREBAY_ENGINE_RUNNER_PID"
WEIGHTS_BEGIN = b"weights begin"
WEIGHTS_END = b"weights end"


def register() -> None:
    """Hook into this process, if it is one of a runner's engine."""
    path = os.environ.get(PHASE_SOCKET)
    if not path or os.environ.get(RUNNER_PID) == str(os.getpid()):
        return
    _end_with_parent()
    _wrap_loader(path)


def _end_with_parent() -> None:
    parent = os.getppid()
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        select.select([pidfd], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="forebay-parent", daemon=True).start()


def _wrap_loader(path: str) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load_model = BaseModelLoader.load_model

    @functools.wraps(load_model)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        _tell(path, WEIGHTS_BEGIN)
        try:
            return load_model(*args, **kwargs)
        finally:
            _tell(path, WEIGHTS_END)

    BaseModelLoader.load_model = reporting


def _tell(path: str, message: bytes) -> None:
    # A phase that cannot be told is a gap in a report, and no reason to stop a load.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.sendto(message, path)
