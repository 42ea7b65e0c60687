"""The accounts of tenants, as one router keeps them: those it holds, and what it knows of others.

Each tenant's account is held by one router, which alone lets requests through. The others ask it,
and remember its levels as they last heard them. Whoever recalls an account gets it from its holder;
where that is gone, the newest memory among all routers is the holder's last word to any of them.
What it let through for its own callers after that is forgotten, so it tells whoever would be next
every now and then.

What a router gives back travels as sums under a number that its receiver applies once. How many
requests it has in flight travels as the whole number, so that a count that went wrong is right
again with the next message.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence

from forebay.router.v1 import quota_service_pb2 as pb

from forebay_router.core.access import Limits, Tenant
from forebay_router.core.meter import Limit, Meter, Refusal, reserve

_LIMIT_FIELDS = (
    "requests_per_min",
    "tokens_per_min",
    "concurrent",
    "request_burst",
    "token_burst",
)


class Account:
    """One tenant's account."""

    __slots__ = (
        "asking",
        "back",
        "chosen",
        "held",
        "meters",
        "name",
        "number",
        "parts",
        "record",
        "sent",
        "settlements",
        "told",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.meters: dict[str, Meter] = {}
        self.held = False
        """Whether this router holds it."""
        self.asking = 0
        """Requests of this router that wait to be let in."""
        self.record: Tenant | None = None
        """Whose limits `chosen` was made of."""
        self.chosen: dict[str, tuple[Meter, ...]] = {}
        """The meters of each model that has limits of its own, and by an empty name of the rest."""
        self.back: dict[str, list[float]] = {}
        """Requests and tokens to give back, by scope, not yet sent."""
        self.sent: dict[str, list[float]] | None = None
        """What was sent under `number`, until its receiver has said so."""
        self.number = 0
        self.settlements: dict[str, int] = {}
        """The last number applied here, by session."""
        self.told = 0
        """The sum of its meters' versions when somebody was told of it."""
        self.parts: dict[str, Meter] = {}
        """This router's part of each scope, while nobody can be asked."""

    @property
    def owes(self) -> bool:
        """Whether its holder has to be told something."""
        return bool(self.back) or self.sent is not None

    @property
    def renews(self) -> bool:
        """Whether its holder has to hear of this router's streams now and then."""
        return any(meter.own and meter.limits.concurrent is not None for meter in self.all_meters())

    def all_meters(self) -> Iterable[Meter]:
        """Of all scopes."""
        return self.meters.values()

    def meters_for(self, tenant: Tenant, model: str, now: float) -> tuple[Meter, ...]:
        """The meters that count a request of a model, by the limits of a tenant's record; none
        where nothing is limited. Of `name@version` the name counts."""
        if self.record is not tenant:
            self.record = tenant
            self.chosen.clear()
        name = model.partition("@")[0]
        # Callers make names up: what has no limits of its own is not remembered by its name.
        if name not in tenant.model_limits:
            name = ""
        meters = self.chosen.get(name)
        if meters is not None:
            return meters
        found = []
        if tenant.limits.limit_anything:
            found.append(self._meter("", tenant.limits, tenant.revision, now))
        if name and tenant.model_limits[name].limit_anything:
            found.append(self._meter(name, tenant.model_limits[name], tenant.revision, now))
        meters = self.chosen[name] = tuple(found)
        return meters

    def _meter(self, name: str, limits: Limits, revision: int, now: float) -> Meter:
        meter = self.meters.get(name)
        if meter is None:
            meter = self.meters[name] = Meter(name, limits, revision, now)
        else:
            meter.follow(limits, revision, now)
        return meter

    def owe(self, name: str, requests: float, tokens: float) -> None:
        """Note what its holder has to give back."""
        back = self.back.get(name)
        if back is None:
            self.back[name] = [requests, tokens]
        else:
            back[0] += requests
            back[1] += tokens

    def follow(self, scope: pb.QuotaScope, now: float) -> Meter:
        """The meter of a scope that another router speaks of."""
        return self._meter(scope.name, limits_from(scope.limits), scope.limits.revision, now)


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """Another router's run, as a holder of accounts knows it."""

    heard_s: float
    batch: int = 0
    grants: list[tuple[Account, list[Meter], int]] = dataclasses.field(default_factory=list)
    """What its last batch was let through, in case the answer is lost."""


class Books:
    """All accounts of one router."""

    def __init__(self, session: str) -> None:
        """`session` names this run of the router; no restart repeats it."""
        self.session = session
        self.accounts: dict[str, Account] = {}
        self.sessions: dict[str, Session] = {}
        self._numbers = 0

    def account(self, tenant: str) -> Account:
        """A tenant's account."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account(tenant)
        return account

    # --- As the holder -------------------------------------------------------------------------

    def open_batch(self, session: str, batch: int, heard_batch: int, now: float) -> bool:
        """Begin with a batch: undo what the last one was let through, where its answer was lost.

        Returns:
            False where a later one came first.
        """
        known = self.sessions.get(session)
        if known is None:
            known = self.sessions[session] = Session(now)
        if batch <= known.batch:
            return False
        if known.batch != heard_batch:
            for account, meters, tokens in known.grants:
                if account.held:
                    for meter in meters:
                        meter.give_back(1, tokens, now)
        known.grants = []
        known.batch = batch
        known.heard_s = now
        return True

    def is_newest(self, session: str, batch: int) -> bool:
        """Whether no later batch of a session has come."""
        known = self.sessions.get(session)
        return known is not None and known.batch == batch

    def answer(self, session: str, part: pb.TenantBatch, now: float) -> pb.TenantAnswer:
        """Do what one tenant's part of a batch asks. The account must be held."""
        account = self.accounts[part.tenant]
        meters = [account.follow(scope, now) for scope in part.scopes]
        applies = part.settlement > account.settlements.get(session, 0)
        if applies:
            account.settlements[session] = part.settlement
        for scope, meter in zip(part.scopes, meters, strict=True):
            if applies and (scope.requests_back or scope.tokens_back):
                meter.give_back(scope.requests_back, scope.tokens_back, now)
            meter.note_streams(session, scope.streams)
        answer = pb.TenantAnswer()
        grants = self.sessions[session].grants
        for reservation in part.reservations:
            asked = [meters[index] for index in reservation.scopes]
            refusal = reserve(asked, reservation.tokens, now)
            if refusal is not None:
                answer.verdicts.add(
                    limit=refusal.limit.value,
                    scope=reservation.scopes[refusal.scope],
                    wait_s=refusal.wait_s,
                )
                continue
            for meter in asked:
                meter.note_streams(session, meter.others.get(session, 0) + 1)
            grants.append((account, asked, reservation.tokens))
            answer.verdicts.add()
        answer.levels.extend(_level(meter, now) for meter in meters)
        return answer

    def give(self, tenant: str, now: float) -> pb.RecalledAccount:
        """Let an account go, with all that is known of it."""
        account = self.accounts.get(tenant)
        recalled = pb.RecalledAccount(session=self.session)
        if account is None:
            return recalled
        recalled.levels.extend(_level(meter, now) for meter in account.all_meters())
        if account.held:
            recalled.held = True
            for session, number in account.settlements.items():
                recalled.settlements[session] = number
        self.release(account)
        return recalled

    def release(self, account: Account) -> None:
        """Hold an account no longer. Its levels are remembered."""
        account.held = False
        account.settlements.clear()
        for meter in account.all_meters():
            meter.others.clear()
            meter.streams = meter.own

    def tell(self, account: Account, now: float) -> pb.ToldAccount | None:
        """A held account's levels, for whoever would be next to hold it; None where nothing has
        changed since."""
        changes = sum(meter.version for meter in account.all_meters())
        if changes == account.told:
            return None
        account.told = changes
        return pb.ToldAccount(
            tenant=account.name, levels=[_level(meter, now) for meter in account.all_meters()]
        )

    def hear(self, told: pb.ToldAccount, now: float) -> None:
        """Remember what an account's holder has told."""
        account = self.account(told.tenant)
        if not account.held:
            self._remember(account, told.levels, now)

    def take_over(self, tenant: str, recalled: Sequence[pb.RecalledAccount], now: float) -> Account:
        """Hold an account from now on, from what all routers knew of it.

        What its holder gave up goes before what others remember, and of memories the newest.
        """
        account = self.account(tenant)
        newest: dict[str, tuple[bool, int, float, pb.QuotaLevel]] = {}
        for each in recalled:
            for session, number in each.settlements.items():
                if number > account.settlements.get(session, 0):
                    account.settlements[session] = number
            for level in each.levels:
                rank = (each.held, level.version, -level.tokens, level)
                if level.name not in newest or rank[:3] > newest[level.name][:3]:
                    newest[level.name] = rank
        for name, (was_held, version, _, level) in newest.items():
            meter = account.meters.get(name)
            if meter is None:
                limits = limits_from(level.limits)
                meter = Meter(name, limits, level.limits.revision, now)
                account.meters[name] = meter
            if was_held or version > meter.version:
                _read(meter, level, now)
        for each in recalled:
            for level in each.levels:
                meter = account.meters[level.name]
                meter.note_streams(each.session, level.streams)
                if each.session not in self.sessions and level.streams:
                    self.sessions[each.session] = Session(now)
        for meter in account.all_meters():
            meter.version += 1
        account.held = True
        account.parts.clear()
        sent, account.sent = account.sent, None
        if sent is not None and account.number > account.settlements.get(self.session, 0):
            self._apply(account, sent, now)
        back, account.back = account.back, {}
        self._apply(account, back, now)
        return account

    def _apply(self, account: Account, back: Mapping[str, Sequence[float]], now: float) -> None:
        for name, (requests, tokens) in back.items():
            meter = account.meters.get(name)
            if meter is not None:
                meter.give_back(requests, tokens, now)

    def expire(self, now: float, ttl_s: float) -> int:
        """Free the streams of sessions that were not heard for `ttl_s`. Returns how many."""
        gone = [name for name, each in self.sessions.items() if each.heard_s + ttl_s <= now]
        for name in gone:
            del self.sessions[name]
        if not gone:
            return 0
        freed = 0
        for account in self.accounts.values():
            if not account.held:
                continue
            for name in gone:
                account.settlements.pop(name, None)
                for meter in account.all_meters():
                    freed += meter.others.get(name, 0)
                    meter.note_streams(name, 0)
        return freed

    def forget_idle(self, now: float, busy: Container[str]) -> None:
        """Drop accounts that are as good as new, but for busy ones."""
        for name, account in list(self.accounts.items()):
            if (
                name not in busy
                and not account.owes
                and all(meter.is_idle(now) for meter in account.all_meters())
            ):
                del self.accounts[name]

    # --- As one who asks -----------------------------------------------------------------------

    def part(
        self, account: Account, reservations: Sequence[tuple[Sequence[Meter], int]]
    ) -> pb.TenantBatch:
        """What to send to an account's holder: what is owed, streams, and reservations (meters and
        tokens of each)."""
        if account.sent is None and account.back:
            account.sent, account.back = account.back, {}
            self._numbers += 1
            account.number = self._numbers
        sent = account.sent or {}
        part = pb.TenantBatch(
            tenant=account.name, settlement=account.number if account.sent is not None else 0
        )
        indices: dict[str, int] = {}
        asked = {meter.name for meters, _ in reservations for meter in meters}
        for meter in account.all_meters():
            renews = meter.own and meter.limits.concurrent is not None
            if not renews and meter.name not in asked and meter.name not in sent:
                continue
            requests, tokens = sent.get(meter.name, (0, 0))
            indices[meter.name] = len(part.scopes)
            part.scopes.add(
                name=meter.name,
                limits=limits_to(meter.limits, meter.revision),
                streams=meter.own,
                requests_back=int(requests),
                tokens_back=int(tokens),
            )
        for meters, tokens_wanted in reservations:
            part.reservations.add(
                scopes=[indices[meter.name] for meter in meters], tokens=tokens_wanted
            )
        return part

    def learn(
        self, account: Account, part: pb.TenantBatch, answer: pb.TenantAnswer, now: float
    ) -> None:
        """Remember what an account's holder said to a part."""
        if part.settlement and part.settlement == account.number:
            account.sent = None
        account.parts.clear()
        if account.held:
            return
        self._remember(account, answer.levels, now)

    def _remember(self, account: Account, levels: Iterable[pb.QuotaLevel], now: float) -> None:
        for level in levels:
            meter = account.meters.get(level.name)
            if meter is None:
                limits = limits_from(level.limits)
                meter = Meter(level.name, limits, level.limits.revision, now)
                account.meters[level.name] = meter
            if level.version >= meter.version:
                _read(meter, level, now)


def refusal_of(verdict: pb.QuotaVerdict, scope: int) -> Refusal:
    """A verdict against a request; `scope` is the index of its meter."""
    return Refusal(Limit(verdict.limit), scope, verdict.wait_s)


def rank(tenant: str, router_id: str) -> bytes:
    """The highest among all routers has the best right to a tenant's account (rendezvous hashing:
    when routers come and go, only accounts of those move)."""
    return hashlib.blake2b(f"{tenant}\x00{router_id}".encode(), digest_size=8).digest()


def limits_to(limits: Limits, revision: int) -> pb.QuotaLimits:
    """Limits as their contract has them."""
    return pb.QuotaLimits(
        requests_per_min=limits.requests_per_min,
        tokens_per_min=limits.tokens_per_min,
        concurrent=limits.concurrent,
        request_burst=limits.request_burst,
        token_burst=limits.token_burst,
        revision=revision,
    )


def limits_from(limits: pb.QuotaLimits) -> Limits:
    """Limits of their contract."""
    return Limits(
        **{name: getattr(limits, name) for name in _LIMIT_FIELDS if limits.HasField(name)}  # type: ignore[arg-type]  # each is a field's name
    )


def _level(meter: Meter, now: float) -> pb.QuotaLevel:
    return pb.QuotaLevel(
        name=meter.name,
        requests=meter.requests,
        tokens=meter.tokens,
        version=meter.version,
        age_s=max(0.0, now - meter.at_s),
        limits=limits_to(meter.limits, meter.revision),
        streams=meter.own,
    )


def _read(meter: Meter, level: pb.QuotaLevel, now: float) -> None:
    meter.follow(limits_from(level.limits), level.limits.revision, now)
    meter.requests = min(meter.request_burst, level.requests)
    meter.tokens = min(meter.token_burst, level.tokens)
    meter.version = level.version
    meter.at_s = now - max(0.0, level.age_s)
