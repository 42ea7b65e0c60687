"""The launcher of local processes, with small programs in place of engine hosts and batchers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_autoscaler.adapters import processes
from forebay_autoscaler.adapters.local_launcher import MARK, LocalLauncher
from forebay_autoscaler.adapters.replica_dir import Holder, ReplicaDir, ReplicaRecord
from forebay_autoscaler.config import Config
from forebay_autoscaler.launcher import LaunchOrder
from forebay_common.config import CommonConfig
from forebay_common.errors import ForebayError, Reason

pytestmark = pytest.mark.integration

Until = Callable[..., Awaitable[None]]
SLEEP = ("/bin/sleep", "1000")

# Tells its environment and its children's numbers, and lives until it is told to go.
PROGRAM = """
import json, os, signal, socket, subprocess, sys, time
children = []
if len(sys.argv) > 3:
    clean = {"PATH": os.environ["PATH"]}
    children = [
        subprocess.Popen(["/bin/sleep", "1000"]),
        subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True),
        subprocess.Popen(["/bin/sleep", "1000"], env=clean),
    ]
    if sys.argv[3] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
env = {k: v for k, v in os.environ.items() if k.startswith(("FOREBAY_", "OTEL_"))}
told = {"name": sys.argv[2], "env": env, "children": [c.pid for c in children]}
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as listener:
    listener.sendall(json.dumps(told).encode())
time.sleep(1000)
"""


def a_config(state_dir: Path, **changes: Any) -> Config:
    fields: dict[str, Any] = {
        "state_dir": str(state_dir),
        "engine_command": SLEEP,
        "batcher_command": SLEEP,
        "stop_grace_s": 2.0,
        "drain_timeout_s": 1.0,
        **changes,
    }
    return Config(**fields)


def an_order(replica_id: str = "r-1") -> LaunchOrder:
    spec = engine.ModelSpec(model_version="chat@1", backend=engine.BACKEND_SIMULATED)
    return LaunchOrder(replica_id, "p", (spec,))


class Bench:
    """Launchers on one directory, and a way to wait for what they change."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.port = 0
        self.heard: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Event()
        self.launchers: list[LocalLauncher] = []

    def launcher(self, environ: dict[str, str] | None = None, **config: Any) -> LocalLauncher:
        common = CommonConfig(etcd_endpoints=("127.0.0.1:9",), namespace="/n")
        launcher = LocalLauncher(
            a_config(self.state_dir, **config),
            common,
            environ={**os.environ, **(environ or {})},
            on_change=self.changed.set,
        )
        self.launchers.append(launcher)
        return launcher

    def program(self, name: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-c", PROGRAM, str(self.port), name, *arguments)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a program."""
        told = json.loads(await reader.read())
        self.heard[told["name"]] = told
        self.changed.set()
        writer.close()

    async def told(self, name: str) -> dict[str, Any]:
        """What a program has said, once it has."""
        await self.until(lambda: name in self.heard)
        return self.heard[name]

    async def until(self, condition: Callable[[], bool], *, within_s: float = 15) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def record(self, replica_id: str = "r-1") -> ReplicaRecord:
        found = {r.replica_id: r for r in ReplicaDir(self.state_dir).records()}
        return found[replica_id]


@pytest.fixture
async def bench(state_dir: Path) -> AsyncIterator[Bench]:
    bench = Bench(state_dir)
    async with await asyncio.start_server(bench.hear, "127.0.0.1", 0) as server:
        bench.port = server.sockets[0].getsockname()[1]
        yield bench
    for launcher in bench.launchers:
        await launcher.close(stop_replicas=True)
    if state_dir.exists():
        assert list((state_dir / "replicas").iterdir()) == []


async def test_each_half_is_told_its_own_and_what_is_common(bench: Bench) -> None:
    launcher = bench.launcher(
        environ={
            "FOREBAY_INSTANCE_ID": "the-autoscaler",
            "FOREBAY_AUTOSCALER_LISTEN": "127.0.0.1:1",
            "FOREBAY_BATCHER_QUEUED_MAX_BATCH": "7",
            "FOREBAY_BATCHER_METRICS_LISTEN": "127.0.0.1:9000",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
        },
        engine_command=bench.program("engine"),
        batcher_command=bench.program("batcher"),
    )
    await launcher.begin(1)
    await launcher.launch(an_order())
    engine_env = (await bench.told("engine"))["env"]
    batcher_env = (await bench.told("batcher"))["env"]
    for env in (engine_env, batcher_env):
        assert env["FOREBAY_NAMESPACE"] == "/n"
        assert env["FOREBAY_ETCD_ENDPOINTS"] == "127.0.0.1:9"
        assert env["FOREBAY_INSTANCE_ID"] == "r-1"
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
        assert "FOREBAY_AUTOSCALER_LISTEN" not in env
    assert json.loads(engine_env["FOREBAY_ENGINE_LOAD"]) == [
        {"modelVersion": "chat@1", "backend": "BACKEND_SIMULATED"}
    ]
    assert engine_env["FOREBAY_ENGINE_LISTEN"] == batcher_env["FOREBAY_BATCHER_ENGINE_ADDRESS"]
    assert batcher_env["FOREBAY_BATCHER_POOL"] == "p"
    assert batcher_env["FOREBAY_BATCHER_ROLE"] == "standby"
    assert batcher_env["FOREBAY_BATCHER_REPLICA_ID"] == "r-1"
    assert batcher_env["FOREBAY_BATCHER_QUEUED_MAX_BATCH"] == "7"
    assert batcher_env["FOREBAY_BATCHER_METRICS_LISTEN"] == "127.0.0.1:0"
    private = Path(engine_env["FOREBAY_ENGINE_SOCKET_DIR"])
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", ["engine", "batcher"])
async def test_the_halves_of_a_replica_end_together(
    bench: Bench, until_ended: Until, part: str
) -> None:
    launcher = bench.launcher()
    await launcher.begin(1)
    await launcher.launch(an_order())
    pids = {name: ref.pid for name, ref in bench.record().processes.items()}
    assert pids.keys() == {"engine", "batcher"}
    os.kill(pids[part], signal.SIGKILL)
    await bench.until(lambda: "r-1" in launcher.gone())
    for pid in pids.values():
        await until_ended(pid)
    assert launcher.launched() == ()


@pytest.mark.parametrize("how", ["obedient", "stubborn"])
async def test_nothing_a_replica_has_started_outlives_it(
    bench: Bench, until_ended: Until, how: str
) -> None:
    """Not a child in a session of its own, not one without our variables in its environment."""
    launcher = bench.launcher(engine_command=bench.program("engine", how), stop_grace_s=0.5)
    await launcher.begin(1)
    await launcher.launch(an_order())
    children = (await bench.told("engine"))["children"]
    assert len(children) == 3
    await launcher.stop("r-1")
    for pid in children:
        await until_ended(pid, within_s=1)
    assert not (bench.state_dir / "replicas" / "r-1").exists()


async def test_another_launcher_takes_over_what_runs(bench: Bench, until_ended: Until) -> None:
    first = bench.launcher()
    await first.begin(1)
    await first.launch(an_order())
    pids = [ref.pid for ref in bench.record().processes.values()]
    first.mark_leaving("r-1", leaving=True)
    first.mark_active("r-1")
    await first.close(stop_replicas=False)
    assert all(processes.refer(pid) for pid in pids)

    second = bench.launcher()
    await second.begin(2)
    (found,) = second.launched()
    assert (found.replica_id, found.pool) == ("r-1", "p")
    assert (found.is_stopping, found.was_active) == (True, True)
    await second.launch(an_order())  # nothing: it runs
    assert [ref.pid for ref in bench.record().processes.values()] == pids
    await second.stop("r-1")
    for pid in pids:
        await until_ended(pid, within_s=1)


async def test_half_a_launch_is_found_by_its_mark(bench: Bench, until_ended: Until) -> None:
    """The launcher died after it had started a process and before it had written its number."""
    directory = ReplicaDir(bench.state_dir)
    directory.prepare()
    record = ReplicaRecord(
        "r-1", "p", 0.0, "r-1:secret", directory.create("r-1", longest_name=9), {}
    )
    directory.save(record)
    orphan = Popen(SLEEP, env={MARK: "r-1:secret"}, start_new_session=True)
    other = Popen(SLEEP, env={MARK: "r-1:other"}, start_new_session=True)
    try:
        launcher = bench.launcher()
        await launcher.begin(1)
        await bench.until(lambda: "r-1" in launcher.gone())
        await until_ended(orphan.pid, within_s=1)
        assert other.poll() is None
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


async def test_a_number_that_was_used_again_is_not_ours(bench: Bench) -> None:
    directory = ReplicaDir(bench.state_dir)
    directory.prepare()
    stranger = Popen(SLEEP, start_new_session=True)
    try:
        ref = processes.refer(stranger.pid)
        assert ref is not None
        stale = dataclasses.replace(ref, started_ticks=ref.started_ticks - 1)
        other_boot = dataclasses.replace(ref, boot_id="another")
        socket_dir = directory.create("r-1", longest_name=9)
        parts = {"engine": stale, "batcher": other_boot}
        record = ReplicaRecord("r-1", "p", 0.0, "m", socket_dir, parts)
        directory.save(record)
        launcher = bench.launcher()
        await launcher.begin(1)
        await bench.until(lambda: "r-1" in launcher.gone())
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_orders_of_a_leader_that_was_replaced_are_refused(bench: Bench) -> None:
    launcher = bench.launcher()
    await launcher.begin(5)
    await launcher.launch(an_order())
    successor = Popen(SLEEP)
    try:
        ref = processes.refer(successor.pid)
        assert ref is not None
        ReplicaDir(bench.state_dir).set_holder(Holder(6, ref))
        for order in (launcher.launch(an_order("r-2")), launcher.stop("r-1"), launcher.begin(5)):
            with pytest.raises(ForebayError) as refused:
                await order
            assert refused.value.reason is Reason.STALE_FENCE
    finally:
        successor.kill()
        successor.wait()
    # etcd may have been set up anew since that one died.
    await launcher.begin(1)
    assert [each.replica_id for each in launcher.launched()] == ["r-1"]


async def test_what_cannot_be_started_leaves_nothing(bench: Bench) -> None:
    launcher = bench.launcher(batcher_command=("/nonexistent",))
    await launcher.begin(1)
    with pytest.raises(ForebayError) as failed:
        await launcher.launch(an_order())
    assert failed.value.reason is Reason.LOAD_FAILED
    assert "/" not in failed.value.message
    assert "r-1" in launcher.gone()
    assert launcher.launched() == ()


async def test_a_long_directory_has_its_sockets_elsewhere(bench: Bench, tmp_path: Path) -> None:
    bench.state_dir = tmp_path / ("long-" * 20)
    launcher = bench.launcher()
    await launcher.begin(1)
    await launcher.launch(an_order())
    sockets = Path(bench.record().socket_dir)
    assert len(str(sockets)) < 60
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    await launcher.stop("r-1")
    assert not sockets.exists()


async def test_logs_are_bounded(bench: Bench) -> None:
    directory = ReplicaDir(bench.state_dir)
    directory.prepare()
    for number in range(6):
        log = directory.log(f"r-{number}", "engine")
        log.write_bytes(b"x" * 10_000)
        os.utime(log, (number, number))
    with directory.log("r-5", "engine").open("ab") as writer:
        directory.trim_logs({"r-5"}, bytes_max=5000, kept=2)
        writer.write(b"more")
    assert directory.log("r-5", "engine").read_bytes() == b"more"
    names = {path.name for path in (bench.state_dir / "logs").iterdir()}
    assert names == {
        "r-5.engine.log", "r-5.engine.log.1", "r-4.engine.log", "r-3.engine.log"
    }  # fmt: skip


async def test_replicas_outlive_their_launcher_unless_they_shall_not(
    bench: Bench, until_ended: Until
) -> None:
    launcher = bench.launcher()
    await launcher.begin(1)
    await launcher.launch(an_order())
    pids = [ref.pid for ref in bench.record().processes.values()]
    await launcher.close(stop_replicas=False)
    assert all(processes.refer(pid) for pid in pids)
    await launcher.close(stop_replicas=True)
    for pid in pids:
        await until_ended(pid, within_s=1)
