"""Several router processes behind the same ports: the kernel spreads connections among them.

Each is a whole router, with its own view, limits and metrics, announced as an instance of its own.
One that ends is started anew; when this process goes, by whatever way, all of them go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
from collections.abc import Mapping

from forebay_common.backoff import Backoff
from forebay_common.config import CommonConfig

from forebay_router.config import PREFIX, Config

_log = logging.getLogger(__name__)
_RESTART_S_MIN = 0.1
_RESTART_S_MAX = 5.0
_STEADY_S = 30.0
# Beyond the drain, for the interpreter's own end.
_EXIT_S = 10.0


async def supervise(common: CommonConfig, config: Config, stopping: asyncio.Event) -> None:
    """Run `config.processes` routers until `stopping` is set, then let them drain."""
    grpc_port = _SharedPort(config.grpc_listen)
    http_port = _SharedPort(config.http_listen) if config.http_listen else None
    lifeline, kept = os.pipe()
    environment = {
        **os.environ,
        f"{PREFIX}_PROCESSES": "1",
        f"{PREFIX}_SHARE_PORTS": "true",
        f"{PREFIX}_GRPC_LISTEN": grpc_port.address,
        f"{PREFIX}_HTTP_LISTEN": http_port.address if http_port else "",
        f"{PREFIX}_METRICS_LISTEN": _metrics_listen(config),
        f"{PREFIX}_LIFELINE_FD": str(lifeline),
    }
    _log.info("%d processes share %s", config.processes, grpc_port.address)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(1, config.processes + 1):
                name = f"{common.instance_id}-{number}"
                child = _Child(
                    name,
                    {**environment, "FOREBAY_INSTANCE_ID": name},
                    lifeline,
                    exit_s=common.drain_timeout_s + _EXIT_S,
                )
                group.create_task(child.run(stopping), name=name)
    finally:
        os.close(kept)
        os.close(lifeline)
        grpc_port.close()
        if http_port is not None:
            http_port.close()


async def await_lifeline(lifeline_fd: int, stopping: asyncio.Event) -> None:
    """Set `stopping` when the process at the other end of a pipe is gone."""
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline_fd, stopping.set)
    try:
        await stopping.wait()
    finally:
        loop.remove_reader(lifeline_fd)


class _SharedPort:
    """Holds a port, without listening on it, so that its number stays ours."""

    def __init__(self, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        bare = host.strip("[]")
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((bare, int(port)))
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()


class _Child:
    """One of the processes."""

    def __init__(
        self, name: str, environment: Mapping[str, str], lifeline: int, *, exit_s: float
    ) -> None:
        self._name = name
        self._environment = environment
        self._lifeline = lifeline
        self._exit_s = exit_s
        rng = random.Random()  # noqa: S311  # spreads restarts, guards nothing
        self._backoff = Backoff(base_s=_RESTART_S_MIN, cap_s=_RESTART_S_MAX, rng=rng)

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep it running until `stopping` is set."""
        loop = asyncio.get_running_loop()
        while not stopping.is_set():
            started = loop.time()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "forebay_router",
                env=dict(self._environment),
                pass_fds=(self._lifeline,),
            )
            await self._until_over(process, stopping)
            if stopping.is_set():
                return
            _log.error("process %s ended with status %s", self._name, process.returncode)
            if loop.time() - started > _STEADY_S:
                self._backoff.reset()
            await _sleep(self._backoff.next_s(), stopping)

    async def _until_over(
        self, process: asyncio.subprocess.Process, stopping: asyncio.Event
    ) -> None:
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(stopping.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(ended, self._exit_s)
        except TimeoutError:
            _log.warning("process %s did not end in time", self._name)
            process.kill()
            await process.wait()


async def _sleep(seconds: float, stopping: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return


def _metrics_listen(config: Config) -> str:
    listen = config.metrics_listen or config.http_listen or config.grpc_listen
    return f"{listen.rpartition(':')[0]}:0"
