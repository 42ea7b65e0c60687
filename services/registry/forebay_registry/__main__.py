"""Starts a registry."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.registry.v1 import registry_service_pb2_grpc as registry_grpc
from forebay_common import config as configs
from forebay_common import telemetry
from forebay_common.discovery import Instance, Keys
from forebay_common.errors import ForebayError, Reason
from forebay_common.lease import Lease
from forebay_common.server import Server, run
from forebay_common.store import Store
from prometheus_client import Gauge

from forebay_registry import bootstrap
from forebay_registry.adapters.catalogue_store import CatalogueStore
from forebay_registry.catalogue_loop import CatalogueFeed
from forebay_registry.config import PREFIX, Config
from forebay_registry.core.refusal import RefusedError
from forebay_registry.service import SERVICE, RegistryServicer

_log = logging.getLogger(__name__)
_HEALTH_INTERVAL_S = 0.5

_MODELS = Gauge("forebay_registry_models", "Models in the catalogue.")
_AGE = Gauge("forebay_registry_catalogue_age_seconds", "Since etcd last confirmed the catalogue.")


async def serve(common: configs.CommonConfig, config: Config, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then drain."""
    first_versions = bootstrap.parse(config.bootstrap)
    metrics_address = telemetry.serve_metrics(config.metrics_listen)
    keys = Keys(common.namespace)
    server = Server()
    server.offer(SERVICE)
    async with (
        Store.open(common.etcd_endpoints) as store,
        Lease.open(store, common.lease_ttl_s) as lease,
    ):
        feed = CatalogueFeed(store, keys)
        servicer = RegistryServicer(
            CatalogueStore(store, keys, attempts=config.write_attempts),
            feed,
            max_versions=config.max_versions,
        )
        registry_grpc.add_RegistryServiceServicer_to_server(servicer, server.grpc)
        bound = await server.listen(config.listen)
        addresses = {"grpc": config.advertise or bound}
        if metrics_address is not None:
            addresses["metrics"] = metrics_address
        following = asyncio.create_task(feed.run(), name="catalogue")
        starting = asyncio.create_task(_put_first(store, servicer, first_versions))
        stop = asyncio.create_task(stopping.wait())
        announced = keys.instance("registry", common.instance_id)
        try:
            await asyncio.wait({starting, stop}, return_when="FIRST_COMPLETED")
            if starting.done():
                starting.result()
            instance = Instance(
                service="registry",
                instance_id=common.instance_id,
                version=telemetry.version_of("forebay-registry"),
                addresses=addresses,
            )
            if not stopping.is_set():
                await lease.attach(announced, instance.encode())
                _log.info("registry listens on %s", bound)
            while not stopping.is_set():
                if following.done():
                    following.result()
                _report(server, feed, stale_after_s=config.stale_after_s)
                await asyncio.wait({stop}, timeout=_HEALTH_INTERVAL_S)
        finally:
            await lease.detach(announced)
            await server.drain(common.drain_timeout_s)
            for task in (following, starting, stop):
                task.cancel()
            await asyncio.wait({following, starting, stop})


async def _put_first(
    store: Store,
    servicer: RegistryServicer,
    requests: tuple[registry.PutVersionRequest, ...],
) -> None:
    """Put each version, waiting for etcd where it is away. ConfigError when one is refused."""
    backoff = store.backoff()
    for index, request in enumerate(requests):
        while True:
            try:
                await servicer.put(request)
            except RefusedError as refused:
                problem = f"entry {index}: {refused.message}"
                raise configs.ConfigError(bootstrap.VARIABLE, problem) from None
            except ForebayError as error:
                if error.reason not in (Reason.STORE_UNAVAILABLE, Reason.CONFLICT):
                    raise
                await asyncio.sleep(backoff.next_s())
                continue
            break


def _report(server: Server, feed: CatalogueFeed, *, stale_after_s: float) -> None:
    age_s = feed.age_s(time.monotonic())
    server.set_ready(SERVICE, feed.catalogue is not None and age_s <= stale_after_s)
    _AGE.set(age_s)
    if feed.catalogue is not None:
        _MODELS.set(len(feed.catalogue.models))


@configs.said_plainly()
def main() -> None:
    """Entry point of `forebay-registry`."""
    common = configs.load_common(os.environ)
    config = configs.load(Config, PREFIX, os.environ)
    telemetry.configure("registry", instance_id=common.instance_id, log_level=common.log_level)
    try:
        run(lambda stopping: serve(common, config, stopping))
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
