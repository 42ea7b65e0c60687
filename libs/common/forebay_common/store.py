"""etcd as a store of values under string keys, and as watches of whole snapshots.

Every call takes at most `timeout_s` and fails with ForebayError: STORE_UNAVAILABLE when etcd cannot
be reached (a write was then perhaps carried out), INVALID_ARGUMENT when etcd refuses the request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Self

import grpc.aio
from aetcd import rpc

from forebay_common.backoff import Backoff
from forebay_common.errors import ForebayError
from forebay_common.members import (
    REQUIRE_LEADER,
    LeaseNotFoundError,
    Member,
    Members,
    unavailable,
)
from forebay_common.watch import WatchEndedError, changes

__all__ = [
    "Condition",
    "Entry",
    "LeaseNotFoundError",
    "Op",
    "Snapshot",
    "Store",
    "TxnResult",
]

_log = logging.getLogger(__name__)

_PAGE: Final = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One key as etcd holds it."""

    key: str
    value: bytes
    create_revision: int
    """Revision at which the key came into being; another one once deleted and put again."""
    mod_revision: int
    """Revision of the last put."""
    lease_id: int
    """The lease the key dies with. 0: none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under a prefix at one revision."""

    revision: int
    entries: Mapping[str, Entry]
    changed: frozenset[str] | None = dataclasses.field(default=None, compare=False)
    """In a watch, the keys that differ from the snapshot before; None: any may."""


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for the `then` of a transaction. Made by the class methods."""

    key: str
    target: str
    equals: int | bytes
    negated: bool = False

    @classmethod
    def exists(cls, key: str) -> Self:
        """The key is there."""
        return cls(key, "create_revision", 0, negated=True)

    @classmethod
    def absent(cls, key: str) -> Self:
        """The key is not there."""
        return cls(key, "create_revision", 0)

    @classmethod
    def mod_revision(cls, key: str, revision: int) -> Self:
        """The key was last put at this revision."""
        return cls(key, "mod_revision", revision)

    @classmethod
    def create_revision(cls, key: str, revision: int) -> Self:
        """The key came into being at this revision and was not deleted since."""
        return cls(key, "create_revision", revision)

    @classmethod
    def value(cls, key: str, value: bytes) -> Self:
        """The key holds exactly this value."""
        return cls(key, "value", value)

    @classmethod
    def lease(cls, key: str, lease_id: int) -> Self:
        """The key is there and dies with this lease."""
        return cls(key, "lease", lease_id)


class _Kind(Enum):
    GET = "get"
    PUT = "put"
    DELETE = "delete"


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One step of a transaction. Made by the class methods."""

    kind: _Kind
    key: str
    value: bytes = b""
    lease_id: int = 0

    @classmethod
    def get(cls, key: str) -> Self:
        """Read a key into the result's `entries`."""
        return cls(_Kind.GET, key)

    @classmethod
    def put(cls, key: str, value: bytes, *, lease_id: int = 0) -> Self:
        """Put a value; with a lease, the key dies with it."""
        return cls(_Kind.PUT, key, value, lease_id)

    @classmethod
    def delete(cls, key: str) -> Self:
        """Delete a key; nothing happens if it is not there."""
        return cls(_Kind.DELETE, key)


@dataclasses.dataclass(frozen=True, slots=True)
class TxnResult:
    """How a transaction went."""

    succeeded: bool
    """True: every condition held and `then` was carried out. False: `else_` was."""
    revision: int
    entries: Mapping[str, Entry]
    """What `Op.get` found."""


class Store:
    """A client of one etcd cluster. Made inside a running loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float = 2.0,
        progress_interval_s: float = 1.0,
        silence_s: float = 4.0,
        backoff_max_s: float = 2.0,
        rng: random.Random | None = None,
    ) -> None:
        """`timeout_s` bounds each call. A watch asks etcd for a sign of life whenever it heard
        nothing for `progress_interval_s`, and is opened anew after `silence_s` without any, on
        another connection.
        `backoff_max_s` caps the wait between two attempts of a watch."""
        self._members = Members(endpoints, timeout_s=timeout_s, silence_s=silence_s)
        self._timeout_s = timeout_s
        self._progress_interval_s = progress_interval_s
        self._silence_s = silence_s
        self._backoff_max_s = backoff_max_s
        self._rng = rng or random.Random()  # noqa: S311 (spreads retries, guards nothing)

    @classmethod
    def open(cls, endpoints: Sequence[str], *, timeout_s: float = 2.0) -> Self:
        """A store on these endpoints, each `host:port`. Connects on first use."""
        return cls(endpoints, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Fails the calls in flight, ends the watches, closes the connections."""
        await self._members.close()

    @property
    def timeout_s(self) -> float:
        """The longest a call may take, in seconds."""
        return self._timeout_s

    def backoff(self) -> Backoff:
        """Waits for a caller that repeats a failed call."""
        return Backoff(
            base_s=min(0.05, self._backoff_max_s), cap_s=self._backoff_max_s, rng=self._rng
        )

    async def get(self, key: str) -> Entry | None:
        """The key's entry, None if it is not there. Linearizable."""
        response = await self._range(rpc.RangeRequest(key=_encode(key)))
        return _entry(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Snapshot:
        """All keys that begin with the prefix, at one revision."""
        start = _encode(prefix) or b"\0"
        end = _prefix_end(_encode(prefix))
        entries: dict[str, Entry] = {}
        revision = 0
        while True:
            response = await self._range(
                rpc.RangeRequest(key=start, range_end=end, limit=_PAGE, revision=revision)
            )
            # The later pages are read at the first one's revision, so that they fit together.
            revision = revision or response.header.revision
            entries.update((entry.key, entry) for entry in map(_entry, response.kvs))
            if not response.more:
                return Snapshot(revision, MappingProxyType(entries))
            start = response.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Put a value and return the revision. LeaseNotFoundError if the lease is gone."""
        request = rpc.PutRequest(key=_encode(key), value=value, lease=lease_id)
        response = await self._members.unary(
            lambda member: member.kv.Put, request, repeatable=False
        )
        return int(response.header.revision)

    async def delete(self, key: str) -> bool:
        """Delete a key and return whether it was there."""
        request = rpc.DeleteRangeRequest(key=_encode(key))
        response = await self._members.unary(
            lambda member: member.kv.DeleteRange, request, repeatable=False
        )
        return bool(response.deleted)

    async def commit(
        self,
        *,
        if_: Sequence[Condition],
        then: Sequence[Op],
        else_: Sequence[Op] = (),
    ) -> TxnResult:
        """One atomic transaction. No key may be put twice in it. LeaseNotFoundError if a lease is
        gone; then nothing was done."""
        request = rpc.TxnRequest(
            compare=[_compare(condition) for condition in if_],
            success=[_request_op(op) for op in then],
            failure=[_request_op(op) for op in else_],
        )
        response = await self._members.unary(
            lambda member: member.kv.Txn, request, repeatable=False
        )
        found = [
            _entry(kv)
            for answer in response.responses
            if answer.HasField("response_range")
            for kv in answer.response_range.kvs
        ]
        return TxnResult(
            succeeded=response.succeeded,
            revision=response.header.revision,
            entries=MappingProxyType({entry.key: entry for entry in found}),
        )

    async def grant_lease(self, ttl_s: int) -> tuple[int, int]:
        """A new lease: its id, and the seconds it lives without a keep-alive (etcd may raise
        them)."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        # A grant whose answer was lost leaves an empty lease behind, which expires by itself.
        response = await self._members.unary(
            lambda member: member.lease.LeaseGrant, request, repeatable=True
        )
        return int(response.ID), int(response.TTL)

    async def keep_lease_alive(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        """Restart a lease's time and return it in seconds. 0: the lease is gone."""

        async def send(member: Member, timeout_s: float) -> Any:
            call = member.lease.LeaseKeepAlive(
                [rpc.LeaseKeepAliveRequest(ID=lease_id)],
                timeout=timeout_s,
                metadata=REQUIRE_LEADER,
                wait_for_ready=True,
            )
            with member.hold(call):
                response = await call.read()
            if response is grpc.aio.EOF:
                raise unavailable()
            return response

        response = await self._members.call(send, repeatable=True, timeout_s=timeout_s)
        return int(response.TTL)

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. Nothing happens if it is gone."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._members.unary(
                lambda member: member.lease.LeaseRevoke, request, repeatable=True
            )
        except LeaseNotFoundError:
            return

    async def watch(
        self, prefix: str, *, on_alive: Callable[[], None] | None = None
    ) -> AsyncGenerator[Snapshot, None]:
        """Whole snapshots of a prefix: the listing, then one after each batch of changes.

        Goes on until the store is closed. When etcd goes away, or what was watched was compacted,
        it waits, lists again and yields that; nothing is yielded in between. `on_alive` is called
        whenever etcd has shown that the last snapshot is still true. Leave early through
        `contextlib.aclosing`, so that the call ends at once.
        """
        backoff = self.backoff()
        away = False
        while not self._members.closed:
            try:
                snapshot = await self.list(prefix)
                if on_alive is not None:
                    on_alive()
                yield snapshot
                async with aclosing(self._changes(prefix, snapshot.revision)) as batches:
                    async for events in batches:
                        if away:
                            _log.info("the watch of %s is back", prefix)
                            away = False
                        backoff.reset()
                        if on_alive is not None:
                            on_alive()
                        if events:
                            snapshot = _apply(snapshot, events)
                            yield snapshot
            except (ForebayError, WatchEndedError) as error:
                if self._members.closed:
                    return
                _log.log(
                    logging.DEBUG if away else logging.WARNING,
                    "the watch of %s ended and is opened again: %s",
                    prefix,
                    error,
                )
                away = True
            await asyncio.sleep(backoff.next_s())

    def _changes(self, prefix: str, revision: int) -> AsyncGenerator[Sequence[Any], None]:
        create = rpc.WatchCreateRequest(
            key=_encode(prefix) or b"\0",
            range_end=_prefix_end(_encode(prefix)),
            start_revision=revision + 1,
            fragment=True,
        )
        return changes(
            self._members,
            create,
            timeout_s=self._timeout_s,
            progress_interval_s=self._progress_interval_s,
            silence_s=self._silence_s,
        )

    async def _range(self, request: Any) -> Any:
        return await self._members.unary(lambda member: member.kv.Range, request, repeatable=True)


def _apply(snapshot: Snapshot, events: Sequence[Any]) -> Snapshot:
    entries = dict(snapshot.entries)
    changed = set()
    for event in events:
        entry = _entry(event.kv)
        changed.add(entry.key)
        if event.type == rpc.Event.DELETE:
            entries.pop(entry.key, None)
        else:
            entries[entry.key] = entry
    revision = events[-1].kv.mod_revision
    return Snapshot(revision, MappingProxyType(entries), frozenset(changed))


def _compare(condition: Condition) -> Any:
    targets = {
        "create_revision": rpc.Compare.CREATE,
        "mod_revision": rpc.Compare.MOD,
        "value": rpc.Compare.VALUE,
        "lease": rpc.Compare.LEASE,
    }
    return rpc.Compare(
        key=_encode(condition.key),
        target=targets[condition.target],
        result=rpc.Compare.NOT_EQUAL if condition.negated else rpc.Compare.EQUAL,
        **{condition.target: condition.equals},
    )


def _request_op(op: Op) -> Any:
    key = _encode(op.key)
    match op.kind:
        case _Kind.GET:
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
        case _Kind.PUT:
            put = rpc.PutRequest(key=key, value=op.value, lease=op.lease_id)
            return rpc.RequestOp(request_put=put)
        case _Kind.DELETE:
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def _entry(kv: Any) -> Entry:
    return Entry(_decode(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


# A foreign key that is not UTF-8 must not break a listing, and goes through unchanged.
def _encode(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _decode(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with the prefix; etcd reads a zero byte as "no end"."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"
