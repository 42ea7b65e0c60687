"""A fleet's directory: where its state, logs, spans and models lie."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forebay_client.fleet.core.plan import Options, decode_options, encode_options
from forebay_client.fleet.core.state import Fleet, decode, encode

_LOOK_INTERVAL_S = 0.1


class Directory:
    """The state directory of one fleet. Its path is absolute and resolved."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self.spans = self.path / "spans.db"
        self.models = self.path / "models"
        self.etcd = self.path / "etcd"
        self._fleet = self.path / "fleet.json"
        self._options = self.path / "options.json"

    def create(self) -> None:
        """Make it, readable by nobody else: logs and spans may name what users ask about."""
        for path in (self.path, self.logs, self.models):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self) -> Fleet | None:
        """The fleet's last known state; None when there is none."""
        try:
            return decode(self._fleet.read_text())
        except OSError:
            return None

    def write(self, fleet: Fleet) -> None:
        """Replace the fleet's state in one step, so that readers never see half of it."""
        draft = self._fleet.with_suffix(f".{os.getpid()}")
        draft.write_text(encode(fleet))
        draft.replace(self._fleet)

    def beat(self) -> None:
        """Say that the state still holds. FileNotFoundError when it was taken away."""
        os.utime(self._fleet)

    def last_beat(self) -> int:
        """A number that every `write` and every `beat` changes; 0 when there is no state."""
        try:
            return self._fleet.stat().st_mtime_ns
        except OSError:
            return 0

    def forget(self) -> None:
        """Remove the fleet's state."""
        self._fleet.unlink(missing_ok=True)

    def read_options(self) -> Options:
        """What the fleet was last asked to be. OSError when nothing was."""
        return decode_options(self._options.read_text())

    def write_options(self, options: Options) -> None:
        """Leave for the supervisor what the fleet shall be."""
        self._options.write_text(encode_options(options))

    @contextlib.contextmanager
    def hold(self, *, wait_s: float = 0) -> Iterator[None]:
        """Be the only one here who may start and end a fleet's processes.

        The lock goes with the process, however it ends.

        Raises:
            BlockingIOError: somebody else held it for longer than `wait_s`.
        """
        until = time.monotonic() + wait_s
        with (self.path / "lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise
                time.sleep(_LOOK_INTERVAL_S)
            yield

    def log(self, name: str) -> Path:
        """A service's log file."""
        return self.logs / f"{name}.log"


def last_lines(path: Path, *, bytes_max: int = 16_384) -> list[str]:
    """The end of a log; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - bytes_max))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def trim(path: Path, *, bytes_max: int) -> None:
    """Move a log aside once it is too large: its content to `.1`, itself to nothing.

    The writer holds the file open for appending, so it goes on in the emptied one. What it writes
    between the copy and the cut is lost; a log may lose a line.
    """
    try:
        if path.stat().st_size <= bytes_max:
            return
        aside = path.with_name(path.name + ".1")
        aside.write_bytes(path.read_bytes()[-bytes_max:])
        os.truncate(path, 0)
    except FileNotFoundError:
        return
