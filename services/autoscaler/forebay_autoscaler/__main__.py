"""Starts an autoscaler."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_grpc
from forebay_common import config as configs
from forebay_common import telemetry
from forebay_common.channel import ChannelPool
from forebay_common.discovery import Instance, Keys
from forebay_common.election import Election
from forebay_common.errors import ForebayError
from forebay_common.lease import Lease
from forebay_common.server import Server, run
from forebay_common.store import Store

from forebay_autoscaler import bootstrap
from forebay_autoscaler.adapters.claims import Claims
from forebay_autoscaler.adapters.decision_store import DecisionStore
from forebay_autoscaler.adapters.dry_run import DryRunLauncher
from forebay_autoscaler.adapters.local_launcher import LocalLauncher
from forebay_autoscaler.adapters.orders import Orders
from forebay_autoscaler.adapters.pool_store import PoolStore
from forebay_autoscaler.adapters.world import World
from forebay_autoscaler.config import ORDER_SLACK_S, PREFIX, Config
from forebay_autoscaler.control_loop import ControlLoop
from forebay_autoscaler.launcher import Launcher
from forebay_autoscaler.service import SERVICE, AutoscalerServicer

_log = logging.getLogger(__name__)
_HEALTH_INTERVAL_S = 0.5
_ANSWER_GRACE_S = 1.0


async def serve(
    common: configs.CommonConfig,
    config: Config,
    stopping: asyncio.Event,
    *,
    environ: Mapping[str, str],
) -> None:
    """Serve until `stopping` is set: resign, answer what was asked, leave or end the replicas.

    Args:
        common: options of every service, with an instance id.
        config: the autoscaler's options.
        stopping: ends it in order.
        environ: what launched replicas inherit.
    """
    first_pools = bootstrap.parse(config.bootstrap)
    metrics_address = telemetry.serve_metrics(config.metrics_listen)
    keys = Keys(common.namespace)
    server = Server()
    server.offer(SERVICE)
    channels = ChannelPool()
    changed = asyncio.Event()
    launcher: Launcher = (
        LocalLauncher(config, common, environ=environ, on_change=changed.set)
        if config.launcher == "local"
        else DryRunLauncher()
    )
    async with (
        Store.open(common.etcd_endpoints) as store,
        Lease.open(store, common.lease_ttl_s) as lease,
    ):
        world = World(store, keys, launcher, on_change=changed.set)
        orders = Orders(
            store,
            Claims(store, keys, owner=common.instance_id),
            launcher,
            channels,
            activate_timeout_s=config.activate_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
        )
        loop = ControlLoop(
            world,
            launcher,
            orders,
            DecisionStore(store, keys),
            changed=changed,
            limits=config.limits(),
            gap_s=config.tick_gap_s,
            order_timeout_s=config.order_timeout_s - ORDER_SLACK_S / 3,
            history_limit=config.history_limit,
            history_interval_s=config.history_interval_s,
        )
        election = Election(store, lease, keys.leader("autoscaler"), common.instance_id)
        pools = PoolStore(store, keys)
        autoscaler_grpc.add_AutoscalerServiceServicer_to_server(
            AutoscalerServicer(pools, world, loop, election), server.grpc
        )
        bound = await server.listen(config.listen)
        addresses = {"grpc": config.advertise or bound}
        if metrics_address is not None:
            addresses["metrics"] = metrics_address
        instance = Instance(
            service="autoscaler",
            instance_id=common.instance_id,
            version=telemetry.version_of("forebay-autoscaler"),
            addresses=addresses,
        )
        announced = keys.instance(instance.service, instance.instance_id)
        following = asyncio.create_task(world.run(), name="views")
        starting = asyncio.create_task(_put_first(store, pools, first_pools), name="bootstrap")
        leading = asyncio.create_task(election.run(loop.lead), name="leadership")
        stop = asyncio.create_task(stopping.wait())
        try:
            await lease.attach(announced, instance.encode())
            _log.info("autoscaler listens on %s", bound)
            while not stopping.is_set():
                for task in (following, starting, leading):
                    if task.done():
                        task.result()
                is_current = world.age_s() <= config.stale_after_s
                server.set_ready(SERVICE, starting.done() and is_current)
                await asyncio.wait({stop}, timeout=_HEALTH_INTERVAL_S)
        finally:
            await lease.detach(announced)
            leading.cancel()
            await asyncio.wait({leading})
            await server.drain(min(_ANSWER_GRACE_S, common.drain_timeout_s))
            await launcher.close(stop_replicas=config.stop_replicas_on_exit)
            for each in (following, starting, stop):
                each.cancel()
            await asyncio.wait({following, starting, stop})
            await channels.close()


async def _put_first(store: Store, pools: PoolStore, first: tuple[autoscaler.Pool, ...]) -> None:
    """Put each pool, waiting for etcd where it is away."""
    backoff = store.backoff()
    for pool in first:
        while True:
            try:
                await pools.put_at_start(pool)
            except ForebayError as error:
                _log.debug("pool %s is not put yet: %s", pool.name, error)
                await asyncio.sleep(backoff.next_s())
                continue
            break


@configs.said_plainly()
def main() -> None:
    """Entry point of `forebay-autoscaler`."""
    common = configs.load_common(os.environ)
    config = configs.load(Config, PREFIX, os.environ)
    telemetry.configure("autoscaler", instance_id=common.instance_id, log_level=common.log_level)
    try:
        run(lambda stopping: serve(common, config, stopping, environ=os.environ))
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
