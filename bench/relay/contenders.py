"""Who is measured: this router, other routers, and no router at all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from forebay_common.discovery import Instance, Keys
from forebay_common.store import Store

from bench.relay import peers
from bench.relay.native import FOLDER
from bench.relay.pinned import Pinned
from bench.relay.shapes import API_KEY
from bench.relay.site import NAMESPACE, Site
from tests.conftest import free_port

_START_S = 60.0
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """One protocol of a contender: a line of the result."""

    name: str
    protocol: str
    """grpc or sse."""
    shapes: str
    """Names of the shapes that are measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """A contender that serves."""

    pids: Sequence[int]
    ports: Mapping[str, int]
    """By protocol."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One process, or none, and how it is started."""

    name: str
    lanes: Sequence[Lane]
    serve: Callable[[Site], AbstractContextManager[Serving]]
    package: peers.Package | None = None
    rounds_max: int | None = None
    """Fewer rounds than the others; None for as many."""
    listed: bool = False
    """Whether its back ends are the replicas in etcd."""


@contextlib.contextmanager
def _nobody(site: Site) -> Iterator[Serving]:
    yield Serving((), {"grpc": site.grpc.ports[0], "sse": site.sse.ports[0]})


@contextlib.contextmanager
def _running(
    name: str,
    command: Sequence[str],
    site: Site,
    ports: Mapping[str, int],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    log = FOLDER / "logs" / f"{name.replace(' ', '-')}.log"
    process = Pinned(command, site.cores[0], log, environment)
    try:
        _wait_until_answering(process, ports["sse"])
        yield Serving(process.pids(), ports)
    finally:
        process.stop()


@contextlib.contextmanager
def _forebay(site: Site) -> Iterator[Serving]:
    """The real router, with its whole policy and its metrics, and without a trace collector."""
    instance_id = f"router-{free_port()}"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("FOREBAY_", "OTEL_"))},
        "FOREBAY_ETCD_ENDPOINTS": site.etcd,
        "FOREBAY_NAMESPACE": NAMESPACE,
        "FOREBAY_INSTANCE_ID": instance_id,
        "FOREBAY_DRAIN_TIMEOUT_S": "0",
        "FOREBAY_ROUTER_GRPC_LISTEN": "127.0.0.1:0",
        "FOREBAY_ROUTER_HTTP_LISTEN": "127.0.0.1:0",
        "FOREBAY_ROUTER_OPEN": "true",
    }
    process = Pinned(
        [sys.executable, "-m", "forebay_router"],
        site.cores[0],
        FOLDER / "logs" / "forebay.log",
        environment,
    )
    try:
        addresses = asyncio.run(_announced(process, site.etcd, instance_id))
        ports = {
            protocol: int(addresses[key].rpartition(":")[2])
            for protocol, key in (("grpc", "grpc"), ("sse", "http"))
        }
        _wait_until_answering(process, ports["sse"])
        yield Serving(process.pids(), ports)
    finally:
        process.stop()


async def _announced(process: Pinned, etcd: str, instance_id: str) -> Mapping[str, str]:
    key = Keys(NAMESPACE).instance("router", instance_id)
    deadline = time.monotonic() + _START_S
    async with Store.open([etcd]) as store:
        while (entry := await store.get(key)) is None:
            if not process.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start: {process.log_tail()}")
            await asyncio.sleep(_POLL_S)
    return Instance.decode(key, entry.value).addresses


def _envoy(site: Site) -> AbstractContextManager[Serving]:
    ports = {"grpc": free_port(), "sse": free_port()}
    back_ends = {"grpc": site.grpc.ports, "sse": site.sse.ports}
    return _running("envoy", peers.envoy(ports, back_ends, site.folder), site, ports)


def _worker_router(
    name: str, command: Callable[[int, Sequence[str], str], list[str]], policy: str
) -> Callable[[Site], AbstractContextManager[Serving]]:
    def serve(site: Site) -> AbstractContextManager[Serving]:
        port = free_port()
        return _running(name, command(port, _urls(site), policy), site, {"sse": port})

    return serve


def _litellm(site: Site) -> AbstractContextManager[Serving]:
    port = free_port()
    command = peers.litellm(port, _urls(site), site.folder, API_KEY)
    # Otherwise it asks the network for prices when it starts.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return _running("litellm", command, site, {"sse": port}, environment)


def _urls(site: Site) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in site.sse.ports]


def _wait_until_answering(process: Pinned, port: int) -> None:
    """Wait until a chat completion is answered."""
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "@@0:0:8@@"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {API_KEY}"},
    )
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            return
        except (urllib.error.URLError, OSError) as error:
            if not process.is_running() or time.monotonic() > deadline:
                problem = f"{process.log.stem} does not answer ({error}): {process.log_tail()}"
                raise RuntimeError(problem) from None
        time.sleep(_POLL_S)


CONTENDERS = (
    Contender(
        "direct",
        (Lane("direct grpc", "grpc", "P"), Lane("direct sse", "sse", "P")),
        _nobody,
    ),
    Contender(
        "ours",
        (Lane("ours grpc", "grpc", "ISP"), Lane("ours sse", "sse", "ISPU")),
        _forebay,
        listed=True,
    ),
    Contender(
        "envoy",
        (Lane("envoy grpc", "grpc", "ISP"), Lane("envoy sse", "sse", "ISPU")),
        _envoy,
        peers.ENVOY,
    ),
    Contender(
        "vllm-router",
        (Lane("vllm-router", "sse", "ISPU"),),
        _worker_router("vllm-router", peers.vllm_router, "round_robin"),
        peers.VLLM_ROUTER,
    ),
    Contender(
        "vllm-router-cache-aware",
        (Lane("vllm-router cache aware", "sse", "IS"),),
        _worker_router("vllm-router cache aware", peers.vllm_router, "cache_aware"),
        peers.VLLM_ROUTER,
    ),
    Contender(
        "smg",
        (Lane("smg", "sse", "ISPU"),),
        _worker_router("smg", peers.smg, "round_robin"),
        peers.SMG,
    ),
    # Paced, it saturates its core; a start takes half a minute of it.
    Contender("litellm", (Lane("litellm", "sse", "I"),), _litellm, peers.LITELLM, rounds_max=1),
)
