"""Keeps one service running: start, wait until ready, start again when it died, stop in the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from forebay_client.fleet.child import Child
from forebay_client.fleet.core.log_tail import reason_in
from forebay_client.fleet.core.restart import RestartPolicy, Restarts
from forebay_client.fleet.core.state import Process, Service, ServiceState
from forebay_client.fleet.directory import last_lines
from forebay_client.fleet.processes import signal_process

Report = Callable[[Service], None]
Probe = Callable[[], Awaitable[None]]

_KILL_WAIT_S = 2.0
"""How long the system may take after SIGKILL."""


class ServiceLoop:
    """One service. `run` ends only after `stop`, or when the service never becomes ready.

    Args:
        name: as it is shown, and named in the log's file name.
        command: what to run.
        environ: its whole environment.
        address: where it listens.
        log: file that its output is appended to.
        policy: how patient to be.
        probe: returns once the service does its work; may be called again after a restart.
        report: told of every change.
        detail: what is worth knowing about it while nothing is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        environ: Mapping[str, str],
        address: str,
        log: Path,
        policy: RestartPolicy,
        probe: Probe,
        report: Report,
        detail: str = "",
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set once it was ready for the first time."""
        self.failure: str | None = None
        """Why it was given up."""
        self._command = command
        self._environ = dict(environ)
        self._address = address
        self._log = log
        self._probe = probe
        self._report = report
        self._detail = detail
        self._restarts = Restarts(policy)
        self._stopping = asyncio.Event()
        self._identity: Process | None = None
        self._said(ServiceState.WAITING, detail)

    async def run(self) -> None:
        """Keep the service running."""
        while not self._stopping.is_set():
            began_s = time.monotonic()
            detail = await self._live(began_s)
            self._identity = None
            if self._stopping.is_set():
                break
            pause_s = self._restarts.on_death(
                lived_s=time.monotonic() - began_s, was_ever_ready=self.ready.is_set()
            )
            if pause_s is None:
                self.failure = f"{self.name} {detail}"
                self._said(ServiceState.FAILED, detail)
                return
            self._said(ServiceState.RESTARTING, detail)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        self._said(ServiceState.STOPPED)

    async def stop(self, *, timeout_s: float, running: asyncio.Task[None]) -> None:
        """Ask the service to end, make it after `timeout_s`, and wait until `running` has ended.

        Args:
            timeout_s: seconds until SIGKILL.
            running: the task of `run`.
        """
        self._stopping.set()
        if self._identity is not None:
            self._said(ServiceState.STOPPING)
            signal_process(self._identity, signal.SIGTERM)
        _, pending = await asyncio.wait({running}, timeout=timeout_s)
        if pending and self._identity is not None:
            # Its session: what it started in it must not outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._identity.pid, signal.SIGKILL)
            _, pending = await asyncio.wait({running}, timeout=_KILL_WAIT_S)
        if pending:
            # It hangs in the system, where no signal reaches it, or never became a process.
            running.cancel()
            await asyncio.wait({running})
            self._said(ServiceState.FAILED, "cannot be ended")

    async def _live(self, began_s: float) -> str:
        """One life of the process; returns how it ended."""
        child = Child(self._command, environ=self._environ, log=self._log)
        try:
            self._identity = await child.started
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        self._said(ServiceState.STARTING)
        probing = asyncio.create_task(self._wait_ready(began_s))
        try:
            if self._stopping.is_set() and self._identity is not None:
                signal_process(self._identity, signal.SIGTERM)
            status = await child.ended
        finally:
            probing.cancel()
            await asyncio.wait({probing})
        why = reason_in(await asyncio.to_thread(last_lines, self._log))
        return _exit_text(status) + (f": {why}" if why else "")

    async def _wait_ready(self, began_s: float) -> None:
        await self._probe()
        self.ready.set()
        if not self._stopping.is_set():
            self._said(ServiceState.READY, self._detail, started_in_s=time.monotonic() - began_s)

    def _said(
        self, state: ServiceState, detail: str = "", *, started_in_s: float | None = None
    ) -> None:
        self._report(
            Service(
                name=self.name,
                state=state,
                since_unix_s=time.time(),
                address=self._address,
                process=self._identity,
                started_in_s=started_in_s,
                restarts=self._restarts.count,
                detail=detail,
            )
        )


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
