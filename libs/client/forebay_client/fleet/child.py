"""A process in a session of its own, started and waited for on a thread.

`subprocess` starts it without running the fork handlers of libraries. uvloop's own way runs them,
and holds up the event loop until the child has become its command: a child that hangs in a handler,
as gRPC's have made one, holds up everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay_client.fleet.core.state import Process
from forebay_client.fleet.processes import identify


class Child:
    """One process. Whatever the system does, its start and its end block no event loop."""

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str], log: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[Process | None] = self._loop.create_future()
        """The process, or None when it has already ended. OSError when it cannot be started."""
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit status; the signal that ended it as a negative number."""
        threading.Thread(
            target=self._live, args=(tuple(command), dict(environ), log), daemon=True
        ).start()

    def _live(self, command: tuple[str, ...], environ: dict[str, str], log: Path) -> None:
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    # Ctrl-C at a terminal reaches the supervisor alone, which stops in order.
                    start_new_session=True,
                )
        except OSError as error:
            self._tell(self.started, partial(self.started.set_exception, error))
            return
        self._tell(self.started, partial(self.started.set_result, identify(process.pid)))
        self._tell(self.ended, partial(self.ended.set_result, process.wait()))

    def _tell(self, future: asyncio.Future[Any], settle: Callable[[], None]) -> None:
        def once() -> None:
            if not future.done():
                settle()

        # The loop may have ended meanwhile, and nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(once)
