"""A whole router, from its options to its orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from forebay.router.v1 import key_service_pb2_grpc as key_rpc
from forebay.router.v1 import quota_service_pb2_grpc as quota_rpc
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.apikeys import KeySecrets, read_secrets
from forebay_common.channel import ENVELOPE_BYTES, ChannelPool
from forebay_common.config import CommonConfig, ConfigError
from forebay_common.discovery import Instance, Keys
from forebay_common.lease import Lease
from forebay_common.server import settle_heap
from forebay_common.store import Store
from forebay_common.telemetry import serve_metrics, version_of
from forebay_wire.client import ClientPool
from forebay_wire.core.http1 import HttpLimits
from forebay_wire.core.limits import Limits
from forebay_wire.metrics import WireMetrics
from forebay_wire.policy import SERVICE as INFERENCE
from forebay_wire.relay import Relay
from forebay_wire.server import Server
from forebay_wire.tls import H2, HTTP1, server_context
from prometheus_client import CollectorRegistry

from forebay_router.adapters.batchers import ensure_model
from forebay_router.adapters.catalogue import CatalogueView
from forebay_router.adapters.keys import KeyStore, KeyView
from forebay_router.adapters.openai import EXPOSED, OpenAIFront
from forebay_router.adapters.quota import PEER, Away, Quota
from forebay_router.adapters.quota import Options as QuotaOptions
from forebay_router.adapters.replicas import Fleet
from forebay_router.adapters.tier_models import load_classifiers
from forebay_router.cold_loop import Cold, claim_load
from forebay_router.config import PREFIX, Config
from forebay_router.core.breakers import Breakers, Options
from forebay_router.core.explain import Recent
from forebay_router.core.place import Options as PlaceOptions
from forebay_router.core.place import Placer
from forebay_router.gate import Gate, KeyGate, OpenGate, authorize
from forebay_router.keys_service import SERVICE as KEYS
from forebay_router.keys_service import KeyService
from forebay_router.metrics import Metrics
from forebay_router.policy import RouterPolicy
from forebay_router.quota_metrics import QuotaMetrics
from forebay_router.quota_service import QuotaService
from forebay_router.service import SERVICE as ROUTER
from forebay_router.service import RouterService, count_placeable
from forebay_router.shadow_loop import Options as ShadowOptions
from forebay_router.shadow_loop import Shadows
from forebay_router.shadow_metrics import ShadowMetrics

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
    limits = _limits(config)
    channels = ChannelPool(max_message_bytes=limits.message_bytes)
    pool = ClientPool(
        dataclasses.replace(
            limits,
            keepalive_s=config.keepalive_s,
            keepalive_timeout_s=config.keepalive_timeout_s,
            pings_sparingly=False,
        )
    )
    store = Store.open(common.etcd_endpoints)
    catalogue = CatalogueView(store, keys)
    breakers = Breakers(_breaker_options(config))
    fleet = Fleet(
        store,
        keys,
        channels,
        pool,
        load_interval_ms=config.load_interval_ms,
        backoff_max_s=config.watch_backoff_max_s,
        unlisted_grace_s=config.unlisted_grace_s,
        call_grace_s=config.max_timeout_s,
        rng=rng,
        cache_interval_ms=config.cache_interval_ms,
        placer=Placer(_place_options(config)),
        on_left=breakers.forget,
    )
    metrics = Metrics(registry)
    metrics.watch_views(
        replicas_age_s=lambda: fleet.age_s(time.monotonic()),
        catalogue_age_s=lambda: catalogue.age_s(time.monotonic()),
        placeable=lambda: count_placeable(fleet, breakers.excluded),
        excluded=lambda: len(fleet.replicas()) - count_placeable(fleet, breakers.excluded),
    )
    recent = Recent(limit=config.explain_requests)
    wire_metrics = WireMetrics()
    secrets = _key_secrets(config)
    keys_view = KeyView(store, keys, secrets) if secrets is not None else None
    gate: Gate = (
        OpenGate() if secrets is None or keys_view is None else KeyGate(keys_view.current, secrets)
    )
    lease = Lease.open(store, common.lease_ttl_s)
    cold = Cold(
        fleet,
        ensure=lambda address, spec: ensure_model(channels, address, spec),
        claim=lambda name: claim_load(store, keys, lease, common.instance_id, name),
        spec_of=catalogue.spec_of,
        held_most=config.max_held,
        pause_s=config.load_pause_s,
        loads_most=config.max_loads,
        released_most=config.max_released,
    )
    metrics.watch_cold(held=lambda: cold.held, loads=lambda: cold.loads)
    shadows = Shadows(
        fleet.placer,
        pool,
        _shadow_options(config),
        down=fleet.down,
        ejected=breakers.excluded,
        rng=rng,
    )
    registry.register(ShadowMetrics(shadows.figures))
    quota = _quota(config, store, keys, common.instance_id, secrets)
    policy = RouterPolicy(
        catalogue,
        fleet,
        config,
        gate=gate,
        cold=cold,
        breakers=breakers,
        metrics=metrics,
        recent=recent,
        quota=quota,
        classifiers=load_classifiers(),
        offer_copy=shadows.offer,
        rng=rng,
    )
    relay = Relay(policy, pool, metrics=wire_metrics)
    server = Server(limits, tls=_tls(config, H2), rng=rng)
    server.serve(relay)
    server.authorize = lambda path, metadata: authorize(gate, path, metadata)
    wire_metrics.register(registry)
    router_rpc.add_RouterServiceServicer_to_server(
        RouterService(catalogue, fleet, breakers, recent), server.grpc
    )
    server.offer(ROUTER)
    key_rpc.add_KeyServiceServicer_to_server(
        KeyService(KeyStore(store, keys), secrets), server.grpc
    )
    server.offer(KEYS)
    front = OpenAIFront(
        relay,
        catalogue,
        registry,
        _http_limits(config),
        not_ready=lambda: why_not_ready(catalogue, fleet),
        gate=gate,
        cors=config.cors(EXPOSED),
    )
    wire_metrics.watch(server=server, pool=pool, http=front.server)
    # Other routers reach this very process here, also where several share the ports above, and
    # until all that it let in has ended.
    peers = Server(Limits(), rng=rng) if quota is not None else None
    if quota is not None and peers is not None:
        registry.register(QuotaMetrics(quota))
        peers.authorize = server.authorize
        quota_rpc.add_QuotaServiceServicer_to_server(QuotaService(quota), peers.grpc)
    try:
        async with asyncio.TaskGroup() as tasks:
            readiness = tasks.create_task(_report_readiness(server, catalogue, fleet))
            following = [] if keys_view is None else [tasks.create_task(keys_view.run())]
            following += [tasks.create_task(each.run()) for each in (catalogue, fleet, shadows)]
            shared = config.share_ports
            bound = await server.listen(config.grpc_listen, reuse_port=shared)
            addresses = {"grpc": _advertised(bound, config)}
            if config.http_listen:
                bound = await front.server.listen(
                    config.http_listen, tls=_tls(config, HTTP1), reuse_port=shared
                )
                addresses["http"] = addresses["metrics"] = _advertised(bound, config)
            if (metrics_bound := serve_metrics(config.metrics_listen)) is not None:
                addresses["metrics"] = _advertised(metrics_bound, config)
            if quota is not None and peers is not None:
                host = config.grpc_listen.rpartition(":")[0]
                addresses[PEER] = _advertised(await peers.listen(f"{host}:0"), config)
                quota.announce(addresses[PEER])
                following.append(tasks.create_task(quota.run()))
            server.set_ready(ROUTER, True)
            server.set_ready(KEYS, True)
            _log.info("serving on %s", ", ".join(f"{k} {v}" for k, v in addresses.items()))
            instance = Instance(
                "router", common.instance_id, version_of("forebay-router"), addresses
            )
            key = keys.instance("router", common.instance_id)
            async with lease:
                await lease.attach(key, instance.encode())
                on_started(instance)
                settle_heap()
                await stopping.wait()
                await lease.detach(key)
                readiness.cancel()
                grace_s = common.drain_timeout_s
                await asyncio.gather(server.drain(grace_s), front.server.drain(grace_s))
                if quota is not None:
                    await quota.close()
            for task in following:
                task.cancel()
    finally:
        await cold.close()
        await server.stop()
        if quota is not None and peers is not None:
            await quota.close()
            await peers.stop()
        await pool.close()
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


def _key_secrets(config: Config) -> KeySecrets | None:
    """The secrets of the operator's file; None for a router that is open."""
    if config.open:
        return None
    variable = f"{PREFIX}_KEY_SECRET_FILE"
    try:
        text = Path(config.key_secret_file).read_text()
        return read_secrets(text)
    except OSError as error:
        raise ConfigError(variable, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(variable, str(error)) from None


def _quota(
    config: Config, store: Store, keys: Keys, router_id: str, secrets: KeySecrets | None
) -> Quota | None:
    """The tenants' limits; None for a router that is open and knows none."""
    if secrets is None:
        return None
    token = (("authorization", f"Bearer {secrets.router_token()}"),)
    options = QuotaOptions(
        timeout_s=config.quota_timeout_ms / 1000,
        away=Away(config.quota_away),
        tick_s=config.quota_tick_s,
        streams_ttl_s=config.quota_streams_ttl_s,
    )
    session = f"{router_id}/{uuid4().hex}"
    return Quota(store, keys, router_id, session, options, token=lambda: token)


def _shadow_options(config: Config) -> ShadowOptions:
    return ShadowOptions(
        at_once=config.shadow_at_once,
        waiting=config.shadow_waiting,
        waiting_bytes=config.shadow_waiting_bytes,
        timeout_s=config.shadow_timeout_s,
    )


def _place_options(config: Config) -> PlaceOptions:
    return PlaceOptions(
        slow_start_s=config.slow_start_s,
        explore_share=config.explore_share,
        prefixes_most=config.max_prefixes_per_replica,
        prefixes_most_of_all=config.max_prefixes,
        prefix_ttl_s=config.prefix_ttl_s,
        pool_classes=config.classes_by_pool(),
    )


def _breaker_options(config: Config) -> Options:
    return Options(
        faults_in_a_row=config.faults_in_a_row,
        fault_share=config.fault_share,
        open_s=config.breaker_open_s,
        open_max_s=config.breaker_open_max_s,
        probes=config.breaker_probes,
    )


def _limits(config: Config) -> Limits:
    return Limits(
        message_bytes=config.max_body_bytes + ENVELOPE_BYTES,
        header_bytes=config.max_header_bytes,
        streams=config.max_streams_per_connection,
        stream_window_bytes=config.stream_buffer_bytes,
        held_bytes=config.max_held_bytes,
        request_bytes=config.max_request_bytes,
        slow_reader_s=config.slow_reader_s,
        # A client that stops may reset all of its streams at once.
        nuisances=max(1000, 2 * config.max_streams_per_connection),
        connection_age_s=config.max_connection_age_s,
        connection_age_grace_s=config.max_timeout_s,
        connections_per_peer=config.connections_per_replica,
    )


def _tls(config: Config, protocol: str) -> ssl.SSLContext | None:
    if not config.tls_certificate_file:
        return None
    return server_context(
        certificate=config.tls_certificate_file,
        key=config.tls_key_file or config.tls_certificate_file,
        client_ca=config.tls_client_ca_file or None,
        alpn=(protocol,),
    )


def _http_limits(config: Config) -> HttpLimits:
    return HttpLimits(
        body_bytes=config.max_body_bytes,
        request_bytes=config.max_request_bytes,
        header_bytes=config.max_header_bytes,
        headers=config.max_headers,
        answer_bytes=config.max_answer_bytes,
        body_read_s=config.body_read_timeout_s,
        slow_reader_s=config.slow_reader_s,
        idle_s=config.idle_connection_s,
        connections=config.max_http_connections,
    )


def _advertised(bound: str, config: Config) -> str:
    if not config.advertise_host:
        return bound
    return f"{config.advertise_host}:{bound.rpartition(':')[2]}"
