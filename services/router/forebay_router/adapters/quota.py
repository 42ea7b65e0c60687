"""Counts what tenants use, exactly over all routers; the rules are `core/quota.py`'s.

A router whose account it is decides at once. Another asks, with what came in the same turn of its
loop in one call, and at most one call at a time to each router.

Whoever cannot reach more than half of the routers may be cut off from the holder, and so neither
takes accounts over nor trusts those it holds: it lets in its own part of the limits, and tells what
that was when it is reached again. Two routers that both hold an account can thus let in at most one
bucket each, for as long as it takes to notice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import grpc
from forebay.router.v1 import quota_service_pb2 as pb
from forebay.router.v1 import quota_service_pb2_grpc as rpc
from forebay_common.channel import ChannelPool
from forebay_common.discovery import Instance, Keys, View
from forebay_common.errors import ForebayError, Reason
from forebay_common.metadata import Metadata
from forebay_common.store import Store

from forebay_router.core.access import Tenant
from forebay_router.core.meter import Limit, Meter, Refusal, headers, reserve
from forebay_router.core.quota import Account, Books, rank, refusal_of

_log = logging.getLogger(__name__)
PEER = "peer"
"""What is spoken at the address under which routers reach one another."""
_MAX_MESSAGE_BYTES = 4 << 20
_REDIRECTS = 3
_IDLE_EVERY_S = 60.0
_TOLD_MOST = 2048


class Away(StrEnum):
    """What becomes of requests while nobody can be asked."""

    SHARE = "share"
    """An equal part of the limits is let in by each router."""
    REFUSE = "refuse"
    """They are refused."""
    ADMIT = "admit"
    """They are let in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How accounts are kept."""

    timeout_s: float = 0.25
    """Longest wait for another router's word."""
    away: Away = Away.SHARE
    tick_s: float = 1.0
    """Between two looks at who can be reached."""
    streams_ttl_s: float = 10.0
    """After so long without a word from a router its streams count no more."""
    left_s: float = 30.0
    """How long a router that left is still asked what it knows."""
    batch_most: int = 512
    """Reservations in one call."""


@dataclasses.dataclass(slots=True, eq=False)
class Hold:
    """What one request was let in with, until it ends."""

    account: Account
    meters: Sequence[Meter]
    tokens: int
    answer: Metadata
    """Headers for the caller: what is left."""
    alone: bool = False
    """It was let in without its account's holder."""


@dataclasses.dataclass(slots=True, eq=False)
class _Item:
    """A reservation that waits for another router's word."""

    account: Account
    meters: Sequence[Meter]
    tokens: int
    heard: asyncio.Future[Refusal | _Elsewhere | None]


class _Elsewhere:
    """The account is not where it was thought to be, or cannot be reached there."""


_ELSEWHERE = _Elsewhere()


@dataclasses.dataclass(slots=True, eq=False)
class _Link:
    """This router's calls to another."""

    waiting: deque[_Item] = dataclasses.field(default_factory=deque)
    owing: dict[str, Account] = dataclasses.field(default_factory=dict)
    batch: int = 0
    heard_batch: int = 0
    task: asyncio.Task[None] | None = None


class Figures:
    """What is counted, as plain numbers."""

    def __init__(self) -> None:
        self.reservations: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By where it was decided (`here`, `elsewhere`, `alone`), and how (`granted`, the limit
        that was used up, or `too_large`)."""
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By method, and result (`ok`, `failed`)."""
        self.takeovers = 0
        self.streams_expired = 0


class Quota:
    """The limits of all tenants, as one router sees to them."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        router_id: str,
        session: str,
        options: Options,
        *,
        token: Callable[[], Metadata] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            store: etcd.
            keys: where routers announce themselves.
            router_id: under which this one does.
            session: names this run of it; no restart repeats it.
            options: how accounts are kept.
            token: metadata by which other routers know this one as a router.
            clock: monotonic seconds.
        """
        self.figures = Figures()
        self._view = View(store, keys.instances_of("router"), Instance.decode)
        self._id = router_id
        self._address = ""
        self._options = options
        self._token = token
        self._clock = clock
        self._books = Books(session)
        self._channels = ChannelPool(max_message_bytes=_MAX_MESSAGE_BYTES)
        self._members: dict[str, str] = {}
        """Addresses of the routers in view, this one with them once it is."""
        self._left: dict[str, tuple[str, float]] = {}
        """Addresses of those that left, and until when they are asked."""
        self._down: set[str] = set()
        self._quorate = True
        self._owners: dict[str, str] = {}
        """Who has the best right to an account; found anew when who can be reached changes."""
        self._successors: dict[str, str] = {}
        """Who has the best right to an account after this router."""
        self._hints: dict[str, tuple[str, str]] = {}
        """Where an account went, by what routers said; forgotten when who can be reached
        changes."""
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._outranked: dict[str, tuple[str, str]] = {}
        self._links: dict[str, _Link] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle_at_s = clock() + _IDLE_EVERY_S
        self._closing = False

    # --- For those who let requests in ---------------------------------------------------------

    def meters_for(self, tenant: Tenant, model: str) -> tuple[Account, Sequence[Meter]]:
        """What counts a request of a tenant for a model, by the name that was asked for. Without
        any meter it is not limited."""
        account = self._books.accounts.get(tenant.name)
        if account is None:
            account = self._books.account(tenant.name)
        return account, account.meters_for(tenant, model, self._clock())

    def decides(self, account: Account) -> bool:
        """Whether `reserve` answers at once, because the account is held here."""
        return account.held and self._quorate

    def reserve(
        self, account: Account, meters: Sequence[Meter], tokens: int
    ) -> Hold | Awaitable[Hold]:
        """Let a request in that may use so many tokens, by meters of `meters_for`.

        Answers at once where the account is held here. A wait that is cancelled gives back what it
        got. What is returned must be settled or released once.

        Raises:
            ForebayError: RATE_LIMITED with the time to wait; INVALID_ARGUMENT or PERMISSION_DENIED
                where no time would help; STORE_UNAVAILABLE where nobody could be asked and the
                options say to refuse. The awaitable may raise them, too.
        """
        for meter in meters:
            if tokens > meter.token_burst or meter.request_burst < 1 or not meter.concurrent:
                self.figures.reservations["here", "too_large"] += 1
                raise _never(meter, tokens)
        if not account.held or not self._quorate:
            return self._reserve_elsewhere(account, meters, tokens)
        now = self._clock()
        refusal = reserve(meters, tokens, now)
        if refusal is not None:
            raise self._refused(refusal, meters, now, "here")
        for meter in meters:
            meter.begin()
        return self._hold(account, meters, tokens, now, "here")

    def settle(self, hold: Hold, used_tokens: int) -> None:
        """End a request that was sent, and used so many tokens."""
        self._end(hold, 0, hold.tokens - used_tokens)

    def release(self, hold: Hold) -> None:
        """End a request that was never sent: it costs nothing."""
        self._end(hold, 1, hold.tokens)

    # --- The life of it ------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Accounts that are held here."""
        return sum(account.held for account in list(self._books.accounts.values()))

    @property
    def accounts(self) -> int:
        """Accounts of which something is known here."""
        return len(self._books.accounts)

    @property
    def routers(self) -> int:
        """Routers in view, this one with them."""
        return len(self._members)

    @property
    def unreachable(self) -> int:
        """Routers in view that do not answer."""
        return len(self._down)

    @property
    def is_quorate(self) -> bool:
        """Whether more than half of the routers in view can be reached, this one with them."""
        return self._quorate

    def announce(self, address: str) -> None:
        """Where other routers reach this one, `host:port`."""
        self._address = address

    async def run(self) -> None:
        """Follow the routers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._view.run())
            tasks.create_task(self._follow())
            tasks.create_task(self._tick())

    async def close(self) -> None:
        """Tell what is owed, within the timeout, and stop."""
        self._closing = True
        self._send_owed(renewing=False)
        tasks = [link.task for link in self._links.values() if link.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._options.timeout_s)
        for task in (*tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        await self._channels.close()

    # --- Reservations --------------------------------------------------------------------------

    def _hold(
        self, account: Account, meters: Sequence[Meter], tokens: int, now: float, where: str
    ) -> Hold:
        self.figures.reservations[where, "granted"] += 1
        return Hold(account, meters, tokens, headers(meters, now))

    def _refused(
        self, refusal: Refusal, meters: Sequence[Meter], now: float, where: str
    ) -> ForebayError:
        self.figures.reservations[where, refusal.limit.name.lower()] += 1
        meter = meters[refusal.scope]
        wait_s = refusal.wait_s
        if math.isinf(wait_s):
            return _never(meter, 0)
        return ForebayError(
            Reason.RATE_LIMITED,
            _MESSAGES[refusal.limit] % _of(meter),
            retry_after_s=wait_s,
            answer=(*headers(meters, now), ("retry-after-ms", str(math.ceil(wait_s * 1000)))),
        )

    async def _reserve_elsewhere(
        self, account: Account, meters: Sequence[Meter], tokens: int
    ) -> Hold:
        account.asking += 1
        try:
            hold = await self._reserve_at_holder(account, meters, tokens)
        finally:
            account.asking -= 1
        return hold if hold is not None else self._reserve_alone(account, meters, tokens)

    async def _reserve_at_holder(
        self, account: Account, meters: Sequence[Meter], tokens: int
    ) -> Hold | None:
        """None where nobody can be asked."""
        until = self._clock() + self._options.timeout_s
        for _ in range(_REDIRECTS):
            if account.held:
                if not self._quorate:
                    return None
                now = self._clock()
                refusal = reserve(meters, tokens, now)
                if refusal is not None:
                    raise self._refused(refusal, meters, now, "here")
                for meter in meters:
                    meter.begin()
                return self._hold(account, meters, tokens, now, "here")
            owner, _address = self._owner(account.name)
            try:
                async with asyncio.timeout(until - self._clock()):
                    if owner == self._id:
                        if not self._quorate:
                            return None
                        await self._take_over(account.name)
                        continue
                    heard = await self._ask(owner, account, meters, tokens)
            except TimeoutError:
                return None
            if heard is _ELSEWHERE:
                continue
            now = self._clock()
            if isinstance(heard, Refusal):
                raise self._refused(heard, meters, now, "elsewhere")
            return self._hold(account, meters, tokens, now, "elsewhere")
        return None

    async def _ask(
        self, owner: str, account: Account, meters: Sequence[Meter], tokens: int
    ) -> Refusal | _Elsewhere | None:
        heard = asyncio.get_running_loop().create_future()
        self._link(owner).waiting.append(_Item(account, meters, tokens, heard))
        self._start(owner)
        try:
            return await asyncio.shield(heard)
        except asyncio.CancelledError:
            # Whoever asked has gone on without it, or is gone: what still comes is given back.
            heard.add_done_callback(lambda done: self._unwanted(account, meters, tokens, done))
            raise

    def _unwanted(
        self,
        account: Account,
        meters: Sequence[Meter],
        tokens: int,
        heard: asyncio.Future[Refusal | _Elsewhere | None],
    ) -> None:
        if not heard.cancelled() and heard.result() is None:
            for meter in meters:
                meter.end()
            self._give_back(account, meters, 1, tokens)

    def _reserve_alone(self, account: Account, meters: Sequence[Meter], tokens: int) -> Hold:
        now = self._clock()
        away = self._options.away
        if away is Away.REFUSE:
            self.figures.reservations["alone", "away"] += 1
            raise ForebayError(
                Reason.STORE_UNAVAILABLE,
                "The tenant's limits cannot be checked now.",
                retry_after_s=1,
            )
        if away is Away.SHARE:
            routers = max(1, len(self._members))
            parts = []
            for meter in meters:
                part = account.parts.get(meter.name)
                if part is None:
                    part = account.parts[meter.name] = meter.part(routers, now)
                part.streams = meter.own
                parts.append(part)
            # A request that is larger than a part passes when the part is full.
            least = min((part.token_burst for part in parts), default=math.inf)
            refusal = reserve(parts, min(tokens, least), now)
            if refusal is not None:
                raise self._refused(refusal, parts, now, "alone")
            if tokens > least:
                for part in parts:
                    part.tokens -= tokens - least
        for meter in meters:
            meter.begin()
        hold = self._hold(account, meters, tokens, now, "alone")
        hold.alone = True
        return hold

    def _end(self, hold: Hold, requests: int, tokens: int) -> None:
        for meter in hold.meters:
            meter.end()
        if hold.alone:
            # Its holder was never asked: what it used is still to be taken off there.
            now = self._clock()
            for meter in hold.meters:
                part = hold.account.parts.get(meter.name)
                if part is not None:
                    part.give_back(requests, tokens, now)
            requests, tokens = requests - 1, tokens - hold.tokens
        self._give_back(hold.account, hold.meters, requests, tokens)

    def _give_back(
        self, account: Account, meters: Sequence[Meter], requests: int, tokens: int
    ) -> None:
        if account.held:
            if requests or tokens:
                now = self._clock()
                for meter in meters:
                    meter.give_back(requests, tokens, now)
            return
        for meter in meters:
            if requests or tokens or meter.limits.concurrent is not None:
                account.owe(meter.name, requests, tokens)
        if account.back:
            owner, _address = self._owner(account.name)
            if owner != self._id:
                self._link(owner).owing[account.name] = account
                self._start(owner)

    # --- Calls to other routers ----------------------------------------------------------------

    def _link(self, router_id: str) -> _Link:
        link = self._links.get(router_id)
        if link is None:
            link = self._links[router_id] = _Link()
        return link

    def _start(self, router_id: str) -> None:
        link = self._links[router_id]
        if link.task is None:
            link.task = asyncio.get_running_loop().create_task(
                self._talk(router_id, link), name=f"quota {router_id}"
            )

    async def _talk(self, router_id: str, link: _Link) -> None:
        try:
            # What comes in the same turn of the loop goes together.
            await asyncio.sleep(0)
            while True:
                items = [
                    link.waiting.popleft()
                    for _ in range(min(len(link.waiting), self._options.batch_most))
                ]
                accounts, link.owing = link.owing, {}
                await self._exchange(router_id, link, items, accounts)
                if not link.waiting and not link.owing:
                    return
        finally:
            link.task = None
            for item in link.waiting:
                _set(item.heard, _ELSEWHERE)
            link.waiting.clear()

    async def _exchange(
        self, router_id: str, link: _Link, items: Sequence[_Item], owing: Mapping[str, Account]
    ) -> None:
        by_account: dict[str, tuple[Account, list[_Item]]] = {
            name: (account, []) for name, account in owing.items() if not account.held
        }
        for item in items:
            by_account.setdefault(item.account.name, (item.account, []))[1].append(item)
        parts = [
            self._books.part(account, [(item.meters, item.tokens) for item in asked])
            for account, asked in by_account.values()
        ]
        link.batch += 1
        request = pb.ExchangeRequest(
            session=self._books.session,
            batch=link.batch,
            heard_batch=link.heard_batch,
            tenants=parts,
        )
        address = self._address_of(router_id)
        try:
            if address is None:
                raise ForebayError(Reason.NO_REPLICA, "The router is gone.")
            response: pb.ExchangeResponse = await rpc.QuotaServiceStub(
                self._channels.get(address)
            ).Exchange(request, timeout=self._options.timeout_s, metadata=self._token())
        except (grpc.aio.AioRpcError, ForebayError, asyncio.CancelledError) as error:
            self.figures.calls["Exchange", "failed"] += 1
            for item in items:
                _set(item.heard, _ELSEWHERE)
            if isinstance(error, asyncio.CancelledError):
                raise
            self._mark_down(router_id, error)
            return
        self.figures.calls["Exchange", "ok"] += 1
        link.heard_batch = link.batch
        now = self._clock()
        for (account, asked), part, answer in zip(
            by_account.values(), parts, response.tenants, strict=True
        ):
            if answer.moved:
                if answer.moved_to and answer.moved_to != self._id:
                    self._hints[account.name] = (answer.moved_to, answer.moved_to_address)
                for item in asked:
                    _set(item.heard, _ELSEWHERE)
                continue
            self._books.learn(account, part, answer, now)
            for item, verdict in zip(asked, answer.verdicts, strict=True):
                refusal = _verdict(item, part, verdict)
                if refusal is None:
                    # Before the next batch says how many there are.
                    for meter in item.meters:
                        meter.begin()
                _set(item.heard, refusal)
            if account.back:
                link.owing[account.name] = account

    async def _recall(self, router_id: str, address: str, tenants: Sequence[str]) -> Any:
        """A router's answer, None where there is none. Without tenants it is only seen to live."""
        try:
            response: pb.RecallResponse = await rpc.QuotaServiceStub(
                self._channels.get(address)
            ).Recall(
                pb.RecallRequest(router_id=self._id, address=self._address, tenants=tenants),
                timeout=self._options.timeout_s / 2,
                metadata=self._token(),
            )
        except grpc.aio.AioRpcError as error:
            self.figures.calls["Recall", "failed"] += 1
            self._left.pop(router_id, None)
            self._mark_down(router_id, error)
            return None
        self.figures.calls["Recall", "ok"] += 1
        self._mark_up(router_id)
        now = self._clock()
        for told in response.told:
            self._books.hear(told, now)
        return response

    # --- Whose an account is -------------------------------------------------------------------

    def _owner(self, tenant: str) -> tuple[str, str]:
        """The router to ask for an account: where it went, else who has the best right to it."""
        hint = self._hints.get(tenant)
        if hint is not None and hint[0] not in self._down:
            return hint
        owner = self._owners.get(tenant)
        if owner is None:
            able = [each for each in self._members if each not in self._down]
            owner = max(able, key=lambda each: rank(tenant, each), default=self._id)
            self._owners[tenant] = owner
        return owner, self._members.get(owner, self._address)

    def _address_of(self, router_id: str) -> str | None:
        address = self._members.get(router_id)
        if address is None:
            address = next((hint[1] for hint in self._hints.values() if hint[0] == router_id), None)
        if address is None and router_id in self._left:
            address = self._left[router_id][0]
        return address or None

    def _others(self) -> dict[str, str]:
        """Routers that may know something: those in view, and those that left a moment ago."""
        now = self._clock()
        self._left = {key: value for key, value in self._left.items() if value[1] > now}
        others = {key: address for key, (address, _) in self._left.items()}
        others.update(self._members)
        others.pop(self._id, None)
        return others

    async def _take_over(self, tenant: str) -> None:
        """Have an account here, if nobody with a better right takes it meanwhile."""
        pending = self._pending.get(tenant)
        if pending is None:
            task = asyncio.get_running_loop().create_task(self._collect(tenant))
            pending = self._pending[tenant] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.shield(pending)

    async def _collect(self, tenant: str) -> None:
        try:
            others = self._others()
            answers = await asyncio.gather(
                *(
                    self._recall(key, address, [tenant])
                    for key, address in others.items()
                    if key not in self._down
                )
            )
            if not self._quorate:
                return
            recalled = [answer.accounts[0] for answer in answers if answer is not None]
            better = self._outranked.get(tenant)
            if better is not None:
                self._hints[tenant] = better
                return
            if any(each.refused for each in recalled):
                return
            self._books.take_over(tenant, recalled, self._clock())
            self._hints.pop(tenant, None)
            self.figures.takeovers += 1
        finally:
            self._outranked.pop(tenant, None)
            self._pending.pop(tenant, None)

    def _mark_down(self, router_id: str, error: Exception) -> None:
        if router_id in self._down or router_id not in self._members:
            return
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
        _log.warning("router %s cannot be asked for quota: %s", router_id, code)
        self._down.add(router_id)
        self._changed()

    def _mark_up(self, router_id: str) -> None:
        if router_id in self._down:
            _log.info("router %s can be asked for quota again", router_id)
            self._down.discard(router_id)
            self._changed()

    def _changed(self) -> None:
        self._owners.clear()
        self._successors.clear()
        for account in self._books.accounts.values():
            account.told = 0
        self._hints.clear()
        members = len(self._members)
        was, self._quorate = self._quorate, 2 * (members - len(self._down)) > members or not members
        if was != self._quorate:
            _log.warning(
                "limits are %s", "exact again" if self._quorate else "kept by this router alone"
            )
            for account in self._books.accounts.values():
                account.parts.clear()

    # --- Loops ---------------------------------------------------------------------------------

    async def _follow(self) -> None:
        await self._view.ready()
        while True:
            revision = self._view.revision
            self._reconcile()
            await self._view.changed(revision)

    def _reconcile(self) -> None:
        listed = {
            each.instance_id: each.addresses[PEER]
            for each in self._view.entries.values()
            if PEER in each.addresses
        }
        if listed == self._members:
            return
        until = self._clock() + self._options.left_s
        for router_id, address in self._members.items():
            if listed.get(router_id) != address:
                self._left[router_id] = (address, until)
                self._down.discard(router_id)
        for router_id in listed:
            self._left.pop(router_id, None)
        self._members = listed
        self._channels.retain(
            [*listed.values(), *(address for address, _ in self._left.values())],
            grace_s=self._options.timeout_s,
        )
        for router_id in [each for each in self._links if each not in listed]:
            if self._links[router_id].task is None:
                del self._links[router_id]
        self._changed()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            # Whatever is wrong with one turn, the next must come.
            try:
                await self._look_round()
            except Exception:
                _log.exception("a look at the routers failed")

    async def _look_round(self) -> None:
        """See who can be reached; give accounts to those with a better right; tell what is owed,
        and which streams go on; free streams of those who told nothing."""
        now = self._clock()
        if not self._books.accounts and not self._down:
            return
        others = [(key, each) for key, each in self._members.items() if key != self._id]
        await asyncio.gather(*(self._recall(key, address, ()) for key, address in others))
        for account in self._books.accounts.values():
            if account.held and self._quorate and self._owner(account.name)[0] != self._id:
                self._books.release(account)
        self._send_owed(renewing=True)
        for router_id, link in self._links.items():
            # What was let in there with an answer that was lost is undone by another batch.
            in_doubt = link.batch != link.heard_batch and router_id not in self._down
            if in_doubt and self._address_of(router_id) is not None:
                self._start(router_id)
        now = self._clock()
        self.figures.streams_expired += self._books.expire(now, self._options.streams_ttl_s)
        if now >= self._idle_at_s:
            self._idle_at_s = now + _IDLE_EVERY_S
            self._books.forget_idle(now, self._pending)

    def _send_owed(self, *, renewing: bool) -> None:
        for account in self._books.accounts.values():
            if account.held or not (account.owes or (renewing and account.renews)):
                continue
            owner, _address = self._owner(account.name)
            if owner != self._id:
                self._link(owner).owing[account.name] = account
                self._start(owner)
            elif self._quorate and account.name not in self._pending and not self._closing:
                task = asyncio.get_running_loop().create_task(self._take_over(account.name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    # --- For other routers ---------------------------------------------------------------------

    async def exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeResponse:
        """See the contract.

        Raises:
            ForebayError: STALE_FENCE.
        """
        session, batch = request.session, request.batch
        if not self._books.open_batch(session, batch, request.heard_batch, self._clock()):
            raise _stale()
        for part in request.tenants:
            if not self._holds(part.tenant):
                await self._claim(part.tenant)
        if not self._books.is_newest(session, batch):
            raise _stale()
        now = self._clock()
        response = pb.ExchangeResponse()
        for part in request.tenants:
            if self._holds(part.tenant) and self._quorate:
                response.tenants.append(self._books.answer(session, part, now))
                continue
            owner, address = self._owner(part.tenant)
            moved = response.tenants.add(moved=True)
            if owner != self._id:
                moved.moved_to, moved.moved_to_address = owner, address
        return response

    def _holds(self, tenant: str) -> bool:
        account = self._books.accounts.get(tenant)
        return account is not None and account.held

    async def _claim(self, tenant: str) -> None:
        """Have an account here where it is this router's to have. Who asks may know better who
        lives: the one with the best right is tried first."""
        for _ in range(_REDIRECTS):
            owner, address = self._owner(tenant)
            if owner == self._id:
                if self._quorate:
                    await self._take_over(tenant)
                return
            if await self._recall(owner, address, ()) is not None:
                return

    def recall(self, request: pb.RecallRequest) -> pb.RecallResponse:
        """See the contract."""
        now = self._clock()
        response = pb.RecallResponse()
        if not request.tenants:
            self._tell(request.router_id, response, now)
        for tenant in request.tenants:
            if tenant in self._pending:
                if rank(tenant, self._id) > rank(tenant, request.router_id):
                    response.accounts.add(refused=True, session=self._books.session)
                    continue
                self._outranked[tenant] = (request.router_id, request.address)
            response.accounts.append(self._books.give(tenant, now))
            if request.router_id != self._id:
                self._hints[tenant] = (request.router_id, request.address)
        return response

    def _tell(self, router_id: str, response: pb.RecallResponse, now: float) -> None:
        """What a router has to know of accounts that are held here, should this router die."""
        for account in self._books.accounts.values():
            if account.held and self._next(account.name) == router_id:
                told = self._books.tell(account, now)
                if told is not None:
                    response.told.append(told)
                    if len(response.told) >= _TOLD_MOST:
                        return

    def _next(self, tenant: str) -> str:
        known = self._successors.get(tenant)
        if known is None:
            others = [each for each in self._members if each not in (self._id, *self._down)]
            known = max(others, key=lambda each: rank(tenant, each), default="")
            self._successors[tenant] = known
        return known


def _set(heard: asyncio.Future[Any], value: Any) -> None:
    if not heard.done():
        heard.set_result(value)


def _verdict(item: _Item, part: pb.TenantBatch, verdict: pb.QuotaVerdict) -> Refusal | None:
    if verdict.limit == pb.QUOTA_LIMIT_UNSPECIFIED:
        return None
    name = part.scopes[verdict.scope].name
    scope = next(index for index, meter in enumerate(item.meters) if meter.name == name)
    return refusal_of(verdict, scope)


_MESSAGES = {
    Limit.REQUESTS: "Requests per minute of the tenant%s are used up.",
    Limit.TOKENS: "Tokens per minute of the tenant%s are used up.",
    Limit.CONCURRENT: "As many requests of the tenant%s as may run at once do.",
}


def _of(meter: Meter) -> str:
    return f" for {meter.name}" if meter.name else ""


def _never(meter: Meter, tokens: int) -> ForebayError:
    if meter.request_burst < 1 or not meter.concurrent or not meter.token_burst:
        return ForebayError(
            Reason.PERMISSION_DENIED, f"The tenant may send no requests{_of(meter)}."
        )
    return ForebayError(
        Reason.INVALID_ARGUMENT,
        f"The request may use {tokens} tokens, but the tenant's limit{_of(meter)} lets at most "
        f"{int(meter.token_burst)} pass at once; ask for fewer.",
        param="max_tokens",
    )


def _stale() -> ForebayError:
    return ForebayError(Reason.STALE_FENCE, "A later batch came first.")
