"""Keeps the replica's records in etcd: what discovery finds, under the batcher's lease.

The replica is listed from the first word of its engine host until it drains; the warm key is there
exactly while it is a standby that could take traffic at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from forebay_common.discovery import Instance, Keys, to_json
from forebay_common.errors import ForebayError
from forebay_common.lease import Lease
from forebay_common.store import Store

from forebay_batcher.messages import replica_message, warm_message
from forebay_batcher.queue_loop import QueueLoop
from forebay_batcher.replica import Replica, Watch

_log = logging.getLogger(__name__)


class AnnounceLoop:
    """Announces and withdraws."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        replica: Replica,
        queue: QueueLoop,
        instance: Instance,
        lease_ttl_s: float,
        interval_s: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._replica = replica
        self._queue = queue
        self._instance = instance
        self._lease_ttl_s = lease_ttl_s
        self._interval_s = interval_s

    async def run(self) -> None:
        """Keep the records right until cancelled, then revoke the lease."""
        watch = Watch(self._replica, interval_s=self._interval_s)
        announced: dict[str, bytes] = {}
        async with Lease.open(self._store, self._lease_ttl_s) as lease:
            while True:
                await watch.next()
                records = self._records()
                for key in announced.keys() - records.keys():
                    del announced[key]
                    await self._change(lease, key, None)
                for key, value in records.items():
                    if announced.get(key) != value:
                        announced[key] = value
                        await self._change(lease, key, value)

    async def _change(self, lease: Lease, key: str, value: bytes | None) -> None:
        # The lease itself catches up after an outage; what etcd refuses is refused for good.
        try:
            if value is None:
                await lease.detach(key)
            else:
                await lease.attach(key, value)
        except ForebayError as error:
            _log.error("etcd does not take the record %s: %s", key, error)

    def _records(self) -> Mapping[str, bytes]:
        replica, keys = self._replica, self._keys
        instance = self._instance
        records = {keys.instance(instance.service, instance.instance_id): instance.encode()}
        if not replica.engine.heard or replica.standing.draining:
            return records
        replica_id = replica.identity.replica_id
        message = replica_message(replica, self._queue.queue)
        records[keys.replica(replica_id)] = to_json(message)
        if replica.is_warm:
            warm_key = keys.warm(replica.identity.pool, replica_id)
            records[warm_key] = to_json(warm_message(replica))
        return records
