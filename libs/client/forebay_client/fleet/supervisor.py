"""The process that runs a local fleet: `python -m forebay_client.fleet.supervisor --state-dir DIR`.

It reads `options.json`, starts etcd, the span store, the services, and follows the first loads. It
writes what it knows to `fleet.json` whenever it changes. On SIGTERM it stops the services, those
that callers see first. Nothing it started outlives it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from forebay_common import config as configs
from forebay_common import telemetry
from forebay_common.server import run

from forebay_client.fleet import load_loop, ports, probes
from forebay_client.fleet.config import PREFIX, Config, drain_timeout_s
from forebay_client.fleet.core import plan
from forebay_client.fleet.core.log_tail import first_crash, reason_in
from forebay_client.fleet.core.restart import RestartPolicy
from forebay_client.fleet.core.state import Fleet, Load, Phase, Service, ServiceState
from forebay_client.fleet.directory import Directory, last_lines, trim
from forebay_client.fleet.etcd import EtcdNotFoundError, find
from forebay_client.fleet.processes import end, identify, of_fleet
from forebay_client.fleet.service_loop import Probe, ServiceLoop
from forebay_client.traces.receiver import SpanReceiver
from forebay_client.traces.store import Bounds, SpanWriter

_log = logging.getLogger(__name__)
_BEAT_INTERVAL_S = 1.0
_BEATS_PER_TRIM = 5
_ABORT_S = 8.0
"""How long the services of a fleet that was never ready may take to end, all together."""
_ABORT_LEAST_S = 0.5
_UNREADY_STOP_S = 2.0
"""How long one may take that was never ready: it has nothing to finish."""
_EXTERNAL_WAIT_S = 5.0
_HOLD_WAIT_S = 20.0
"""As long as the reaper of a killed supervisor may need."""
_REAPER = str(Path(__file__).with_name("reaper.py"))
ETCD = "etcd"


class BrokenError(Exception):
    """The fleet cannot be started, or cannot go on; the message says why."""


class Supervisor:
    """One local fleet, from its start to its end."""

    def __init__(self, directory: Directory, options: plan.Options, config: Config) -> None:
        identity = identify(os.getpid())
        assert identity is not None, "this process runs"
        self._directory = directory
        self._options = options
        self._config = config
        self._drain_timeout_s = drain_timeout_s(os.environ)
        self._began_s = time.monotonic()
        self._policy = RestartPolicy(
            first_s=config.restart_first_s,
            most_s=config.restart_most_s,
            stable_s=config.restart_stable_s,
            start_attempts=config.start_attempts,
        )
        self._loops: list[tuple[ServiceLoop, asyncio.Task[None]]] = []
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the fleet cannot go on, once it cannot."""
        self._environ: dict[str, str] = {}
        self._receiver: SpanReceiver | None = None
        self._fleet = Fleet(
            phase=Phase.STARTING,
            supervisor=identity,
            started_unix_s=time.time(),
            model=plan.first(options.models, embeds=False),
            embedding_model=plan.first(options.models, embeds=True),
        )
        self._say()

    async def run(self, stopping: asyncio.Event) -> bool:
        """Run the fleet until `stopping` is set; returns False when it could not be started."""
        caring = asyncio.create_task(self._care())
        stop = asyncio.create_task(stopping.wait())
        try:
            await self._unless(stop, self._start())
            if not stopping.is_set():
                self._say(phase=Phase.READY, ready_in_s=time.monotonic() - self._began_s)
                _log.info("the fleet is ready")
                ends: set[asyncio.Future[Any]] = {stop, self._broken}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                self._raise_broken()
        except BrokenError as error:
            _log.error("%s", error)
            self._say(reason=str(error))
        finally:
            if not self._fleet.reason:
                self._say(phase=Phase.STOPPING)
            stop.cancel()
            await self._stop()
            caring.cancel()
            self._say(phase=Phase.FAILED if self._fleet.reason else Phase.STOPPED)
        return not self._fleet.reason

    async def _unless(self, stop: asyncio.Task[bool], work: Coroutine[Any, Any, None]) -> None:
        """Do the work unless it takes too long or `stop` ends first.

        Raises:
            BrokenError: it takes too long, or itself says so.
        """
        task = asyncio.create_task(work)
        try:
            ends: set[asyncio.Future[Any]] = {task, stop, self._broken}
            await asyncio.wait(
                ends,
                timeout=self._config.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._raise_broken()
            if task.done():
                task.result()
            elif not stop.done():
                raise BrokenError(
                    f"not ready within {self._config.start_timeout_s:g} s "
                    f"({PREFIX}_START_TIMEOUT_S); see the logs in {self._directory.logs}"
                )
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _raise_broken(self) -> None:
        if self._broken.done():
            raise BrokenError(self._broken.result())

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_result(reason)

    async def _start(self) -> None:
        spans = await self._start_spans()
        free = ports.pick(6)
        at = [f"{ports.HOST}:{port}" for port in free]
        addresses = plan.Addresses(
            router_grpc=_on(self._options.grpc_port) or at[0],
            router_http=_on(self._options.http_port) or at[1],
            registry=at[2],
            autoscaler=at[3],
            etcd=self._options.etcd_endpoints or (at[4],),
            spans=spans,
        )
        self._environ = plan.environment(
            addresses,
            self._options,
            state_dir=str(self._directory.path),
            drain_timeout_s=self._drain_timeout_s,
            environ=os.environ,
        )
        self._say(
            grpc_address=addresses.router_grpc,
            http_address=addresses.router_http,
            etcd_endpoints=addresses.etcd,
            keeps_spans=bool(spans),
        )
        await self._start_etcd(addresses, peer_address=at[5])
        plans = plan.services(
            self._options,
            addresses,
            python=sys.executable,
            state_dir=str(self._directory.path),
            stop_grace_s=self._drain_timeout_s + self._config.stop_timeout_s,
        )
        started = [self._run_service(one) for one in plans]
        await self._until_ready(started)
        versions = [model.model_version for model in self._options.models]
        try:
            await load_loop.until_answering(
                addresses.router_grpc,
                addresses.autoscaler,
                versions,
                self._take_loads,
                attempts=self._config.start_attempts,
            )
        except load_loop.LoadFailedError as error:
            logs = self._directory.path / "replicas" / "logs"
            ends = [
                await asyncio.to_thread(last_lines, logs / f"{error.replica_id}.{part}.log")
                for part in ("engine", "batcher")
            ]
            why = first_crash(ends).rstrip(".")
            raise BrokenError(
                f"{error}{f': {why}' if why else ''}; see the logs in {logs}"
            ) from None

    async def _start_spans(self) -> str:
        if plan.exports_elsewhere(os.environ):
            return ""
        bounds = Bounds(
            spans_max=self._config.spans_max,
            bytes_max=self._config.span_bytes_max,
            age_s_max=self._config.span_age_s_max,
        )
        path = self._directory.spans
        try:
            writer = SpanWriter(path, bounds)
        except sqlite3.DatabaseError as error:
            _log.warning("the span store is set aside and begun anew: %s", error)
            for part in ("-wal", "-shm"):
                path.with_name(path.name + part).unlink(missing_ok=True)
            path.replace(path.with_name(path.name + ".broken"))
            writer = SpanWriter(path, bounds)
        self._receiver = SpanReceiver(writer)
        return await self._receiver.listen(f"{ports.HOST}:0")

    async def _start_etcd(self, addresses: plan.Addresses, *, peer_address: str) -> None:
        if self._options.etcd_endpoints:
            await self._find_external_etcd()
            return
        try:
            etcd = await asyncio.to_thread(find)
        except EtcdNotFoundError as error:
            raise BrokenError(str(error)) from None
        if etcd.warning:
            self._say(warnings=(*self._fleet.warnings, etcd.warning))
        # Every start begins with an empty etcd: what the fleet is, its options say. Whoever wants
        # to keep a catalogue brings an etcd of their own.
        await asyncio.to_thread(shutil.rmtree, self._directory.etcd, ignore_errors=True)
        (address,) = addresses.etcd
        loop = self._run_loop(
            ETCD,
            plan.etcd_command(
                etcd.path,
                client_address=address,
                peer_address=peer_address,
                data_dir=str(self._directory.etcd),
            ),
            plan.etcd_environment(self._environ),
            address,
            lambda: probes.stores(addresses.etcd, self._options.namespace),
            detail=".".join(map(str, etcd.version)),
        )
        await self._until_ready([loop])

    async def _find_external_etcd(self) -> None:
        endpoints = self._options.etcd_endpoints
        try:
            async with asyncio.timeout(_EXTERNAL_WAIT_S):
                await probes.stores(endpoints, self._options.namespace)
        except TimeoutError:
            raise BrokenError(f"no etcd answers at {', '.join(endpoints)} (--etcd)") from None
        self._take(Service(ETCD, ServiceState.EXTERNAL, time.time(), address=", ".join(endpoints)))

    def _run_service(self, service: plan.ServicePlan) -> ServiceLoop:
        return self._run_loop(
            service.name,
            service.command,
            {**self._environ, **service.env},
            service.address,
            lambda: probes.serves(service.address, service.health),
        )

    def _run_loop(
        self,
        name: str,
        command: tuple[str, ...],
        environ: dict[str, str],
        address: str,
        probe: Probe,
        *,
        detail: str = "",
    ) -> ServiceLoop:
        loop = ServiceLoop(
            name,
            command=command,
            environ=environ,
            address=address,
            log=self._directory.log(name),
            policy=self._policy,
            probe=probe,
            report=self._take,
            detail=detail,
        )
        task = asyncio.create_task(loop.run(), name=name)
        task.add_done_callback(self._after_loop)
        self._loops.append((loop, task))
        return loop

    def _after_loop(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s is not looked after any more", task.get_name(), exc_info=error)
            self._break(f"{task.get_name()} is not looked after any more: {error}")

    async def _until_ready(self, loops: list[ServiceLoop]) -> None:
        timeout_s = self._config.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for loop in loops:
                    await loop.ready.wait()
        except TimeoutError:
            late = next(loop.name for loop in loops if not loop.ready.is_set())
            why = reason_in(await asyncio.to_thread(last_lines, self._directory.log(late)))
            raise BrokenError(
                f"{late} was not ready within {timeout_s:g} s ({PREFIX}_READY_TIMEOUT_S)"
                + (f": {why}" if why else "")
            ) from None

    async def _care(self) -> None:
        """Say every second that we are there, and keep the logs within their bounds."""
        for beat in itertools.count():
            await asyncio.sleep(_BEAT_INTERVAL_S)
            try:
                self._directory.beat()
                if beat % _BEATS_PER_TRIM == 0:
                    await asyncio.to_thread(self._trim_logs)
            except FileNotFoundError:
                # Nobody would ever find us again.
                self._break(f"{self._directory.path} was taken away")
            except OSError as error:
                _log.warning("the fleet's directory cannot be looked after: %s", error)

    def _trim_logs(self) -> None:
        for path in self._directory.path.glob("**/*.log"):
            trim(path, bytes_max=self._config.log_bytes_max)

    async def _stop(self) -> None:
        # Twice, because a replica's batcher and its engine end one after the other.
        patience_s = 2 * (self._drain_timeout_s + self._config.stop_timeout_s)
        if self._fleet.ready_in_s is None:
            # Nobody's request is in flight, but somebody waits at a terminal.
            patience_s = min(patience_s, _ABORT_S)
        until = time.monotonic() + patience_s
        for loop, task in reversed(self._loops):
            timeout_s = patience_s
            if self._fleet.ready_in_s is None:
                timeout_s = max(_ABORT_LEAST_S, until - time.monotonic())
            if not loop.ready.is_set():
                timeout_s = min(timeout_s, _UNREADY_STOP_S)
            await loop.stop(timeout_s=timeout_s, running=task)
        if self._receiver is not None:
            await self._receiver.close()
        left = await asyncio.to_thread(of_fleet, self._directory.path)
        if left:
            _log.warning("ending what is left: %s", ", ".join(str(one.pid) for one in left))
            await asyncio.to_thread(end, left, grace_s=2.0)
        await asyncio.to_thread(shutil.rmtree, self._directory.etcd, ignore_errors=True)

    def _take(self, service: Service) -> None:
        kept = [one for one in self._fleet.services if one.name != service.name]
        before = self._fleet.service(service.name)
        if service.started_in_s is None and before is not None:
            service = dataclasses.replace(service, started_in_s=before.started_in_s)
        order = {name: index for index, name in enumerate(one.name for one in self._fleet.services)}
        kept.append(service)
        kept.sort(key=lambda one: order.get(one.name, len(order)))
        self._say(services=tuple(kept))
        fails = service.state is ServiceState.RESTARTING and self._fleet.phase is Phase.STARTING
        if service.state is ServiceState.FAILED:
            self._break(f"{service.name} {service.detail}")
        elif fails and service.restarts >= self._config.start_attempts:
            self._break(f"{service.name} keeps ending: it {service.detail}")

    def _take_loads(self, loads: tuple[Load, ...]) -> None:
        self._say(loads=loads)

    def _say(self, **changes: Any) -> None:
        self._fleet = dataclasses.replace(self._fleet, **changes)
        try:
            self._directory.write(self._fleet)
        except OSError as error:
            # A full disk is no reason to stop answering.
            _log.warning("the fleet's state cannot be written: %s", error)


def _on(port: int) -> str:
    return f"{ports.HOST}:{port}" if port else ""


def main() -> int:
    """Run a fleet; returns 0 when it was stopped, 1 when it could not be started."""
    parser = argparse.ArgumentParser(prog="python -m forebay_client.fleet.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--while-stdin", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    if os.environ.get(plan.FORK_SUPPORT) != "0":
        # gRPC has read it when it was imported, which was before this line: begin again.
        environ = {**os.environ, plan.FORK_SUPPORT: "0"}
        os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606 - this very command
    directory = Directory(arguments.state_dir)
    config = configs.load(Config, PREFIX, os.environ)
    try:
        options = directory.read_options()
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{directory.path}/options.json: {error}; `forebay up` writes it", file=sys.stderr)
        return 1
    telemetry.configure("supervisor", instance_id=str(os.getpid()), distribution="forebay-client")
    succeeded = False

    async def entry(stopping: asyncio.Event) -> None:
        nonlocal succeeded
        if arguments.while_stdin:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.set)
        supervisor = Supervisor(directory, options, config)
        succeeded = await supervisor.run(stopping)

    with contextlib.ExitStack() as held:
        try:
            held.enter_context(directory.hold(wait_s=_HOLD_WAIT_S))
        except BlockingIOError:
            print("another supervisor runs a fleet in this directory", file=sys.stderr)
            return 1
        held.enter_context(_reaped(directory))
        run(entry)
    return 0 if succeeded else 1


@contextlib.contextmanager
def _reaped(directory: Directory) -> Iterator[None]:
    """Have somebody at hand who cleans up if this process is killed meanwhile."""
    with subprocess.Popen(
        [sys.executable, _REAPER, str(directory.path)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as reaper:
        assert reaper.stdin is not None, "a pipe was asked for"
        yield
        with contextlib.suppress(BrokenPipeError):
            reaper.stdin.write(b"\n")
            reaper.stdin.flush()


if __name__ == "__main__":
    sys.exit(main())
