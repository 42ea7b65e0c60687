"""The fleet as this router sees it: who is listed in etcd, and what each replica says of itself.

Each listed replica is watched over a stream of its own. A stream that ends marks its replica down
at once; only a report over a newer stream takes the mark away. What its engines have cached comes
over another stream, whose end means nothing but that this is no longer known. A lease that etcd
lost does not remove a replica whose stream still speaks, within `unlisted_grace_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.backoff import Backoff
from forebay_common.channel import ChannelPool
from forebay_common.discovery import Keys, View, from_json
from forebay_common.store import Store
from forebay_wire.client import ClientPool

from forebay_router.adapters.caches import follow_cache
from forebay_router.core.marks import Marks
from forebay_router.core.place import ModelLoad, Placer, Replica

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05


@dataclasses.dataclass(slots=True, eq=False)
class _Member:
    replica_id: str
    contract: batcher.Replica
    replica: Replica
    reports: bool = False
    """Its stream is open and has spoken."""
    unlisted: asyncio.TimerHandle | None = None
    """Runs while it is no longer listed in etcd."""
    call: Any = None
    tasks: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    reported: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set at its next report, and replaced by another then."""


class Fleet:
    """Follows every replica."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        channels: ChannelPool,
        pool: ClientPool,
        *,
        load_interval_ms: int,
        backoff_max_s: float,
        unlisted_grace_s: float,
        call_grace_s: float,
        rng: random.Random,
        placer: Placer,
        on_left: Callable[[str], None] = lambda replica_id: None,
        cache_interval_ms: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`channels` carry watches, `pool` the requests. `call_grace_s` is how long calls in
        flight to a replica that left may go on. `on_left` hears of each that left."""
        self._view = View(store, keys.replicas, _decode)
        self._channels = channels
        self._pool = pool
        self._load_interval_ms = load_interval_ms
        self._backoff_max_s = backoff_max_s
        self._unlisted_grace_s = unlisted_grace_s
        self._call_grace_s = call_grace_s
        self._rng = rng
        self._members: dict[str, _Member] = {}
        self._replicas: tuple[Replica, ...] | None = None
        self._marks = Marks()
        self._placer = placer
        self._on_left = on_left
        self._cache_interval_ms = cache_interval_ms
        self._clock = clock
        self._revision = 0
        self._changed = asyncio.Event()

    @property
    def placer(self) -> Placer:
        """What places requests among them."""
        return self._placer

    @property
    def down(self) -> Set[str]:
        """Replicas that are held for down."""
        return self._marks.down

    @property
    def revision(self) -> int:
        """Grows with each change that can make a replica placeable, or no longer so."""
        return self._revision

    def replicas(self) -> Sequence[Replica]:
        """All replicas."""
        if self._replicas is None:
            self._replicas = tuple(member.replica for member in self._members.values())
        return self._replicas

    def contracts(self) -> Sequence[tuple[batcher.Replica, Replica]]:
        """All replicas, also as their contract has them, by id."""
        members = sorted(self._members.values(), key=lambda member: member.replica_id)
        return [(member.contract, member.replica) for member in members]

    def age_s(self, now: float) -> float:
        """Seconds since etcd last showed that the list of replicas is current."""
        return self._view.age_s(now)

    async def changed(self, since_revision: int) -> None:
        """Wait until `revision` is another one."""
        if self._revision == since_revision:
            await self._changed.wait()

    def mark_down(self, replica_id: str) -> None:
        """Hold a replica for down, and ask it anew at once."""
        member = self._members.get(replica_id)
        if member is None:
            return
        self._mark(member)
        if member.call is not None:
            member.call.cancel()

    def nudge(self) -> None:
        """Have everybody who waits for a replica look again."""
        self._bump()

    def reported(self) -> Sequence[batcher.Replica]:
        """Each replica as it last described itself, by id."""
        return [contract for contract, _ in self.contracts()]

    def is_down(self, replica_id: str) -> bool:
        """Whether it is held for down."""
        return replica_id in self._marks

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._view.run())
                tasks.create_task(self._follow_listing())
        finally:
            for member in list(self._members.values()):
                self._remove(member)

    async def _follow_listing(self) -> None:
        await self._view.ready()
        while True:
            revision = self._view.revision
            self._reconcile()
            await self._view.changed(revision)

    def _reconcile(self) -> None:
        listed = {replica.replica_id: replica for replica in self._view.entries.values()}
        for member in list(self._members.values()):
            now_listed = listed.get(member.replica_id)
            if now_listed is None:
                self._unlist(member)
            elif now_listed.address != member.replica.address:
                self._remove(member)
        for replica_id, contract in listed.items():
            known = self._members.get(replica_id)
            if known is None:
                self._add(contract)
                continue
            if known.unlisted is not None:
                known.unlisted.cancel()
                known.unlisted = None
            if not known.reports:
                self._take(known, contract)
        addresses = {member.replica.address for member in self._members.values()}
        self._channels.retain(addresses, grace_s=self._call_grace_s)
        self._pool.retain(addresses, grace_s=self._call_grace_s)

    def _add(self, contract: batcher.Replica) -> None:
        member = _Member(contract.replica_id, contract, _translate(contract))
        self._members[member.replica_id] = member
        self._placer.update(member.replica, self._clock())
        replica_id = member.replica_id
        member.tasks = [
            asyncio.create_task(self._watch(member), name=f"watch {replica_id}"),
            asyncio.create_task(self._follow_cache(member), name=f"cache of {replica_id}"),
        ]
        self._bump()
        _log.info("replica %s joined", member.replica_id)

    def _unlist(self, member: _Member) -> None:
        if not member.reports or self._unlisted_grace_s == 0:
            self._remove(member)
        elif member.unlisted is None:
            member.unlisted = asyncio.get_running_loop().call_later(
                self._unlisted_grace_s, self._remove, member
            )

    def _remove(self, member: _Member) -> None:
        if self._members.get(member.replica_id) is not member:
            return
        del self._members[member.replica_id]
        if member.unlisted is not None:
            member.unlisted.cancel()
        for task in member.tasks:
            task.cancel()
        self._marks.forget(member.replica_id)
        self._placer.remove(member.replica_id)
        self._on_left(member.replica_id)
        self._bump()
        _log.info("replica %s left", member.replica_id)

    async def _watch(self, member: _Member) -> None:
        backoff = Backoff(base_s=_FIRST_PAUSE_S, cap_s=self._backoff_max_s, rng=self._rng)
        request = batcher.WatchReplicaRequest(load_interval_ms=self._load_interval_ms)
        while True:
            epoch = self._marks.epoch(member.replica_id)
            stub = batcher_rpc.BatcherServiceStub(self._channels.get(member.replica.address))
            member.call = stub.WatchReplica(request)
            try:
                while (response := await member.call.read()) is not grpc.aio.EOF:
                    if response.replica.replica_id != member.replica_id:
                        _log.warning("another replica answers for %s", member.replica_id)
                        break
                    backoff.reset()
                    self._hear(member, response.replica, epoch)
            except grpc.RpcError:
                _log.debug("the watch of %s ended", member.replica_id, exc_info=True)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                # `mark_down` cancels the call alone, which looks the same from here.
                if task is not None and task.cancelling():
                    raise
            finally:
                member.call.cancel()
                member.call = None
                member.reports = False
            self._mark(member)
            if member.unlisted is not None:
                self._remove(member)
            await asyncio.sleep(backoff.next_s())

    async def _follow_cache(self, member: _Member) -> None:
        if not self._cache_interval_ms:
            return
        await follow_cache(
            member.replica_id,
            lambda: self._channels.get(member.replica.address),
            self._placer,
            changed=lambda: member.reported,
            interval_ms=self._cache_interval_ms,
            backoff_max_s=self._backoff_max_s,
            rng=self._rng,
        )

    def _hear(self, member: _Member, contract: batcher.Replica, epoch: int) -> None:
        member.reports = True
        self._take(member, contract)
        if self._marks.clear(member.replica_id, epoch):
            _log.info("replica %s is back", member.replica_id)
            self._placer.returned(member.replica_id, self._clock())
            self._bump()

    def _take(self, member: _Member, contract: batcher.Replica) -> None:
        before = member.replica
        member.contract = contract
        member.replica = _translate(contract)
        if contract.address != before.address:
            # The listing decides where it is; a report only speaks of what it does.
            member.replica = dataclasses.replace(member.replica, address=before.address)
        self._placer.update(member.replica, self._clock())
        reported, member.reported = member.reported, asyncio.Event()
        reported.set()
        self._replicas = None
        if _shape(before) != _shape(member.replica):
            self._bump()

    def _mark(self, member: _Member) -> None:
        if self._marks.mark(member.replica_id):
            _log.warning("replica %s is down", member.replica_id)
            self._bump()

    def _bump(self) -> None:
        self._replicas = None
        self._revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _shape(replica: Replica) -> tuple[object, ...]:
    """All of a replica but its load."""
    models = {version: load.active for version, load in replica.models.items()}
    return (replica.takes_traffic, replica.draining, models)


def _translate(contract: batcher.Replica) -> Replica:
    return Replica(
        replica_id=contract.replica_id,
        address=contract.address,
        takes_traffic=contract.role == batcher.ROLE_ACTIVE,
        draining=contract.draining,
        models={
            model.model_version: ModelLoad(
                active=model.state == engine.MODEL_STATE_ACTIVE,
                queued=model.queued,
                in_flight=model.in_flight,
                slots=model.slots,
                waiting_tokens=model.waiting_prompt_tokens,
                kv_usage=model.kv_cache_usage,
            )
            for model in contract.models
        },
        pool=contract.pool,
    )


def _decode(key: str, value: bytes) -> batcher.Replica:
    replica = from_json(batcher.Replica, value)
    if not replica.replica_id or not replica.address:
        raise ValueError(f"{key} holds no replica")
    return replica
