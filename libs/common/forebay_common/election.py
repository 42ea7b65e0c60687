"""One leader among candidates, with a fencing number.

The leader's key exists only under its lease and is put only where it is absent, so its create
revision, the fence, is higher for each later leader. A leader counts as lost once its key is gone
or its lease session is: by its own clock that is before etcd lets anyone else be elected. Orders
carry the fence, for a process that was frozen while it led.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from forebay_common.errors import ForebayError
from forebay_common.lease import Lease, Session
from forebay_common.store import Condition, Entry, Op, Store

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Leadership:
    """One time in office."""

    fence: int
    """Create revision of the leader's key; higher than that of every earlier leader."""
    key: str
    session: Session
    _over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def is_valid(self, now: float) -> bool:
        """Whether nobody else can be leader. `now` is in monotonic seconds."""
        return not self._over.is_set() and self.session.is_valid(now)

    async def lost(self) -> None:
        """Wait until it is over."""
        await self._over.wait()

    @property
    def still_led(self) -> Condition:
        """For a transaction that must not be carried out for a leader that was replaced."""
        return Condition.create_revision(self.key, self.fence)


class Election:
    """A candidate for one key. A lease may hold only one candidate per key."""

    def __init__(self, store: Store, lease: Lease, key: str, candidate_id: str) -> None:
        self._store = store
        self._lease = lease
        self._key = key
        self._candidate = candidate_id.encode()

    @asynccontextmanager
    async def campaign(self) -> AsyncIterator[Leadership]:
        """Wait to be elected; leaving the block resigns. If etcd is away then, the key stays until
        the lease ends or this candidate campaigns again."""
        leadership = await self._elected()
        follower = asyncio.create_task(self._follow(leadership), name=f"lead {self._key}")
        try:
            yield leadership
        finally:
            leadership._over.set()
            follower.cancel()
            await asyncio.wait({follower})
            await self._withdraw(leadership.fence)

    async def run(self, lead: Callable[[Leadership], Awaitable[None]]) -> None:
        """Campaign forever, and run `lead` while leader: it is cancelled when leadership is lost,
        and when it returns, the candidate resigns and campaigns again."""
        while True:
            async with self.campaign() as leadership:
                leading = asyncio.ensure_future(lead(leadership))
                lost = asyncio.create_task(leadership.lost())
                try:
                    await asyncio.wait({leading, lost}, return_when="FIRST_COMPLETED")
                finally:
                    lost.cancel()
                    leading.cancel()
                    await asyncio.wait({leading, lost})
                if not leading.cancelled():
                    leading.result()
            # Work that returns at once must not become a storm of elections.
            await asyncio.sleep(self._store.backoff().next_s())

    async def leader(self) -> str | None:
        """The present leader's id, None if there is none."""
        entry = await self._store.get(self._key)
        return None if entry is None else entry.value.decode(errors="replace")

    async def observe(self) -> AsyncGenerator[str | None, None]:
        """The leader's id, and each other one that follows; None while there is none."""
        last: str | None = None
        first = True
        async with aclosing(self._store.watch(self._key)) as snapshots:
            async for snapshot in snapshots:
                entry = snapshot.entries.get(self._key)
                leader = None if entry is None else entry.value.decode(errors="replace")
                if first or leader != last:
                    first, last = False, leader
                    yield leader

    async def _elected(self) -> Leadership:
        backoff = self._store.backoff()
        while True:
            async with aclosing(self._store.watch(self._key)) as snapshots:
                async for snapshot in snapshots:
                    try:
                        leadership = await self._stand(snapshot.entries.get(self._key))
                    except ForebayError as error:
                        # Perhaps elected, perhaps not: look again.
                        _log.debug("no answer to the candidacy for %s: %s", self._key, error)
                        break
                    if leadership is not None:
                        return leadership
            await asyncio.sleep(backoff.next_s())

    async def _stand(self, holder: Entry | None) -> Leadership | None:
        session = await self._lease.held()
        if holder is not None:
            if holder.lease_id != session.lease_id or holder.value != self._candidate:
                return None
            # Our own key, from a time in office that is over or an election whose answer was lost.
            await self._withdraw(holder.create_revision)
        result = await self._store.commit(
            if_=[Condition.absent(self._key)],
            then=[Op.put(self._key, self._candidate, lease_id=session.lease_id)],
        )
        if not result.succeeded or not session.is_valid(time.monotonic()):
            return None
        _log.info("elected for %s with fence %d", self._key, result.revision)
        return Leadership(fence=result.revision, key=self._key, session=session)

    async def _follow(self, leadership: Leadership) -> None:
        key_gone = asyncio.create_task(self._key_gone(leadership.fence))
        session_lost = asyncio.create_task(leadership.session.lost.wait())
        try:
            await asyncio.wait({key_gone, session_lost}, return_when="FIRST_COMPLETED")
            _log.warning("no longer leader for %s", self._key)
        finally:
            leadership._over.set()
            key_gone.cancel()
            session_lost.cancel()
            await asyncio.wait({key_gone, session_lost})

    async def _key_gone(self, fence: int) -> None:
        async with aclosing(self._store.watch(self._key)) as snapshots:
            async for snapshot in snapshots:
                entry = snapshot.entries.get(self._key)
                if entry is None or entry.create_revision != fence:
                    return

    async def _withdraw(self, fence: int) -> None:
        try:
            await self._store.commit(
                if_=[Condition.create_revision(self._key, fence)], then=[Op.delete(self._key)]
            )
        except ForebayError:
            _log.warning("the leader's key %s was not deleted", self._key)
