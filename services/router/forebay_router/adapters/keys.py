"""Keys and tenants in etcd: the last known while it is away, and changes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from forebay.router.v1 import key_service_pb2 as pb
from forebay_common.apikeys import KeySecrets
from forebay_common.discovery import Keys, View, from_json, to_json
from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Condition, Op, Store

from forebay_router.core.access import Keyring
from forebay_router.core.keys import check_tenant, key_of, tenant_of

_ATTEMPTS = 8


class KeyView:
    """Follows keys and tenants."""

    def __init__(self, store: Store, keys: Keys, secrets: KeySecrets) -> None:
        self._secrets = secrets
        self._records = View(store, keys.api_keys, _decode_record)
        self._tenants = View(store, keys.tenants, _decode_tenant)
        self._seen: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._keyring: Keyring | None = None
        self._is_listed = False

    @property
    def is_listed(self) -> bool:
        """Whether both were ever read."""
        return self._is_listed

    def age_s(self, now: float) -> float:
        """Seconds since etcd last showed that this is current."""
        return max(self._records.age_s(now), self._tenants.age_s(now))

    def current(self) -> Keyring:
        """The keys, translated once per change.

        Raises:
            ForebayError: STORE_UNAVAILABLE before they were read.
        """
        records, tenants = self._records.entries, self._tenants.entries
        keyring, seen = self._keyring, self._seen
        if keyring is not None and seen is not None and seen[0] is records and seen[1] is tenants:
            return keyring
        if not self._is_listed:
            raise ForebayError(
                Reason.STORE_UNAVAILABLE, "The API keys are not known yet.", retry_after_s=1
            )
        keyring = self._keyring = Keyring(
            self._secrets,
            {record.key.key_id: key_of(record) for record in records.values()},
            {tenant.name: tenant_of(tenant) for tenant in tenants.values()},
        )
        self._seen = (records, tenants)
        return keyring

    async def run(self) -> None:
        """Follow both until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._records.run())
            tasks.create_task(self._tenants.run())
            await self._records.ready()
            await self._tenants.ready()
            self._is_listed = True


class KeyStore:
    """Reads and changes of keys and tenants. Raises ForebayError while etcd is away."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def keys(self) -> list[pb.ApiKey]:
        """All keys, by id."""
        listing = await self._store.list(self._keys.api_keys)
        found = [from_json(pb.KeyRecord, entry.value).key for entry in listing.entries.values()]
        return sorted(found, key=lambda key: key.key_id)

    async def add_key(self, record: pb.KeyRecord) -> None:
        """Store a new key of a tenant.

        Raises:
            ForebayError: TENANT_NOT_FOUND.
        """
        tenant = self._keys.tenant(record.key.tenant or "-")
        result = await self._store.commit(
            if_=[Condition.exists(tenant)],
            then=[Op.put(self._keys.api_key(record.key.key_id), to_json(record))],
        )
        if not result.succeeded:
            message = "The tenant does not exist."
            raise ForebayError(Reason.TENANT_NOT_FOUND, message, param="tenant")

    async def change_key(self, key_id: str, change: Callable[[pb.ApiKey], pb.ApiKey]) -> pb.ApiKey:
        """Change a key.

        Raises:
            ForebayError: KEY_NOT_FOUND, or CONFLICT when others kept changing it.
        """
        if not key_id or "/" in key_id:
            raise _no_key()
        at = self._keys.api_key(key_id)
        for _ in range(_ATTEMPTS):
            entry = await self._store.get(at)
            if entry is None:
                raise _no_key()
            record = from_json(pb.KeyRecord, entry.value)
            record.key.CopyFrom(change(record.key))
            result = await self._store.commit(
                if_=[Condition.mod_revision(at, entry.mod_revision)],
                then=[Op.put(at, to_json(record))],
            )
            if result.succeeded:
                return record.key
        raise ForebayError(Reason.CONFLICT, "Others kept changing the key.", retry_after_s=1)

    async def tenants(self) -> list[pb.Tenant]:
        """All tenants, by name."""
        listing = await self._store.list(self._keys.tenants)
        found = []
        for entry in listing.entries.values():
            tenant = from_json(pb.Tenant, entry.value)
            tenant.revision = entry.mod_revision
            found.append(tenant)
        return sorted(found, key=lambda tenant: tenant.name)

    async def put_tenant(self, tenant: pb.Tenant) -> pb.Tenant:
        """Create or replace a tenant, which was checked."""
        stored = pb.Tenant()
        stored.CopyFrom(tenant)
        stored.revision = 0
        stored.revision = await self._store.put(self._keys.tenant(tenant.name), to_json(stored))
        return stored

    async def delete_tenant(self, name: str) -> None:
        """Remove a tenant; its keys are good for nothing from then on."""
        if name and "/" not in name:
            await self._store.delete(self._keys.tenant(name))


def _no_key() -> ForebayError:
    return ForebayError(Reason.KEY_NOT_FOUND, "No key has this id.", param="key_id")


def _decode_record(key: str, value: bytes) -> pb.KeyRecord:
    return from_json(pb.KeyRecord, value)


def _decode_tenant(key: str, value: bytes) -> pb.Tenant:
    return check_tenant(from_json(pb.Tenant, value))
