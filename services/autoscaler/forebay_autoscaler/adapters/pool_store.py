"""Pools in etcd, one key each, changed by any instance for whoever leads."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay_common.discovery import Keys, from_json, to_json
from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Condition, Op, Store

from forebay_autoscaler.core.pools import check_pool
from forebay_autoscaler.core.refusal import RefusedError

_ATTEMPTS = 8


def decode_pool(value: bytes) -> autoscaler.Pool:
    """A pool as it is stored. Raises ValueError or RefusedError where it is not right."""
    return check_pool(from_json(autoscaler.Pool, value))


class PoolStore:
    """Reads and changes of pools. Raises ForebayError while etcd is away."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def read_all(self) -> dict[str, autoscaler.Pool]:
        """All pools by name, as etcd has them now; what is no right pool is left out."""
        listing = await self._store.list(self._keys.pools)
        pools: dict[str, autoscaler.Pool] = {}
        for entry in listing.entries.values():
            with contextlib.suppress(ValueError, RefusedError):
                pool = decode_pool(entry.value)
                pools[pool.name] = pool
        return pools

    async def put(self, pool: autoscaler.Pool) -> None:
        """Create or replace a pool."""
        await self._store.put(self._keys.pool(pool.name), to_json(pool))

    async def put_at_start(self, pool: autoscaler.Pool) -> bool:
        """Put a pool unless this very description was put at a start before, so that what was
        changed since stays. Returns whether it was put."""
        mark_key = f"{self._keys.namespace}/autoscaler/bootstrap/{pool.name}"
        value = to_json(pool)
        mark = hashlib.sha256(value).hexdigest().encode()
        pool_key = self._keys.pool(pool.name)
        result = await self._store.commit(
            if_=[Condition.value(mark_key, mark), Condition.exists(pool_key)],
            then=[],
            else_=[Op.put(mark_key, mark), Op.put(pool_key, value)],
        )
        return not result.succeeded

    async def change(self, name: str, change: Callable[[autoscaler.Pool], None]) -> autoscaler.Pool:
        """Change a pool in place.

        Raises:
            ForebayError: POOL_NOT_FOUND, or CONFLICT when others kept changing it.
        """
        key = self._keys.pool(name)
        for _ in range(_ATTEMPTS):
            entry = await self._store.get(key)
            if entry is None:
                raise ForebayError(Reason.POOL_NOT_FOUND, "No pool has this name.", param="name")
            pool = from_json(autoscaler.Pool, entry.value)
            change(pool)
            value = to_json(pool)
            if value == entry.value:
                return pool
            result = await self._store.commit(
                if_=[Condition.mod_revision(key, entry.mod_revision)], then=[Op.put(key, value)]
            )
            if result.succeeded:
                return pool
        raise ForebayError(
            Reason.CONFLICT, "Others kept changing the pool; try again.", retry_after_s=1
        )
