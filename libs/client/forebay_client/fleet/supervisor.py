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
import logging
import os
import shutil
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
from forebay_client.fleet.core.restart import RestartPolicy
from forebay_client.fleet.core.state import Fleet, Load, Phase, Service, ServiceState
from forebay_client.fleet.directory import Directory, trim
from forebay_client.fleet.etcd import EtcdNotFoundError, find
from forebay_client.fleet.processes import end, identify, of_fleet
from forebay_client.fleet.service_loop import Probe, ServiceLoop
from forebay_client.traces.receiver import SpanReceiver
from forebay_client.traces.store import Bounds, SpanWriter

_log = logging.getLogger(__name__)
_CARE_INTERVAL_S = 5.0
_EXTERNAL_WAIT_S = 5.0
_HOLD_WAIT_S = 20.0
"""As long as the reaper of a killed supervisor may need."""
_REAPER = str(Path(__file__).with_name("reaper.py"))
ETCD = "etcd"


class StartError(Exception):
    """The fleet cannot be started; the message says why."""


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
                await stop
        except StartError as error:
            _log.error("%s", error)
            self._say(reason=str(error))
        finally:
            if not self._fleet.reason:
                self._say(phase=Phase.STOPPING)
            for task in (caring, stop):
                task.cancel()
            await self._stop()
            self._say(phase=Phase.FAILED if self._fleet.reason else Phase.STOPPED)
        return not self._fleet.reason

    async def _unless(self, stop: asyncio.Task[bool], work: Coroutine[Any, Any, None]) -> None:
        """Do the work unless it takes too long or `stop` ends first.

        Raises:
            StartError: it takes too long, or itself says so.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait(
                {task, stop},
                timeout=self._config.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if task.done():
                task.result()
            elif not stop.done():
                raise StartError(
                    f"not ready within {self._config.start_timeout_s:g} s "
                    f"({PREFIX}_START_TIMEOUT_S); see the logs in {self._directory.logs}"
                )
        finally:
            task.cancel()
            await asyncio.wait({task})

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
                versions,
                self._take_loads,
                attempts=self._config.start_attempts,
            )
        except load_loop.LoadFailedError as error:
            raise StartError(
                f"{error}; see the logs in {self._directory.path}/replicas/logs"
            ) from None

    async def _start_spans(self) -> str:
        if plan.exports_elsewhere(os.environ):
            return ""
        bounds = Bounds(
            spans_max=self._config.spans_max,
            bytes_max=self._config.span_bytes_max,
            age_s_max=self._config.span_age_s_max,
        )
        self._receiver = SpanReceiver(SpanWriter(self._directory.spans, bounds))
        return await self._receiver.listen(f"{ports.HOST}:0")

    async def _start_etcd(self, addresses: plan.Addresses, *, peer_address: str) -> None:
        if self._options.etcd_endpoints:
            await self._find_external_etcd()
            return
        try:
            etcd = await asyncio.to_thread(find)
        except EtcdNotFoundError as error:
            raise StartError(str(error)) from None
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
            raise StartError(f"no etcd answers at {', '.join(endpoints)} (--etcd)") from None
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
        self._loops.append((loop, asyncio.create_task(loop.run(), name=name)))
        return loop

    async def _until_ready(self, loops: list[ServiceLoop]) -> None:
        async def all_ready() -> None:
            for loop in loops:
                await loop.ready.wait()

        ready = asyncio.create_task(all_ready())
        try:
            await asyncio.wait(
                {ready, *(task for _, task in self._loops)}, return_when=asyncio.FIRST_COMPLETED
            )
            for loop, task in self._loops:
                if task.done():
                    raise StartError(loop.failure or f"{loop.name} ended: {task.exception()}")
        finally:
            ready.cancel()
            await asyncio.wait({ready})

    async def _care(self) -> None:
        """Keep the logs within their bounds."""
        while True:
            await asyncio.sleep(_CARE_INTERVAL_S)
            for path in self._directory.path.glob("**/*.log"):
                await asyncio.to_thread(trim, path, bytes_max=self._config.log_bytes_max)

    async def _stop(self) -> None:
        # Twice, because a replica's batcher and its engine end one after the other.
        timeout_s = 2 * (self._drain_timeout_s + self._config.stop_timeout_s)
        for loop, task in reversed(self._loops):
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

    def _take_loads(self, loads: tuple[Load, ...]) -> None:
        self._say(loads=loads)

    def _say(self, **changes: Any) -> None:
        self._fleet = dataclasses.replace(self._fleet, **changes)
        self._directory.write(self._fleet)


def _on(port: int) -> str:
    return f"{ports.HOST}:{port}" if port else ""


def main() -> int:
    """Run a fleet; returns 0 when it was stopped, 1 when it could not be started."""
    parser = argparse.ArgumentParser(prog="python -m forebay_client.fleet.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--while-stdin", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    directory = Directory(arguments.state_dir)
    config = configs.load(Config, PREFIX, os.environ)
    telemetry.configure("supervisor", instance_id=str(os.getpid()), distribution="forebay-client")
    succeeded = False

    async def entry(stopping: asyncio.Event) -> None:
        nonlocal succeeded
        if arguments.while_stdin:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.set)
        supervisor = Supervisor(directory, directory.read_options(), config)
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
