"""A lease as a session: kept alive, replaced when lost, with what was attached put again.

A session is valid for one TTL after the last keep-alive that etcd answered, counted from when it
was sent. etcd counts from when it arrived, so a holder knows its loss before etcd lets others act.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Self

from forebay_common.errors import ForebayError, Reason
from forebay_common.members import unavailable
from forebay_common.store import Condition, LeaseNotFoundError, Op, Store

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """One unbroken hold of a lease. Once lost, it never becomes valid again."""

    lease_id: int
    expires_at: float
    """Monotonic seconds; moves on with each keep-alive."""
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def is_valid(self, now: float) -> bool:
        """Whether etcd still holds the lease for certain. `now` is in monotonic seconds."""
        return not self.lost.is_set() and now < self.expires_at


class Lease:
    """A lease and the keys attached to it. Use as `async with Lease.open(store, ttl_s) as lease`.

    The keys stay attached while etcd is away: what is attached or detached meanwhile is carried out
    when it is back, and a lease that etcd has lost is replaced and everything put again.
    """

    def __init__(
        self, store: Store, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ttl_s = math.ceil(ttl_s)
        self._clock = clock
        self._interval_s = self._ttl_s / 3
        self._lease_id = 0
        self._session: Session | None = None
        self._held = asyncio.Event()
        self._renew_at = 0.0
        self._in_doubt = False
        self._attached: dict[str, bytes] = {}
        # Keys whose state in etcd may differ from what is wanted: attached, or else deleted.
        self._dirty: dict[str, None] = {}
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def open(cls, store: Store, ttl_s: float) -> Self:
        """A lease of at least `ttl_s` seconds (rounded up; etcd raises 1 to 2)."""
        return cls(store, ttl_s)

    async def __aenter__(self) -> Self:
        """Waits for the first attempt to get a lease, not for its success: etcd may be away."""
        assert self._task is None, "a lease is opened once"
        self._task = asyncio.create_task(self._run(), name="lease")
        try:
            await self._tried.wait()
        except BaseException:
            await self.orphan()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def id(self) -> int:
        """The current lease. STORE_UNAVAILABLE while there is none."""
        if self._lease_id == 0:
            raise unavailable()
        return self._lease_id

    @property
    def session(self) -> Session | None:
        """The current session, None while there is no valid one."""
        session = self._session
        return session if session is not None and session.is_valid(self._clock()) else None

    async def held(self) -> Session:
        """Wait for a valid session."""
        while (session := self.session) is None:
            self._held.clear()
            await self._held.wait()
        return session

    async def lost(self) -> None:
        """Wait until the current session is lost: etcd no longer has the lease, or can no longer be
        asked and the TTL has passed. Returns at once while there is none."""
        if self._session is not None:
            await self._session.lost.wait()

    async def attach(self, key: str, value: bytes) -> None:
        """Put a value under the lease and keep it there; again with another value to update it.

        Returns when it is stored, or at once while etcd is away: it is then stored when etcd is
        back. INVALID_ARGUMENT if etcd refuses the value. Does nothing once the lease is closed.
        """
        self._attached[key] = value
        await self._change(key)

    async def detach(self, key: str) -> None:
        """Delete an attached key, now or when etcd is back. One that is no longer under this lease
        is left alone."""
        self._attached.pop(key, None)
        await self._change(key)

    async def close(self) -> None:
        """Stop and revoke the lease: its keys vanish at once (after the TTL if etcd is away)."""
        await self._stop()
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id == 0:
            return
        try:
            await self._store.revoke_lease(lease_id)
        except ForebayError:
            _log.warning("the lease was not revoked and expires by itself")

    async def orphan(self) -> None:
        """Stop and leave the lease: its keys stay until the TTL has passed."""
        await self._stop()
        self._lease_id = 0

    async def _change(self, key: str) -> None:
        if self._closed:
            return
        self._dirty[key] = None
        if self._in_doubt or self._lease_id == 0:
            return
        try:
            await self._write([key])
        except LeaseNotFoundError:
            self._wake.set()
        except ForebayError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE:
                raise
            self._in_doubt = True
            self._wake.set()

    async def _run(self) -> None:
        backoff = self._store.backoff()
        while True:
            self._wake.clear()
            try:
                await self._renew()
                await self._write(list(self._dirty))
            except LeaseNotFoundError:
                wait_s = backoff.next_s()
            except ForebayError as error:
                if not self._in_doubt:
                    _log.warning("the lease cannot be kept alive: %s", error)
                self._in_doubt = True
                wait_s = backoff.next_s()
            # A bug here must not let the keys of a healthy process expire.
            except Exception:
                _log.exception("the lease's loop failed and goes on")
                wait_s = backoff.next_s()
            else:
                if self._in_doubt:
                    _log.info("the lease is kept alive again")
                self._in_doubt = False
                backoff.reset()
                wait_s = self._renew_at - self._clock()
            self._tried.set()
            try:
                async with asyncio.timeout(min(wait_s, self._interval_s)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _renew(self) -> None:
        if self._lease_id != 0 and (self._in_doubt or self._clock() >= self._renew_at):
            sent_at = self._clock()
            ttl_s = await self._store.keep_lease_alive(self._lease_id, timeout_s=self._interval_s)
            if ttl_s > 0:
                self._extend(sent_at, ttl_s)
            else:
                self._drop()
        if self._lease_id == 0:
            sent_at = self._clock()
            self._lease_id, ttl_s = await self._store.grant_lease(self._ttl_s)
            self._extend(sent_at, ttl_s)

    def _extend(self, sent_at: float, ttl_s: float) -> None:
        self._interval_s = ttl_s / 3
        self._renew_at = sent_at + self._interval_s
        if self._session is not None and self._session.is_valid(self._clock()):
            self._session.expires_at = sent_at + ttl_s
            if self._in_doubt:
                self._suspect_all()
            return
        if self._session is not None:
            self._session.lost.set()
        self._session = Session(self._lease_id, sent_at + ttl_s)
        self._suspect_all()
        self._watch_expiry(self._session)
        self._held.set()

    def _drop(self) -> None:
        """etcd no longer has the lease, nor any key under it."""
        _log.warning("the lease was lost and is replaced")
        self._lease_id = 0
        if self._session is not None:
            self._session.lost.set()
            self._session = None
        self._dirty.clear()

    def _suspect_all(self) -> None:
        """After an outage etcd may have come back with other contents: put everything again."""
        self._dirty.update(dict.fromkeys(self._attached))

    def _watch_expiry(self, session: Session) -> None:
        if session.lost.is_set():
            return
        left_s = session.expires_at - self._clock()
        if left_s > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(left_s, self._watch_expiry, session)
            return
        _log.warning("the lease was not renewed in time and counts as lost")
        session.lost.set()

    async def _write(self, keys: list[str]) -> None:
        # One at a time, or an older value could overtake a newer one.
        async with self._writing:
            for key in keys:
                if key not in self._dirty:
                    continue
                lease_id = self._lease_id
                if lease_id == 0:
                    return
                value = self._attached.get(key)
                try:
                    await self._write_one(key, value, lease_id)
                except LeaseNotFoundError:
                    if self._lease_id == lease_id:
                        self._drop()
                    raise
                except ForebayError as error:
                    if error.reason is not Reason.STORE_UNAVAILABLE:
                        self._refuse(key, value)
                    raise
                if self._lease_id == lease_id and self._attached.get(key) is value:
                    self._dirty.pop(key, None)

    async def _write_one(self, key: str, value: bytes | None, lease_id: int) -> None:
        if value is not None:
            await self._store.put(key, value, lease_id=lease_id)
        else:
            await self._store.commit(if_=[Condition.lease(key, lease_id)], then=[Op.delete(key)])

    def _refuse(self, key: str, value: bytes | None) -> None:
        """Give up what etcd will never accept, instead of trying it forever."""
        if self._attached.get(key) is value:
            self._attached.pop(key, None)
            self._dirty.pop(key, None)

    async def _stop(self) -> None:
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        if self._session is not None:
            self._session.lost.set()
            self._session = None
