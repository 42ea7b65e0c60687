"""A runner's process: started in its own process group, heard over its link, never left behind.

The host is a subreaper, so that whatever a dead runner leaves becomes the host's child and can be
waited for. A group's number cannot become anyone else's while one of its dead is not reaped.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping

import msgspec

from forebay_engine.adapters.process_group import kill_everything, kill_processes
from forebay_engine.core import link

_log = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
_REAP_INTERVAL_S = 0.01
# How long a resource tracker may take to clean up behind a dead engine.
_TRACKER_S = 2.0


def become_subreaper() -> None:
    """Adopt the orphans of this process's children."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _log.warning("cannot become a subreaper: %s", os.strerror(ctypes.get_errno()))


class RunnerProcess:
    """One running runner. Everything happens on the loop that started it."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)

    @classmethod
    async def spawn(cls, model_version: str, environ: Mapping[str, str]) -> "RunnerProcess":
        """Start a runner; all it writes goes to the host's standard error."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-m", "forebay_engine.runner"]
            argv += ["--link-fd", str(theirs.fileno()), "--model", model_version]
            # Not the blocking kind: it returns as soon as the new process runs.
            pid = os.posix_spawn(  # noqa: ASYNC221
                sys.executable,
                argv,
                dict(environ),
                file_actions=(
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 2, 1),
                ),
                setpgroup=0,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=link.LINE_BYTES_MAX)
        return cls(pid, reader, writer)

    async def read(self) -> link.FromRunner | None:
        """Return the runner's next message; None once the link has ended."""
        try:
            line = await self._reader.readline()
            return link.decode_from_runner(line) if line.endswith(b"\n") else None
        except (ConnectionError, ValueError, msgspec.DecodeError) as error:
            _log.error("runner %d broke its link: %s", self.pid, type(error).__name__)
            return None

    def send(self, message: link.FromHost) -> None:
        """Send a message; a runner that is gone hears nothing."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(link.encode(message))

    async def died(self, timeout_s: float) -> bool:
        """Wait until the leader is dead, for so long at most. Its group is dead then too."""
        done, _ = await asyncio.wait((self._died,), timeout=timeout_s)
        return bool(done)

    def kill(self) -> None:
        """Kill the runner and every process of its group."""
        if not self._died.done():
            kill_processes(self.pid)

    def how_it_ended(self) -> str:
        """Say how the dead leader ended."""
        code = self._died.result()
        if code < 0:
            return f"The runner was killed by {signal.Signals(-code).name}."
        return f"The runner exited with {code}."

    async def reap(self, timeout_s: float) -> None:
        """Kill what is left of the group and wait until all of it is gone."""
        self.kill()
        self._writer.close()
        if not await self.died(timeout_s):
            _log.error("runner %d cannot be killed", self.pid)
            return
        if not await _reap_group(self.pid, _TRACKER_S):
            kill_everything(self.pid)
            if not await _reap_group(self.pid, timeout_s):
                _log.error("processes of runner %d cannot be killed", self.pid)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        kill_processes(self.pid)
        _, status = os.waitpid(self.pid, 0)
        self._died.set_result(os.waitstatus_to_exitcode(status))
        # Nobody else holds the link, but a descriptor that leaked would keep its end from coming.
        self._reader.feed_eof()


async def _reap_group(group: int, timeout_s: float) -> bool:
    """Wait until nothing of a group is left, for so long at most; say whether that is so."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    # The kernel tells of the end of a process, but of no group's.
    while left := _reap_orphans(group):
        if loop.time() >= deadline:
            break
        await asyncio.sleep(_REAP_INTERVAL_S)
    return not left


def _reap_orphans(group: int) -> bool:
    """Reap the dead of a group; say whether any of it is left."""
    while True:
        try:
            pid, _ = os.waitpid(-group, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
