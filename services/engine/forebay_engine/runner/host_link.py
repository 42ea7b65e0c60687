"""The runner's end of the link to its host, on a thread of its own.

The loop may be busy importing or loading; the thread is not, and it sees at once when the host is
gone. Then nothing may be left of this runner: the whole process group is killed, this process with
it.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

import msgspec

from forebay_engine.adapters.process_group import kill_processes
from forebay_engine.core import link


class HostLink:
    """Messages to and from the host."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb")

    def read_start(self) -> link.Start:
        """Wait for the host's first message."""
        message = self._read()
        if not isinstance(message, link.Start):
            raise SystemExit("the host did not say what to load")
        return message

    def listen(self, deliver: Callable[[link.Command], None]) -> None:
        """Deliver commands, on a thread, until the host is gone."""
        thread = threading.Thread(target=self._listen, args=(deliver,), name="link", daemon=True)
        thread.start()

    def send(self, message: link.FromRunner) -> None:
        """Send a message. A host that has stopped reading makes it wait, never a report of load."""
        flags = socket.MSG_DONTWAIT if isinstance(message, link.Load) else 0
        # A full buffer loses a report of load, which the next one replaces; a host that is gone is
        # the listening thread's business.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._socket.sendall(link.encode(message), flags)

    def _listen(self, deliver: Callable[[link.Command], None]) -> None:
        while isinstance(message := self._read(), link.Command):
            deliver(message)
        # A runner that somebody started by hand shares its group with that somebody.
        if os.getpgrp() == os.getpid():
            kill_processes(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    def _read(self) -> link.FromHost | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            line = self._lines.readline(link.LINE_BYTES_MAX)
            if line.endswith(b"\n"):
                return link.decode_from_host(line)
        return None
