"""Starts, follows and stops a local fleet from the outside, through its directory."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from forebay_client.fleet import ports
from forebay_client.fleet.core import plan
from forebay_client.fleet.core.log_tail import reason_in
from forebay_client.fleet.core.state import Fleet, Phase, Process
from forebay_client.fleet.directory import Directory, last_lines
from forebay_client.fleet.processes import (
    descendants,
    end,
    is_alive,
    of_fleet,
    signal_process,
)

_LOOK_INTERVAL_S = 0.1
_FIRST_STATE_S = 30.0
"""How long a supervisor may take to say anything."""
_LEFTOVER_GRACE_S = 5.0
_MANIFEST = "forebay-manifest.json"


class FleetError(Exception):
    """A local fleet cannot do what was asked; the message is one line for people."""


def running(directory: Directory) -> Fleet | None:
    """The fleet that runs in this directory; None when none does."""
    fleet = directory.read()
    return fleet if fleet is not None and is_alive(fleet.supervisor) else None


def clear_leftovers(directory: Directory, *, besides: Iterable[Process] = ()) -> int:
    """End what a supervisor that was killed has left behind, and forget its fleet.

    Args:
        directory: the fleet's.
        besides: processes that are the fleet's, too.

    Returns:
        How many processes there were.

    Raises:
        FleetError: one cannot be ended.
    """
    ended = end_leftovers(directory, besides=besides)
    directory.forget()
    return ended


def end_leftovers(directory: Directory, *, besides: Iterable[Process] = ()) -> int:
    """End every process of a fleet whose supervisor is gone; returns how many there were.

    Raises:
        FleetError: one cannot be ended.
    """
    fleet = directory.read()
    recorded = [s.process for s in fleet.services if s.process] if fleet else []
    found = (*besides, *recorded, *of_fleet(directory.path))
    left = {one.pid: one for one in found if is_alive(one)}
    remaining = end(left.values(), grace_s=_LEFTOVER_GRACE_S)
    if remaining:
        raise FleetError(
            f"left over from an earlier run, and cannot be ended: process {remaining[0].pid}"
        )
    return len(left)


def check_ports(options: plan.Options) -> None:
    """Raises FleetError when a port that was asked for is taken."""
    for port, option in ((options.http_port, "--http-port"), (options.grpc_port, "--grpc-port")):
        if port and not ports.is_free(port):
            raise FleetError(
                f"port {port} is in use: choose another with {option}, or {option} 0 for any"
            )


def prepare(model: str, into: Path, say: Callable[[str], None], *, log: Path) -> None:
    """Make a known model's directory, unless it is there.

    Args:
        model: `smollm2` or `minilm`.
        into: the directory.
        say: told of every step.
        log: takes what the libraries print on the way.

    Raises:
        FleetError: it cannot be made here.
    """
    if (into / _MANIFEST).exists():
        return
    if importlib.util.find_spec("forebay_engine") is None:
        raise FleetError(f"{model} is not prepared, and the engine that does it is not installed")
    command = [sys.executable, "-m", "forebay_engine.prepare", model, "--into", str(into)]
    with (
        log.open("w") as noise,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=noise, text=True
        ) as process,
    ):
        assert process.stdout is not None, "a pipe was asked for"
        for line in process.stdout:
            say(line.rstrip())
    if process.returncode:
        raise FleetError(f"{model} could not be prepared: {reason_in(last_lines(log))}")


def launch(
    directory: Directory, options: plan.Options, *, foreground: bool
) -> subprocess.Popen[bytes]:
    """Start a supervisor.

    Args:
        directory: where its state is kept.
        options: what it shall run.
        foreground: it stops when this process ends; otherwise it goes on without it.
    """
    directory.create()
    directory.write_options(options)
    directory.forget()
    command = [sys.executable, "-m", "forebay_client.fleet.supervisor"]
    command += ["--state-dir", str(directory.path)]
    command += ["--while-stdin"] if foreground else []
    with directory.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if foreground else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # It would begin again with it by itself; this saves it the time.
            env={**os.environ, plan.FORK_SUPPORT: "0"},
        )


class _Silence:
    """How long a supervisor has said nothing, by our own clock: its own may have been set anew."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._beat = directory.last_beat()
        self._since_s = time.monotonic()

    def lasted_s(self) -> float:
        """Seconds since its state changed last, or since we began to look."""
        beat = self._directory.last_beat()
        if beat != self._beat:
            self._beat, self._since_s = beat, time.monotonic()
        return time.monotonic() - self._since_s


def follow_start(
    directory: Directory, process: subprocess.Popen[bytes] | None, *, silence_s: float
) -> Iterator[Fleet]:
    """The states of a starting fleet, one per look, until it is ready.

    Args:
        directory: the fleet's.
        process: its supervisor, where this process has started it.
        silence_s: for how long it may say nothing, in seconds.

    Raises:
        FleetError: it could not be started.
    """
    until = time.monotonic() + _FIRST_STATE_S
    silence = _Silence(directory)
    log = directory.log("supervisor")
    while True:
        # Looked at before the state is read: what was written last is not missed then.
        ended = process is not None and process.poll() is not None
        fleet = directory.read()
        if fleet is not None:
            yield fleet
            if fleet.phase is Phase.READY:
                return
            if fleet.phase is not Phase.STARTING and fleet.reason:
                raise FleetError(f"the fleet could not be started: {fleet.reason}")
            ended = ended or not is_alive(fleet.supervisor)
        if ended:
            why = reason_in(last_lines(log))
            raise FleetError(
                "the supervisor ended before the fleet was ready" + (f": {why}" if why else "")
            )
        if fleet is not None and silence.lasted_s() > silence_s:
            raise FleetError(f"the supervisor hangs: no word for {silence_s:g} s; its log is {log}")
        if fleet is None and time.monotonic() > until:
            raise FleetError(f"the supervisor did not begin within {_FIRST_STATE_S:g} s; see {log}")
        time.sleep(_LOOK_INTERVAL_S)


def follow_stop(
    directory: Directory, fleet: Fleet, *, timeout_s: float, silence_s: float
) -> Iterator[Fleet]:
    """Stop a fleet and yield its states, one per look, until nothing of it is left.

    Args:
        directory: the fleet's.
        fleet: what is known of it.
        timeout_s: how long its supervisor may take, in seconds, until everything is killed.
        silence_s: for how long it may say nothing, in seconds.

    Raises:
        FleetError: a process cannot be ended.
    """
    signal_process(fleet.supervisor, signal.SIGTERM)
    until = time.monotonic() + timeout_s
    silence = _Silence(directory)
    while is_alive(fleet.supervisor) and time.monotonic() < until:
        if silence.lasted_s() > silence_s:
            break
        yield directory.read() or fleet
        time.sleep(_LOOK_INTERVAL_S)
    # A child that hangs before it has become its command bears no mark yet, and has one parent only
    # as long as that lives.
    unmarked = descendants(fleet.supervisor)
    end([fleet.supervisor], grace_s=0)
    clear_leftovers(directory, besides=unmarked)
