"""Starts the engine host."""

import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path

from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as pb_grpc
from forebay_common import config as common_config
from forebay_common import server, telemetry
from forebay_common.config import ConfigError
from forebay_common.errors import ForebayError
from google.protobuf import json_format

from forebay_engine.adapters.canaries import CanaryStore, default_directory
from forebay_engine.adapters.metrics import expose
from forebay_engine.adapters.runner_process import become_subreaper
from forebay_engine.config import PREFIX, Config
from forebay_engine.host import Host
from forebay_engine.service import EngineServicer

_log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"].full_name


@common_config.said_plainly()
def main() -> None:
    """Run the host until SIGTERM, then drain and unload everything."""
    server.run(serve)


async def serve(stopping: asyncio.Event) -> None:
    """Construct everything and serve until told to stop."""
    common = common_config.load_common(os.environ)
    config = common_config.load(Config, PREFIX, os.environ)
    specs = _specs(config.load)
    telemetry.configure("engine", instance_id=common.instance_id, log_level=common.log_level)
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="forebay-") as private:
        socket_dir = Path(config.socket_dir or private)
        socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)  # noqa: ASYNC240 - at start
        host = Host(
            config,
            socket_dir=socket_dir,
            canaries=CanaryStore(
                Path(config.canary_dir) if config.canary_dir else default_directory()
            ),
            runner_environ={**os.environ, "FOREBAY_INSTANCE_ID": common.instance_id},
        )
        grpc_server = server.Server()
        servicer = EngineServicer(
            host, drain_grace_s=common.drain_timeout_s, memory_bytes=config.memory_bytes
        )
        pb_grpc.add_EngineServiceServicer_to_server(servicer, grpc_server.grpc)
        grpc_server.offer(_SERVICE)
        expose(host)
        if metrics := telemetry.serve_metrics(config.metrics_listen):
            _log.info("metrics on %s", metrics)
        address = await grpc_server.listen(config.listen)
        grpc_server.set_ready(_SERVICE, True)
        _log.info("listening on %s", address)
        for spec in specs:
            await _load(host, spec)
        await stopping.wait()
        grpc_server.set_ready(_SERVICE, False)
        await host.drain(common.drain_timeout_s)
        await grpc_server.drain(1.0)
    telemetry.shutdown()


async def _load(host: Host, spec: pb.ModelSpec) -> None:
    try:
        await host.load(spec)
    except ForebayError as error:
        problem = f"{spec.model_version or 'a version'}: {error.message}"
        raise ConfigError(f"{PREFIX}_LOAD", problem) from None


def _specs(text: str) -> list[pb.ModelSpec]:
    if not text:
        return []
    try:
        entries = json.loads(text)
        return [json_format.ParseDict(entry, pb.ModelSpec()) for entry in entries]
    except (ValueError, TypeError, json_format.ParseError) as error:
        raise ConfigError(f"{PREFIX}_LOAD", f"must be a JSON list of ModelSpec: {error}") from None


if __name__ == "__main__":
    main()
