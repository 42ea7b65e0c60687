"""Which processes make up a local fleet, and what each is told.

Pure: the same options and addresses give the same plan. The pool of a local fleet is always called
`local`, so that starting again with another model replaces it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

POOL = "local"
STATE_DIR_VARIABLE = "FOREBAY_FLEET_STATE_DIR"
"""In the environment of every process of a fleet and of its children: whose they are."""
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
"""0 keeps gRPC's fork handlers, which can hang, out of a process that starts others."""

_SPAN_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SPAN_DELAY_MS = 200
_REQUESTS_PER_REPLICA = 32
_SCALE_DOWN_WINDOW_S = 60
_ORDER_TIMEOUT_S = 150
"""Without the time that a replica's two processes may take to end: more than its drain."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model version that a fleet registers and loads."""

    name: str
    backend: str
    """`vllm` or `simulated`."""
    version: str = "1"
    artifact_path: str = ""
    profile: str = ""
    context_tokens: int = 0
    """0: the model's own."""
    max_sequences: int = 0
    """0: the back end's default."""
    kv_cache_bytes: int = 0
    """0: the back end's default."""
    embeds: bool = False
    """Answers with vectors, not with text."""

    @property
    def model_version(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What `forebay up` was asked for."""

    models: tuple[ModelPlan, ...]
    replicas: int
    max_replicas: int
    warm: int
    grpc_port: int
    http_port: int
    etcd_endpoints: tuple[str, ...] = ()
    """Empty: the fleet runs its own etcd."""
    namespace: str = "/forebay"


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything listens, `host:port`."""

    router_grpc: str
    router_http: str
    registry: str
    autoscaler: str
    etcd: tuple[str, ...]
    spans: str
    """The span store's OTLP endpoint; empty when the user's own back end gets the spans."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process to run."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    address: str
    health: str
    """The service whose `grpc.health.v1` state says that this process does its work."""


def exports_elsewhere(environ: Mapping[str, str]) -> bool:
    """Whether the user has named an OpenTelemetry back end of their own."""
    return any(environ.get(name) for name in _SPAN_ENDPOINTS)


def encode_options(options: Options) -> str:
    """Options as the supervisor reads them."""
    return json.dumps(dataclasses.asdict(options), indent=1)


def decode_options(text: str) -> Options:
    """Read what `encode_options` wrote."""
    fields: dict[str, Any] = json.loads(text)
    fields["models"] = tuple(ModelPlan(**one) for one in fields["models"])
    fields["etcd_endpoints"] = tuple(fields["etcd_endpoints"])
    return Options(**fields)


def environment(
    addresses: Addresses,
    options: Options,
    *,
    state_dir: str,
    drain_timeout_s: float,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """What every process of the fleet is told, on top of the user's own environment."""
    told = dict(environ)
    # One name cannot be the name of several processes.
    told.pop("FOREBAY_INSTANCE_ID", None)
    told["FOREBAY_ETCD_ENDPOINTS"] = ",".join(addresses.etcd)
    told["FOREBAY_NAMESPACE"] = options.namespace
    told["FOREBAY_DRAIN_TIMEOUT_S"] = f"{drain_timeout_s:g}"
    told[STATE_DIR_VARIABLE] = state_dir
    if addresses.spans:
        told["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{addresses.spans}"
        told.setdefault("OTEL_BSP_SCHEDULE_DELAY", str(_SPAN_DELAY_MS))
    return told


def services(
    options: Options, addresses: Addresses, *, python: str, state_dir: str, stop_grace_s: float
) -> tuple[ServicePlan, ...]:
    """The processes beside etcd. They are stopped in the opposite order.

    Args:
        options: what the fleet shall be.
        addresses: where each listens.
        python: the interpreter.
        state_dir: the fleet's directory.
        stop_grace_s: how long a replica's process may take to end, in seconds.
    """

    def module(name: str) -> tuple[str, ...]:
        return (python, "-m", f"forebay_{name}")

    return (
        ServicePlan(
            "registry",
            module("registry"),
            {
                "FOREBAY_REGISTRY_LISTEN": addresses.registry,
                "FOREBAY_REGISTRY_BOOTSTRAP": json.dumps([_put(one) for one in options.models]),
            },
            addresses.registry,
            "forebay.registry.v1.RegistryService",
        ),
        ServicePlan(
            "autoscaler",
            module("autoscaler"),
            {
                "FOREBAY_AUTOSCALER_LISTEN": addresses.autoscaler,
                "FOREBAY_AUTOSCALER_BOOTSTRAP": json.dumps([_pool(options)]),
                "FOREBAY_AUTOSCALER_LAUNCHER": "local",
                "FOREBAY_AUTOSCALER_STATE_DIR": f"{state_dir}/replicas",
                "FOREBAY_AUTOSCALER_STOP_REPLICAS_ON_EXIT": "true",
                "FOREBAY_AUTOSCALER_STOP_GRACE_S": f"{stop_grace_s:g}",
                "FOREBAY_AUTOSCALER_ORDER_TIMEOUT_S": f"{_ORDER_TIMEOUT_S + 2 * stop_grace_s:g}",
            },
            addresses.autoscaler,
            "forebay.autoscaler.v1.AutoscalerService",
        ),
        ServicePlan(
            "router",
            module("router"),
            {
                "FOREBAY_ROUTER_GRPC_LISTEN": addresses.router_grpc,
                "FOREBAY_ROUTER_HTTP_LISTEN": addresses.router_http,
                "FOREBAY_ROUTER_OPEN": "true",
            },
            addresses.router_grpc,
            # Its InferenceService is ready only once there are replicas.
            "forebay.router.v1.RouterService",
        ),
    )


def etcd_command(
    binary: str, *, client_address: str, peer_address: str, data_dir: str
) -> tuple[str, ...]:
    """The command of a single, local etcd."""
    client, peer = f"http://{client_address}", f"http://{peer_address}"
    return (
        binary,
        "--name=forebay",
        f"--data-dir={data_dir}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=forebay={peer}",
        "--logger=zap",
        "--log-level=warn",
        "--log-outputs=stderr",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=1h",
    )


def etcd_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without `ETCD_…`, by which etcd would take other options."""
    return {name: value for name, value in environ.items() if not name.startswith("ETCD_")}


def model_name(directory: str) -> str:
    """A model's name made from the directory it lies in: `[a-z0-9._-]{1,64}`."""
    kept = "".join(
        c if (c.isascii() and c.isalnum()) or c in "._-" else "-" for c in directory.lower()
    )
    return kept.strip("-.")[:64] or "model"


def first(models: Iterable[ModelPlan], *, embeds: bool) -> str:
    """Name of the first model that answers with text, or with vectors; empty when there is none."""
    return next((model.name for model in models if model.embeds == embeds), "")


def _put(model: ModelPlan) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "backend": f"BACKEND_{model.backend.upper()}",
        "task": "TASK_EMBED" if model.embeds else "TASK_GENERATE",
    }
    optional = {
        "artifactPath": model.artifact_path,
        "profile": model.profile,
        "contextTokens": model.context_tokens,
        "maxSequences": model.max_sequences,
        "kvCacheBytes": model.kv_cache_bytes,
    }
    spec.update({name: value for name, value in optional.items() if value})
    return {"model": model.name, "version": {"version": model.version, "spec": spec}}


def _pool(options: Options) -> dict[str, Any]:
    return {
        "name": POOL,
        "models": [model.model_version for model in options.models],
        "minReplicas": options.replicas,
        "maxReplicas": options.max_replicas,
        "standbyReplicas": options.warm,
        "targetRequestsPerReplica": _REQUESTS_PER_REPLICA,
        "scaleDownWindowS": _SCALE_DOWN_WINDOW_S,
    }
