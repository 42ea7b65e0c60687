"""Hears from vLLM's worker when the weights are read."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from forebay_engine.runner.backend import Phase
from forebay_engine.runner.vllm import plugin

_PHASES = {plugin.WEIGHTS_BEGIN: Phase.WEIGHTS, plugin.WEIGHTS_END: Phase.WARM_UP}


@contextlib.contextmanager
def hear_phases(report: Callable[[Phase], None]) -> Iterator[None]:
    """Report WEIGHTS and WARM_UP as the worker tells them; several workers count as one.

    The worker finds the socket by an environment variable. If it tells nothing, nothing is
    reported.
    """
    loop = asyncio.get_running_loop()
    reported: set[Phase] = set()
    with (
        tempfile.TemporaryDirectory(prefix="forebay-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver,
    ):
        path = str(Path(folder, "phases"))
        receiver.bind(path)

        def on_message() -> None:
            with contextlib.suppress(BlockingIOError):
                phase = _PHASES.get(receiver.recv(64))
                if phase is not None and phase not in reported:
                    reported.add(phase)
                    report(phase)

        os.environ[plugin.PHASE_SOCKET] = path
        os.environ[plugin.RUNNER_PID] = str(os.getpid())
        loop.add_reader(receiver, on_message)
        try:
            yield
        finally:
            loop.remove_reader(receiver)
