"""Starts a router: `python -m forebay_router`."""

from __future__ import annotations

import asyncio
import os
import sys

import prometheus_client
from forebay_common import telemetry
from forebay_common.config import ConfigError, load, load_common
from forebay_common.server import run

from forebay_router.app import serve
from forebay_router.config import PREFIX, Config


def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain and exit with 0."""
    try:
        common = load_common(os.environ)
        config = load(Config, PREFIX, os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    telemetry.configure("router", instance_id=common.instance_id, log_level=common.log_level)

    async def entry(stopping: asyncio.Event) -> None:
        await serve(common, config, stopping, registry=prometheus_client.REGISTRY)

    try:
        run(entry)
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
