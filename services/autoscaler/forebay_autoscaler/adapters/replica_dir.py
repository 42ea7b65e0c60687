"""A launcher's directory: who is in charge, what was launched, and the logs.

    holder.json               the process in charge of this host's replicas, and its fence
    replicas/<id>/            private to a replica: replica.json, and sockets where paths are short
    logs/<id>.<part>.log      what its processes write; `.1` is the part before

A replica's record is written before its processes are started and again with their numbers, so one
whose launch was cut short is found by its mark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay_autoscaler.adapters.processes import ProcessRef

_log = logging.getLogger(__name__)

# A Unix socket's path holds 107 bytes. An engine host names a runner's socket by its model version
# and a number; this is what it needs beside the version.
_SOCKET_PATH_MAX = 107 - 16


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who is in charge of this host's replicas."""

    fence: int
    process: ProcessRef


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What is known of a launched replica."""

    replica_id: str
    pool: str
    launched_unix_s: float
    mark: str
    """Inherited by each of its processes, and by no other."""
    socket_dir: str
    processes: Mapping[str, ProcessRef]
    """By part; empty until both run."""
    is_leaving: bool = False
    was_active: bool = False


class ReplicaDir:
    """Reads and writes the directory. Raises OSError where that is impossible."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._replicas = self._path / "replicas"
        self._logs = self._path / "logs"

    def prepare(self) -> None:
        """Make the directories, for this user alone."""
        for path in (self._path, self._replicas, self._logs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def holder(self) -> Holder | None:
        """Who is in charge; None where nobody ever was."""
        values = _read(self._path / "holder.json")
        if values is None:
            return None
        try:
            return Holder(values["fence"], ProcessRef(**values["process"]))
        except (KeyError, TypeError):
            return None

    def set_holder(self, holder: Holder) -> None:
        """Put somebody in charge."""
        _write(self._path / "holder.json", dataclasses.asdict(holder))

    def create(self, replica_id: str, *, longest_name: int) -> str:
        """Make a replica's directory and return the one for its sockets, both private.

        Args:
            replica_id: whose.
            longest_name: length of the longest name a socket will have.
        """
        path = self._replicas / replica_id
        path.mkdir(mode=0o700)
        if len(os.fsencode(path)) + 1 + longest_name <= _SOCKET_PATH_MAX:
            return str(path)
        return tempfile.mkdtemp(prefix="forebay-")

    def save(self, record: ReplicaRecord) -> None:
        """Write a replica's record."""
        path = self._replicas / record.replica_id / "replica.json"
        _write(path, dataclasses.asdict(record))

    def records(self) -> Iterator[ReplicaRecord]:
        """Every replica's record. A directory without one never had processes, and is removed."""
        for path in sorted(self._replicas.iterdir()):
            values = _read(path / "replica.json")
            try:
                if values is None:
                    raise ValueError("no record")
                processes = {k: ProcessRef(**v) for k, v in values["processes"].items()}
                record = ReplicaRecord(**{**values, "processes": processes})
            except (ValueError, KeyError, TypeError, AttributeError):
                _log.warning("%s has no readable record and is removed", path.name)
                shutil.rmtree(path, ignore_errors=True)
                continue
            yield record

    def remove(self, record: ReplicaRecord) -> None:
        """Remove all of a replica but its logs."""
        path = self._replicas / record.replica_id
        if record.socket_dir != str(path):
            shutil.rmtree(record.socket_dir, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)

    def log(self, replica_id: str, part: str) -> Path:
        """Where a part of a replica writes."""
        return self._logs / f"{replica_id}.{part}.log"

    def trim_logs(self, running: set[str], *, bytes_max: int, kept: int) -> None:
        """Cut the logs that have grown too long, and remove all but the newest of what is gone."""
        gone = []
        for path in self._logs.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name.partition(".")[0] not in running:
                    gone.append((path.stat().st_mtime, path))
                elif path.suffix == ".log" and path.stat().st_size > bytes_max:
                    # The writer appends, so it goes on at the new end.
                    shutil.copyfile(path, path.with_suffix(".log.1"))
                    os.truncate(path, 0)
        for _, path in sorted(gone, reverse=True)[kept:]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file as a whole: a reader sees the old one or the new one."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(values, indent=1))
    draft.replace(path)
