"""The life of a runner: load, answer the canary, wait for the host's word, serve, obey, end."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec
from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.engine.v1 import engine_service_pb2_grpc as engine_grpc
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as pb_grpc
from forebay_common import cache_feed, telemetry
from forebay_common import config as common_config
from forebay_common.errors import ForebayError, Reason
from forebay_common.server import run as run_service
from forebay_wire.core.limits import Limits
from forebay_wire.server import Server
from google.protobuf import json_format

from forebay_engine import config
from forebay_engine.adapters.profiles import load_profile
from forebay_engine.core import link
from forebay_engine.core.canary import Canary
from forebay_engine.core.pace import Pace
from forebay_engine.runner.backend import Backend, Loaded, Mode, Phase
from forebay_engine.runner.cache_report import CacheReport
from forebay_engine.runner.canary import ask_canary
from forebay_engine.runner.host_link import HostLink
from forebay_engine.runner.pacing import Ticker
from forebay_engine.runner.service import Gate, InferenceServicer
from forebay_engine.runner.simulated import SimulatedBackend

_log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_HEARTBEAT_S = 1.0
_STREAMS_TO_REFUSE = 64
_RESETS_PER_REQUEST = 10
_REASON_CHARACTERS_MAX = 300
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}")


def run(host: HostLink, start: link.Start) -> None:
    """Run until the host says stop, a signal comes, or the engine fails; does not return."""
    run_service(lambda stopping: _Runner(host, start).run(stopping))


class _Runner:
    def __init__(self, host: HostLink, start: link.Start) -> None:
        self._host = host
        self._config = common_config.load(config.Config, config.PREFIX, os.environ)
        self._common = common_config.load_common(os.environ)
        self._spec = json_format.Parse(start.spec_json, engine_pb.ModelSpec())
        self._socket_path = start.socket_path
        self._commands: asyncio.Queue[link.Command] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._loaded: Loaded | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        telemetry.configure(
            "runner",
            instance_id=f"{self._common.instance_id}/{self._spec.model_version}",
            log_level=self._common.log_level,
            distribution="forebay-engine",
        )
        loop = asyncio.get_running_loop()

        def deliver(command: link.Command) -> None:
            loop.call_soon_threadsafe(self._commands.put_nowait, command)

        self._host.listen(deliver)
        try:
            await self._load_and_serve(stopping)
        except Exception as error:
            _log.exception("the runner cannot go on")
            self._host.send(link.Failed(_reason(error)))
            _exit(1)
        _exit(0)

    async def _load_and_serve(self, stopping: asyncio.Event) -> None:
        backend = _make_backend(self._spec, self._config)
        server = Server(_limits(self._config))
        servicer = InferenceServicer(
            backend,
            Ticker(
                Pace(
                    from_streams=self._config.frame_from_streams,
                    interval_s=self._config.frame_interval_ms / 1000,
                )
            ),
            model_version=self._spec.model_version,
            calls_max=self._config.requests_max,
        )
        pb_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
        server.offer(_SERVICE)
        report = CacheReport(
            self._spec.model_version,
            names_max=self._config.cached_prefixes_max,
            blocks_max=self._config.cached_blocks_max,
        )
        backend.report_cache(report)
        engine_grpc.add_CacheServiceServicer_to_server(
            cache_feed.CacheService(report.feed), server.grpc
        )
        server.offer(cache_feed.SERVICE)
        server.set_ready(cache_feed.SERVICE, True)
        await server.listen(f"unix:{self._socket_path}")
        tasks: list[asyncio.Task[object]] = []
        grace_s = 0.0
        try:
            loaded = await backend.load(self._report)
            self._loaded = loaded
            servicer.set_fingerprint(loaded.system_fingerprint)
            await self._say_ready(backend, loaded)
            obedience = asyncio.create_task(self._obey(backend, servicer, server, loaded))
            failure = asyncio.create_task(backend.failed())
            tasks = [
                obedience,
                failure,
                asyncio.create_task(self._report_load(backend, servicer)),
                asyncio.create_task(report.run()),
                asyncio.create_task(stopping.wait()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if failure in done:
                raise ForebayError(Reason.LOAD_FAILED, failure.result())
            for task in done:
                task.result()
            grace_s = self._common.drain_timeout_s
        finally:
            for task in tasks:
                task.cancel()
            await server.drain(grace_s)
            await backend.close()

    def _report(self, phase: Phase) -> None:
        self._host.send(link.Phase(phase.value))

    async def _say_ready(self, backend: Backend, loaded: Loaded) -> None:
        self._report(Phase.CANARY)
        answer: Canary = await ask_canary(backend, self._spec.task)
        self._host.send(
            link.Ready(
                max_sequences=loaded.max_sequences,
                kv_cache_tokens=loaded.kv_cache_tokens,
                context_tokens=loaded.context_tokens,
                system_fingerprint=loaded.system_fingerprint,
                can_sleep=loaded.can_sleep,
                canary_tokens=answer.tokens,
                canary_vector=answer.vector,
            )
        )

    async def _obey(
        self,
        backend: Backend,
        servicer: InferenceServicer,
        server: Server,
        loaded: Loaded,
    ) -> None:
        """Carry out the host's commands, one after the other, until it says stop."""
        draining: asyncio.Task[None] | None = None

        def open_to(gate: Gate) -> None:
            servicer.set_gate(gate)
            server.set_ready(_SERVICE, gate is Gate.OPEN)

        async def sleep() -> None:
            await backend.sleep()
            open_to(Gate.SLEEPING)

        async def wake() -> None:
            await backend.wake()
            await self._say_ready(backend, loaded)

        async def drain() -> None:
            await servicer.idle()

        while (command := await self._commands.get()).name != "stop":
            if draining is not None and command.name != "drain":
                draining.cancel()
                draining = None
            match command.name:
                case "serve":
                    open_to(Gate.OPEN)
                case "drain":
                    open_to(Gate.DRAINING)
                    draining = asyncio.create_task(self._carry_out(command, drain))
                case "sleep":
                    await self._carry_out(command, sleep)
                case "wake":
                    await self._carry_out(command, wake)
                case unknown:
                    raise ValueError(f"unknown command {unknown}")

    async def _carry_out(self, command: link.Command, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except ForebayError as error:
            self._host.send(link.Refused(command.name, error.reason.value, error.message))
        else:
            self._host.send(link.Done(command.name))

    async def _report_load(self, backend: Backend, servicer: InferenceServicer) -> None:
        """Tell the host the load while it changes, and at least every second that it is alive."""
        interval_s = self._config.load_interval_ms / 1000
        last: link.Load | None = None
        silent_s = 0.0
        while True:
            load = backend.load_now()
            if resumed := servicer.resumed:
                load = msgspec.structs.replace(
                    load,
                    resumed_by_prefill=resumed[Mode.PREFILL],
                    resumed_by_replay=resumed[Mode.REPLAY],
                )
            if load != last or silent_s >= _HEARTBEAT_S:
                self._host.send(load)
                last, silent_s = load, 0.0
            await asyncio.sleep(interval_s)
            silent_s += interval_s


def _exit(code: int) -> NoReturn:
    """End the process at once: the interpreter's own end waits for the engine's threads."""
    telemetry.shutdown()
    os._exit(code)


def _limits(options: config.Config) -> Limits:
    resets = max(Limits().nuisances, _RESETS_PER_REQUEST * options.requests_max)
    return Limits(
        message_bytes=options.message_bytes_max,
        # All requests may come over one connection, and the one too many is refused with QUEUE_FULL
        # instead of waiting at its client.
        streams=options.requests_max + _STREAMS_TO_REFUSE,
        slow_reader_s=options.slow_reader_s,
        # Whoever is on this host's socket may cancel all it has, again and again: to cut its
        # connection would end everybody else's requests, too.
        nuisances=resets,
        nuisances_per_s=resets,
        # On a Unix socket there is nothing to spread anew by age.
        connection_age_s=0,
    )


def _make_backend(spec: engine_pb.ModelSpec, options: config.Config) -> Backend:
    if spec.backend == engine_pb.BACKEND_SIMULATED:
        return SimulatedBackend(spec, load_profile(spec.profile), waiting_max=options.requests_max)
    from forebay_engine.runner.vllm.backend import VllmBackend

    return VllmBackend(spec, options)


def _reason(error: Exception) -> str:
    """Return one line for operators, without paths."""
    text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    first = str(text).strip().splitlines()[0] if str(text).strip() else type(error).__name__
    return _PATH.sub("<path>", first)[:_REASON_CHARACTERS_MAX]
