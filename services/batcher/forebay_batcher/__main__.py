"""The batcher's process: builds its parts, runs them, and leaves in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import random
import time
from collections.abc import Callable

import prometheus_client
from forebay.batcher.v1 import batcher_service_pb2_grpc as rpc
from forebay.engine.v1 import engine_service_pb2_grpc as engine_rpc
from forebay_common import cache_feed, telemetry
from forebay_common import config as configs
from forebay_common import metadata as md
from forebay_common import server as servers
from forebay_common.discovery import Instance, Keys
from forebay_common.store import Store
from forebay_wire.client import ClientPool
from forebay_wire.core.limits import Limits
from forebay_wire.metrics import WireMetrics
from forebay_wire.policy import SERVICE as INFERENCE
from forebay_wire.relay import Relay
from forebay_wire.server import Server

from forebay_batcher.adapters.engine import load_model, wake_model, watch_cache
from forebay_batcher.announce_loop import AnnounceLoop
from forebay_batcher.cache_loop import CacheLoop
from forebay_batcher.config import PREFIX, Config
from forebay_batcher.core.queue import Queue
from forebay_batcher.core.standing import Role, Standing
from forebay_batcher.drain import Drain
from forebay_batcher.engine_loop import EngineLoop
from forebay_batcher.ensure_loop import EnsureLoop
from forebay_batcher.policy import BatcherPolicy
from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Identity, Replica, Watch
from forebay_batcher.service import SERVICE, BatcherService

_DISTRIBUTION = "forebay-batcher"


async def serve(
    config: Config,
    common: configs.CommonConfig,
    stopping: asyncio.Event,
    *,
    on_listening: Callable[[str], None] = lambda address: None,
) -> None:
    """Run a batcher until `stopping` is set, then drain it.

    Args:
        config: the batcher's options.
        common: options of every service, with an instance id.
        stopping: ends it in order.
        on_listening: told the address once calls are accepted.
    """
    version = telemetry.version_of(_DISTRIBUTION)
    replica_id = config.replica_id or common.instance_id
    replica = Replica(
        Identity(replica_id, config.pool, version),
        Standing(Role.STANDBY if config.role == "standby" else Role.ACTIVE),
    )
    limits = config.limits()
    queue = QueueLoop(Queue(limits), on_change=replica.touch)
    wire_limits = Limits(
        message_bytes=config.message_bytes_max,
        streams=config.streams_per_connection_max,
        slow_reader_s=config.slow_reader_s,
        connection_age_s=0,
        # A router whose callers all leave at once resets all of its streams.
        nuisances=2 * config.streams_per_connection_max,
        # So many may leave each second: the connection is every caller's.
        nuisances_per_s=2.0 * config.streams_per_connection_max,
    )
    pool = ClientPool(
        dataclasses.replace(
            wire_limits,
            keepalive_s=config.keepalive_s,
            keepalive_timeout_s=config.keepalive_timeout_s,
            pings_sparingly=False,
        )
    )
    engine = EngineLoop(
        config.engine_address,
        replica=replica,
        queue=queue,
        pool=pool,
        load_interval_ms=config.engine_load_interval_ms,
        retry_s_max=config.engine_retry_s_max,
        rng=random.Random(),  # noqa: S311  # spreads retries, keeps no secret
    )
    drain = Drain(replica, queue, linger_s=config.drain_linger_s)
    ensure = EnsureLoop(
        replica,
        load=lambda spec: load_model(config.engine_address, spec),
        wake=lambda spec: wake_model(config.engine_address, spec.model_version),
    )
    feed = cache_feed.CacheFeed(names_max=config.cached_prefixes_max)
    cache = CacheLoop(
        replica,
        feed,
        watch=functools.partial(watch_cache, interval_ms=config.cache_interval_ms),
        retry_s_max=config.engine_retry_s_max,
        rng=random.Random(),  # noqa: S311  # spreads retries, keeps no secret
    )
    server = Server(wire_limits)
    policy = BatcherPolicy(replica=replica, queue=queue, engine=engine, run_s_max=config.run_s_max)
    wire_metrics = WireMetrics()
    server.serve(Relay(policy, pool, trailing=((md.REPLICA, replica_id),), metrics=wire_metrics))
    wire_metrics.watch(server=server, pool=pool)
    wire_metrics.register(prometheus_client.REGISTRY)
    rpc.add_BatcherServiceServicer_to_server(
        BatcherService(
            replica=replica,
            queue=queue,
            drain=drain,
            ensure=ensure,
            limits=limits,
            drain_timeout_s=common.drain_timeout_s,
        ),
        server.grpc,
    )
    server.offer(SERVICE)
    engine_rpc.add_CacheServiceServicer_to_server(cache_feed.CacheService(feed), server.grpc)
    server.offer(cache_feed.SERVICE)
    bound = await server.listen(config.listen)
    replica.address = _advertised(bound, config.advertise_host)
    server.set_ready(SERVICE, True)
    server.set_ready(cache_feed.SERVICE, True)
    addresses = {"grpc": replica.address}
    if metrics_address := telemetry.serve_metrics(config.metrics_listen):
        addresses["metrics"] = _advertised(metrics_address, config.advertise_host)
    store = Store.open(common.etcd_endpoints)
    announce = AnnounceLoop(
        store,
        Keys(common.namespace),
        replica=replica,
        queue=queue,
        instance=Instance("batcher", common.instance_id, version, addresses),
        lease_ttl_s=common.lease_ttl_s,
        interval_s=config.announce_interval_s,
    )
    try:
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(queue.run(), name="queue"),
                group.create_task(engine.run(), name="engine"),
                group.create_task(cache.run(), name="cache"),
                group.create_task(announce.run(), name="announce"),
                group.create_task(_report_ready(server, replica), name="health"),
            ]
            on_listening(replica.address)
            servers.settle_heap()
            await stopping.wait()
            drain.begin(0)
            ends_at = time.monotonic() + common.drain_timeout_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(common.drain_timeout_s):
                    await drain.finished()
            await server.drain(max(0.0, ends_at - time.monotonic()))
            for task in loops:
                task.cancel()
    finally:
        prometheus_client.REGISTRY.unregister(wire_metrics)
        await server.stop()
        await ensure.close()
        await pool.close()
        await store.close()


async def _report_ready(server: Server, replica: Replica) -> None:
    watch = Watch(replica, interval_s=1.0)
    while True:
        await watch.next()
        server.set_ready(INFERENCE, replica.is_ready)


def _advertised(bound: str, advertise_host: str) -> str:
    if not advertise_host:
        return bound
    return f"{advertise_host}:{bound.rpartition(':')[2]}"


@configs.said_plainly()
def main() -> None:
    """Run a batcher as the environment says."""
    common = configs.load_common(os.environ)
    config = configs.load(Config, PREFIX, os.environ)
    telemetry.configure("batcher", instance_id=common.instance_id, log_level=common.log_level)

    async def run(stopping: asyncio.Event) -> None:
        await serve(config, common, stopping)

    servers.run(run)
    telemetry.shutdown()


if __name__ == "__main__":
    main()
