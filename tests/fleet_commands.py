"""The command `forebay`, as a real process on a state directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay_client.fleet.directory import Directory

BOUND_S = 30.0
_START_S = 120.0


class Commands:
    """Runs commands of one fleet; `environ` may be changed before."""

    def __init__(self, path: Path) -> None:
        self.directory = Directory(path)
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FOREBAY_", "OTEL_"))
        }
        self.environ |= {"FOREBAY_STATE_DIR": str(path), "COLUMNS": "120"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; standard output and error are one pipe."""
        return self.start_module("forebay_client.cli", *arguments)

    def start_module(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a module in the same environment."""
        return subprocess.Popen(
            [sys.executable, "-m", name, *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run a command that must exit with `status`; returns what it printed."""
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=_START_S)
        assert process.returncode == status, output
        return output

    def up(self, *arguments: str, status: int = 0) -> str:
        """`forebay up` on free ports, with a simulated model."""
        free = ("--http-port", "0", "--grpc-port", "0", "--model", "simulated")
        return self.run("up", *free, *arguments, status=status)

    def status(self) -> dict[str, Any]:
        """What `forebay status --json` says."""
        with self.start("status", "--json") as process:
            output, _ = process.communicate(timeout=BOUND_S)
        status: dict[str, Any] = json.loads(output)
        return status

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the status until it is as it should be."""
        deadline = time.monotonic() + BOUND_S
        while not holds(status := self.status()):
            assert time.monotonic() < deadline, status
        return status
