"""Who is there: the layout of keys, the records under them, and views of them.

A view is the last known snapshot of a prefix. It stays as it is while etcd is away; `age_s` says
for how long nothing was heard.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Generic, Self, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Entry, Snapshot, Store

_log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def to_json(message: Message) -> bytes:
    """A message as one line of proto JSON, readable with etcdctl."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False).encode()


def from_json(cls: type[M], value: bytes) -> M:
    """Read proto JSON. Unknown fields are ignored, so that a newer writer can be read.

    Raises ValueError if it is not such a message.
    """
    message, fields = cls(), json.loads(value)
    if not isinstance(fields, dict):
        raise ValueError(f"not a {message.DESCRIPTOR.full_name}: no JSON object")
    try:
        return json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(f"not a {message.DESCRIPTOR.full_name}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The layout of a namespace. Plurals are prefixes and end in a slash, singulars are keys."""

    namespace: str = "/forebay"

    @property
    def replicas(self) -> str:
        """`batcher.v1.Replica` of each replica, under its batcher's lease."""
        return f"{self.namespace}/replicas/"

    def replica(self, replica_id: str) -> str:
        """One replica."""
        return self.replicas + _part("replica_id", replica_id)

    @property
    def instances(self) -> str:
        """`Instance` of each running process, under its lease."""
        return f"{self.namespace}/instances/"

    def instances_of(self, service: str) -> str:
        """The instances of one service."""
        return f"{self.instances}{_part('service', service)}/"

    def instance(self, service: str, instance_id: str) -> str:
        """One running process."""
        return self.instances_of(service) + _part("instance_id", instance_id)

    def warm_in(self, pool: str) -> str:
        """The healthy standbys of a pool."""
        return f"{self.namespace}/warm/{_part('pool', pool)}/"

    def warm(self, pool: str, replica_id: str) -> str:
        """One healthy standby, under its batcher's lease."""
        return self.warm_in(pool) + _part("replica_id", replica_id)

    def claims_in(self, pool: str) -> str:
        """The claimed standbys of a pool."""
        return f"{self.namespace}/claims/{_part('pool', pool)}/"

    def claim(self, pool: str, replica_id: str) -> str:
        """The claim on one standby, under the autoscaler's lease."""
        return self.claims_in(pool) + _part("replica_id", replica_id)

    @property
    def models(self) -> str:
        """`registry.v1.Model` of each model."""
        return f"{self.namespace}/models/"

    def model(self, name: str) -> str:
        """One model. Its name may hold slashes."""
        return self.models + _tail("name", name)

    @property
    def aliases(self) -> str:
        """`registry.v1.Alias` of each alias."""
        return f"{self.namespace}/aliases/"

    def alias(self, name: str) -> str:
        """One alias. Its name may hold slashes."""
        return self.aliases + _tail("name", name)

    @property
    def pools(self) -> str:
        """`autoscaler.v1.Pool` of each pool."""
        return f"{self.namespace}/pools/"

    def pool(self, name: str) -> str:
        """One pool."""
        return self.pools + _part("pool", name)

    @property
    def api_keys(self) -> str:
        """`router.v1.KeyRecord` of each API key."""
        return f"{self.namespace}/keys/"

    def api_key(self, key_id: str) -> str:
        """One API key."""
        return self.api_keys + _part("key_id", key_id)

    @property
    def tenants(self) -> str:
        """`router.v1.Tenant` of each tenant."""
        return f"{self.namespace}/tenants/"

    def tenant(self, name: str) -> str:
        """One tenant."""
        return self.tenants + _part("name", name)

    def load(self, model_version: str) -> str:
        """The router that has a cold model version loaded, under its lease."""
        return f"{self.namespace}/loads/" + _tail("model_version", model_version)

    def leader(self, service: str) -> str:
        """The id of a service's leader, under its lease."""
        return f"{self.namespace}/leaders/{_part('service', service)}"

    def decisions(self, pool: str) -> str:
        """What the autoscaler decided for a pool, and why."""
        return f"{self.namespace}/decisions/{_part('pool', pool)}/"


def _part(param: str, value: str) -> str:
    if not value or "/" in value:
        raise ForebayError(
            Reason.INVALID_ARGUMENT, f"{param} must not be empty or hold a slash.", param=param
        )
    return value


def _tail(param: str, value: str) -> str:
    if not value:
        raise ForebayError(Reason.INVALID_ARGUMENT, f"{param} must not be empty.", param=param)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One running process of a service, as it announces itself."""

    service: str
    instance_id: str
    version: str
    addresses: Mapping[str, str]
    """`host:port` by what is spoken there: grpc, http, metrics."""

    def encode(self) -> bytes:
        """As one line of JSON."""
        record = {
            "service": self.service,
            "instance_id": self.instance_id,
            "version": self.version,
            "addresses": dict(self.addresses),
        }
        return json.dumps(record, ensure_ascii=False).encode()

    @classmethod
    def decode(cls, key: str, value: bytes) -> Self:
        """Read a record, ignoring unknown fields. ValueError if it is none."""
        record = json.loads(value)
        match record:
            case {
                "service": str(service),
                "instance_id": str(instance_id),
                "version": str(version),
                "addresses": dict(addresses),
            } if all(isinstance(address, str) for address in addresses.values()):
                return cls(service, instance_id, version, MappingProxyType(addresses))
        raise ValueError(f"{key} holds no instance")


class View(Generic[T]):
    """The last known entries of a prefix, decoded. `run()` keeps them current.

    An entry that cannot be decoded is left out, and logged once for each value it had.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[str, bytes], T],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._decode = decode
        self._clock = clock
        self._entries: Mapping[str, T] = MappingProxyType({})
        self._snapshot: Snapshot | None = None
        self._heard_at = -math.inf
        self._published = asyncio.Event()
        self._listed = asyncio.Event()

    @property
    def entries(self) -> Mapping[str, T]:
        """Decoded values by full key. Never changed in place; replaced as a whole."""
        return self._entries

    @property
    def revision(self) -> int:
        """Revision of the entries, 0 before the first listing. It goes back only when etcd lost
        data."""
        return 0 if self._snapshot is None else self._snapshot.revision

    def age_s(self, now: float) -> float:
        """Seconds since etcd last showed that the entries are current; infinite before the first
        listing. `now` is in monotonic seconds."""
        return max(0.0, now - self._heard_at)

    async def ready(self) -> None:
        """Wait for the first listing."""
        await self._listed.wait()

    async def changed(self, since_revision: int) -> int:
        """Wait until the view's revision is another one, and return it."""
        if self.revision == since_revision:
            await self._published.wait()
        return self.revision

    async def run(self) -> None:
        """Follow the prefix until cancelled or the store is closed."""
        async with aclosing(self._store.watch(self._prefix, on_alive=self._heard)) as snapshots:
            async for snapshot in snapshots:
                self._publish(snapshot)

    def _heard(self) -> None:
        self._heard_at = self._clock()

    def _publish(self, snapshot: Snapshot) -> None:
        known: Mapping[str, Entry] = {} if self._snapshot is None else self._snapshot.entries
        changed: Iterable[str] = (*snapshot.entries, *(known.keys() - snapshot.entries.keys()))
        if self._snapshot is not None and snapshot.changed is not None:
            changed = snapshot.changed
        entries = dict(self._entries)
        for key in changed:
            old, new = known.get(key), snapshot.entries.get(key)
            if old is not None and new is not None and old.value == new.value:
                continue
            entries.pop(key, None)
            if new is None:
                continue
            # Whatever others have put there, it must not end discovery.
            try:
                entries[key] = self._decode(key, new.value)
            except Exception:
                _log.warning("%s cannot be decoded and is left out", key, exc_info=True)
        repeated = snapshot == self._snapshot
        self._entries = MappingProxyType(entries)
        self._snapshot = snapshot
        self._listed.set()
        if not repeated:
            published, self._published = self._published, asyncio.Event()
            published.set()
