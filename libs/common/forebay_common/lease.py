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
        self._renew_at = -math.inf
        self._lease_id = 0
        self._session: Session | None = None
        self._in_doubt = False
        self._attached: dict[str, bytes] = {}
        # Keys that may not be in etcd as wanted: with the attached value, or else deleted.
        self._dirty: dict[str, None] = {}
        self._refused: dict[str, ForebayError] = {}
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def open(cls, store: Store, ttl_s: float) -> Self:
        """A lease of at least `ttl_s` seconds (rounded up; etcd may raise it to its own least)."""
        return cls(store, ttl_s)

    async def __aenter__(self) -> Self:
        """Waits for the first attempt to get a lease, not for its success: etcd may be away."""
        assert self._task is None, "a lease is opened once"
        self._task = asyncio.create_task(self._run(), name="lease")
        try:
            while self._lease_id == 0 and not self._in_doubt:
                await self._moved.wait()
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
        """Wait for a valid session. STORE_UNAVAILABLE once the lease is closed."""
        while (session := self.session) is None:
            if self._closed:
                raise unavailable()
            await self._moved.wait()
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
        await self._settle(key)

    async def detach(self, key: str) -> None:
        """Delete an attached key, now or when etcd is back. One that is no longer under this lease
        is left alone."""
        self._attached.pop(key, None)
        await self._settle(key)

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

    async def _settle(self, key: str) -> None:
        if self._closed:
            return
        self._dirty[key] = None
        self._wake.set()
        while key in self._dirty and not self._in_doubt and not self._closed:
            await self._moved.wait()
        if (refusal := self._refused.pop(key, None)) is not None:
            raise refusal

    async def _run(self) -> None:
        backoff = self._store.backoff()
        while True:
            self._wake.clear()
            try:
                await self._renew()
                await self._write_dirty()
            except LeaseNotFoundError:
                self._drop()
                wait_s = backoff.next_s()
            except ForebayError as error:
                self._doubt(error)
                wait_s = backoff.next_s()
            # A bug here must not let the keys of a healthy process expire.
            except Exception as error:
                _log.exception("the lease's loop failed and goes on")
                self._doubt(error)
                wait_s = backoff.next_s()
            else:
                backoff.reset()
                wait_s = self._renew_at - self._clock()
            self._signal()
            try:
                async with asyncio.timeout(min(wait_s, self._interval_s)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _renew(self) -> None:
        sent_at = self._clock()
        if self._lease_id != 0:
            if not self._in_doubt and sent_at < self._renew_at:
                return
            ttl_s = await self._store.keep_lease_alive(self._lease_id, timeout_s=self._interval_s)
            if ttl_s > 0:
                self._extend(sent_at, ttl_s)
                return
            self._drop()
            sent_at = self._clock()
        self._lease_id, ttl_s = await self._store.grant_lease(self._ttl_s)
        self._extend(sent_at, ttl_s)

    def _extend(self, sent_at: float, ttl_s: float) -> None:
        self._interval_s = ttl_s / 3
        self._renew_at = sent_at + self._interval_s
        if self._in_doubt:
            _log.info("the lease is kept alive again")
            # etcd may have come back with older contents: put everything again.
            self._dirty.update(dict.fromkeys(self._attached))
            self._in_doubt = False
        session = self._session
        if session is not None and session.is_valid(self._clock()):
            session.expires_at = sent_at + ttl_s
            return
        self._lose()
        self._session = Session(self._lease_id, sent_at + ttl_s)
        self._watch_expiry(self._session)

    def _doubt(self, error: Exception) -> None:
        if not self._in_doubt:
            _log.warning("the lease cannot be kept alive: %s", error)
        self._in_doubt = True

    def _drop(self) -> None:
        """etcd no longer has the lease, nor any key under it."""
        _log.warning("the lease was lost and is replaced")
        self._lease_id = 0
        self._dirty = dict.fromkeys(self._attached)
        self._lose()

    def _lose(self) -> None:
        if self._session is not None:
            self._session.lost.set()
            self._session = None

    def _watch_expiry(self, session: Session) -> None:
        """Set `lost` when the time is up, also while a keep-alive is still waited for."""
        if session.lost.is_set():
            return
        left_s = session.expires_at - self._clock()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._watch_expiry, session)
            return
        _log.warning("the lease was not renewed in time and counts as lost")
        session.lost.set()

    async def _write_dirty(self) -> None:
        for key in list(self._dirty):
            if self._clock() >= self._renew_at:
                return
            value = self._attached.get(key)
            try:
                await self._write(key, value)
            except ForebayError as error:
                if error.reason is Reason.STORE_UNAVAILABLE:
                    raise
                # etcd will never take it, so it is given up, not tried forever.
                _log.error("etcd refuses the value of %s: %s", key, error)
                self._refused[key] = error
                if self._attached.get(key) is value:
                    self._attached.pop(key, None)
                    self._dirty.pop(key, None)
            else:
                if self._attached.get(key) is value:
                    self._dirty.pop(key, None)
            self._signal()

    async def _write(self, key: str, value: bytes | None) -> None:
        if value is not None:
            await self._store.put(key, value, lease_id=self._lease_id)
        else:
            ours = Condition.lease(key, self._lease_id)
            await self._store.commit(if_=[ours], then=[Op.delete(key)])

    def _signal(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _stop(self) -> None:
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._lose()
        self._signal()
