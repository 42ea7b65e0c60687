"""Starts a router: `python -m forebay_router`."""

from __future__ import annotations

import asyncio
import os

import prometheus_client
from forebay_common import telemetry
from forebay_common.config import load, load_common, said_plainly
from forebay_common.server import run

from forebay_router.app import serve
from forebay_router.config import PREFIX, Config
from forebay_router.processes_loop import await_lifeline, supervise


@said_plainly()
def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain and exit with 0."""
    common = load_common(os.environ)
    config = load(Config, PREFIX, os.environ)
    telemetry.configure("router", instance_id=common.instance_id, log_level=common.log_level)

    async def entry(stopping: asyncio.Event) -> None:
        if config.processes > 1:
            await supervise(common, config, stopping)
            return
        async with asyncio.TaskGroup() as group:
            if config.lifeline_fd >= 0:
                group.create_task(await_lifeline(config.lifeline_fd, stopping))
            await serve(common, config, stopping, registry=prometheus_client.REGISTRY)
            stopping.set()

    try:
        run(entry)
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
