"""A whole router, from its options to its orderly end."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.channel import ENVELOPE_BYTES, ChannelPool
from forebay_common.config import CommonConfig
from forebay_common.discovery import Instance, Keys
from forebay_common.lease import Lease
from forebay_common.server import Server
from forebay_common.store import Store
from forebay_common.telemetry import version_of
from forebay_wire.policy import SERVICE as INFERENCE
from forebay_wire.relay import Relay, serve_relay
from prometheus_client import CollectorRegistry

from forebay_router.adapters.catalogue import CatalogueView
from forebay_router.adapters.http import Limits
from forebay_router.adapters.openai import OpenAIFront
from forebay_router.adapters.replicas import Fleet
from forebay_router.config import Config
from forebay_router.core.explain import Recent
from forebay_router.metrics import Metrics
from forebay_router.policy import RouterPolicy
from forebay_router.service import SERVICE as ROUTER
from forebay_router.service import RouterService, count_placeable

_log = logging.getLogger(__name__)


async def serve(
    common: CommonConfig,
    config: Config,
    stopping: asyncio.Event,
    *,
    registry: CollectorRegistry,
    on_started: Callable[[Instance], None] = lambda instance: None,
) -> None:
    """Serve until `stopping` is set, then drain.

    Args:
        common: what every service is told.
        config: the router's own options.
        stopping: ends it.
        registry: takes the metrics.
        on_started: gets the record under which the router announces itself.
    """
    keys = Keys(common.namespace)
    rng = random.Random()  # noqa: S311  # spreads load, guards nothing
    message_bytes = config.max_body_bytes + ENVELOPE_BYTES
    channels = ChannelPool(max_message_bytes=message_bytes)
    store = Store.open(common.etcd_endpoints)
    catalogue = CatalogueView(store, keys)
    fleet = Fleet(
        store,
        keys,
        channels,
        load_interval_ms=config.load_interval_ms,
        backoff_max_s=config.watch_backoff_max_s,
        unlisted_grace_s=config.unlisted_grace_s,
        call_grace_s=config.max_timeout_s,
        rng=rng,
    )
    metrics = Metrics(registry)
    metrics.watch_views(
        replicas_age_s=lambda: fleet.age_s(time.monotonic()),
        catalogue_age_s=lambda: catalogue.age_s(time.monotonic()),
        placeable=lambda: count_placeable(fleet),
        excluded=lambda: len(fleet.replicas()) - count_placeable(fleet),
    )
    recent = Recent(limit=config.explain_requests)
    relay = Relay(RouterPolicy(catalogue, fleet, metrics, recent, config, rng=rng), channels)
    server = Server(max_message_bytes=message_bytes)
    serve_relay(server, relay)
    router_rpc.add_RouterServiceServicer_to_server(
        RouterService(catalogue, fleet, recent), server.grpc
    )
    server.offer(ROUTER)
    front = OpenAIFront(
        relay, catalogue, registry, _limits(config), lambda: why_not_ready(catalogue, fleet)
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            readiness = tasks.create_task(_report_readiness(server, catalogue, fleet))
            following = [tasks.create_task(catalogue.run()), tasks.create_task(fleet.run())]
            addresses = {"grpc": _advertised(await server.listen(config.grpc_listen), config)}
            if config.http_listen:
                bound = await front.server.listen(config.http_listen)
                addresses["http"] = addresses["metrics"] = _advertised(bound, config)
            server.set_ready(ROUTER, True)
            _log.info("serving on %s", ", ".join(f"{k} {v}" for k, v in addresses.items()))
            instance = Instance(
                "router", common.instance_id, version_of("forebay-router"), addresses
            )
            key = keys.instance("router", common.instance_id)
            async with Lease.open(store, common.lease_ttl_s) as lease:
                await lease.attach(key, instance.encode())
                on_started(instance)
                await stopping.wait()
                await lease.detach(key)
                readiness.cancel()
                grace_s = common.drain_timeout_s
                await asyncio.gather(server.drain(grace_s), front.server.drain(grace_s))
            for task in following:
                task.cancel()
    finally:
        await channels.close()
        await store.close()


def why_not_ready(catalogue: CatalogueView, fleet: Fleet) -> list[str]:
    """Why requests cannot be answered now; empty when they can."""
    reasons = [] if catalogue.is_listed else ["catalogue_not_listed"]
    return reasons if count_placeable(fleet) else [*reasons, "no_replica"]


async def _report_readiness(server: Server, catalogue: CatalogueView, fleet: Fleet) -> None:
    await catalogue.ready()
    while True:
        revision = fleet.revision
        server.set_ready(INFERENCE, not why_not_ready(catalogue, fleet))
        await fleet.changed(revision)


def _limits(config: Config) -> Limits:
    return Limits(
        body_bytes=config.max_body_bytes,
        header_bytes=config.max_header_bytes,
        headers=config.max_headers,
        body_read_s=config.body_read_timeout_s,
        slow_reader_s=config.slow_reader_s,
        idle_s=config.idle_connection_s,
    )


def _advertised(bound: str, config: Config) -> str:
    if not config.advertise_host:
        return bound
    return f"{config.advertise_host}:{bound.rpartition(':')[2]}"
