"""Accounts over several routers, in virtual time."""

from __future__ import annotations

import random

import pytest
from forebay.router.v1 import quota_service_pb2 as pb
from forebay_router.core.access import Limits, Tenant
from forebay_router.core.meter import Meter, reserve
from forebay_router.core.quota import Account, Books, limits_from, limits_to, rank
from hypothesis import given, settings
from hypothesis import strategies as st

MODEL = "chat"


def a_tenant(revision: int = 1, **limits: int) -> Tenant:
    return Tenant.of("acme", limits=Limits(**limits), revision=revision)


class Routers:
    """Some routers, one of which holds the account."""

    def __init__(self, count: int, tenant: Tenant) -> None:
        self.tenant = tenant
        self.now = 0.0
        self.books = {f"r{index}": Books(f"r{index}/1") for index in range(count)}
        self._batches = dict.fromkeys(self.books, 0)
        self._heard: dict[tuple[str, str], int] = {}
        self.holder: str | None = None

    def meters(self, router: str) -> tuple[Account, tuple[Meter, ...]]:
        account = self.books[router].account(self.tenant.name)
        return account, account.meters_for(self.tenant, MODEL, self.now)

    def take_over(self, router: str) -> None:
        recalled = [
            books.give(self.tenant.name, self.now)
            for name, books in self.books.items()
            if name != router
        ]
        self.books[router].take_over(self.tenant.name, recalled, self.now)
        self.holder = router

    def tell(self) -> None:
        """The holder tells whoever is next."""
        if self.holder is None or len(self.books) < 2:
            return
        account, _ = self.meters(self.holder)
        account.told = 0
        told = self.books[self.holder].tell(account, self.now)
        others = [each for each in self.books if each != self.holder]
        if told is not None:
            last = max(others, key=lambda each: rank(self.tenant.name, each))
            self.books[last].hear(told, self.now)

    def crash(self, router: str) -> None:
        del self.books[router]
        if self.holder == router:
            self.holder = None

    def join(self, router: str) -> None:
        self.books[router] = Books(f"{router}/2")
        self._batches[router] = 0

    def hold(self) -> str:
        """Who holds the account; somebody takes it over where nobody does."""
        if self.holder is None:
            self.take_over(max(self.books, key=lambda each: rank(self.tenant.name, each)))
        assert self.holder is not None
        return self.holder

    def exchange(
        self, router: str, reservations: list[tuple[tuple[Meter, ...], int]], *, lost: bool = False
    ) -> pb.TenantAnswer:
        holder = self.hold()
        account, _ = self.meters(router)
        part = self.books[router].part(account, reservations)
        self._batches[router] += 1
        batch = self._batches[router]
        session = self.books[router].session
        heard = self._heard.get((router, holder), 0)
        books = self.books[holder]
        assert books.open_batch(session, batch, heard, self.now)
        answer = books.answer(session, part, self.now)
        if not lost:
            self._heard[router, holder] = batch
            self.books[router].learn(account, part, answer, self.now)
        return answer

    def reserve(self, router: str, tokens: int, *, lost: bool = False) -> bool:
        account, meters = self.meters(router)
        self.hold()
        if account.held:
            passed = reserve(meters, tokens, self.now) is None
        else:
            answer = self.exchange(router, [(meters, tokens)], lost=lost)
            passed = not answer.verdicts[0].limit and not lost
        if passed:
            for meter in meters:
                meter.begin()
        return passed

    def settle(self, router: str, tokens_back: int, *, requests_back: int = 0) -> None:
        account, meters = self.meters(router)
        for meter in meters:
            meter.end()
        self.hold()
        for meter in meters:
            if account.held:
                meter.give_back(requests_back, tokens_back, self.now)
            else:
                account.owe(meter.name, requests_back, tokens_back)
        if account.owes:
            self.exchange(router, [])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**9), routers=st.integers(1, 5))
def test_many_routers_decide_as_one_bucket_would(seed: int, routers: int) -> None:
    """Whoever holds the account, whoever crashes, leaves or joins: each answer is that of a single
    bucket which everything went through."""
    rng = random.Random(seed)
    tenant = a_tenant(requests_per_min=60, tokens_per_min=6000, concurrent=12)
    some = Routers(routers, tenant)
    one = Meter("", tenant.limits, 1, 0.0)
    running: list[tuple[str, int]] = []
    for step in range(120):
        some.now += rng.expovariate(1.5)
        choice = rng.random()
        router = rng.choice(sorted(some.books))
        if choice < 0.6:
            tokens = rng.randrange(0, 1500)
            passed = some.reserve(router, tokens)
            assert passed == (reserve([one], tokens, some.now) is None), (seed, step)
            if passed:
                one.begin()
                running.append((router, tokens))
        elif choice < 0.9 and running:
            router, tokens = running.pop(rng.randrange(len(running)))
            back = tokens - rng.randrange(0, 1600)
            some.settle(router, back)
            one.give_back(0, back, some.now)
            one.end()
        elif choice < 0.94:
            some.take_over(router)
        elif choice < 0.97 and len(some.books) > 1:
            # What it had in flight dies with it; its streams are freed when nobody hears of it.
            # One death is known before the next: what only those knew that die together is lost.
            some.hold()
            some.tell()
            some.crash(router)
            for name, _ in [each for each in running if each[0] == router]:
                one.end()
                running.remove((name, _))
            if some.holder is not None:
                some.books[some.holder].account("acme").meters[""].note_streams(f"{router}/1", 0)
                some.books[some.holder].account("acme").meters[""].note_streams(f"{router}/2", 0)
        elif f"r{step}" not in some.books:
            some.join(f"r{step}")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_five_minutes_of_tokens_are_right_to_one_reservation(seed: int) -> None:
    """More is wanted than may pass: what passes is the limit's five minutes and the burst."""
    rng = random.Random(seed)
    per_min, largest = 6000, 400
    some = Routers(3, a_tenant(tokens_per_min=per_min, token_burst=1000))
    used, running = 0, []
    while some.now < 300:
        some.now += 0.25
        router = rng.choice(sorted(some.books))
        if running and rng.random() < 0.5:
            where, tokens, actual = running.pop(0)
            some.settle(where, tokens - actual)
            used += actual
        tokens = rng.randrange(1, largest)
        if some.reserve(router, tokens):
            running.append((router, tokens, rng.randrange(0, tokens + 1)))
        if rng.random() < 0.01:
            some.take_over(router)
    for where, tokens, actual in running:
        some.settle(where, tokens - actual)
        used += actual
    most = 1000 + per_min * 5
    assert used <= most + largest
    assert used >= most - 1000 - largest * (len(running) + 1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_an_answer_that_was_lost_is_undone_by_the_next_batch(seed: int) -> None:
    rng = random.Random(seed)
    some = Routers(2, a_tenant(requests_per_min=600, tokens_per_min=6000))
    some.take_over("r0")
    passed = 0
    for _ in range(40):
        lost = rng.random() < 0.4
        passed += some.reserve("r1", 10, lost=lost)
    some.exchange("r1", [])
    meter = some.books["r0"].account("acme").meters[""]
    assert meter.requests == 600 - passed
    assert meter.tokens == 6000 - 10 * passed


def test_what_is_given_back_is_given_back_once() -> None:
    some = Routers(2, a_tenant(tokens_per_min=6000))
    some.take_over("r0")
    assert some.reserve("r1", 1000)
    account, meters = some.meters("r1")
    account.owe(meters[0].name, 0, 600)
    some.exchange("r1", [], lost=True)
    some.exchange("r1", [], lost=True)
    # The account moves to who owes: it is known there what was applied.
    some.take_over("r1")
    assert some.meters("r1")[1][0].tokens == 5600
    assert not some.meters("r1")[0].owes


def test_a_late_batch_changes_nothing() -> None:
    books = Books("r0/1")
    assert books.open_batch("r1/1", 2, 0, 0.0)
    assert not books.open_batch("r1/1", 1, 0, 0.0)
    assert not books.is_newest("r1/1", 1)


def test_streams_of_a_router_that_fell_silent_are_freed() -> None:
    some = Routers(2, a_tenant(concurrent=2))
    some.take_over("r0")
    assert some.reserve("r1", 0)
    assert some.reserve("r1", 0)
    assert not some.reserve("r0", 0)
    books = some.books["r0"]
    assert books.expire(9.9, ttl_s=10) == 0
    assert books.expire(10, ttl_s=10) == 2
    assert some.reserve("r0", 0)


def test_streams_are_known_to_whoever_takes_over() -> None:
    some = Routers(3, a_tenant(concurrent=3))
    some.take_over("r0")
    assert some.reserve("r0", 0)
    assert some.reserve("r1", 0)
    assert some.reserve("r2", 0)
    some.take_over("r2")
    assert not some.reserve("r1", 0)
    some.settle("r1", 0)
    assert some.reserve("r0", 0)


def test_a_crashed_holders_levels_are_the_newest_that_anybody_heard() -> None:
    some = Routers(3, a_tenant(requests_per_min=10))
    some.take_over("r0")
    for router in ("r1", "r2", "r1", "r1", "r2"):
        assert some.reserve(router, 0)
    some.crash("r0")
    assert [some.reserve("r1", 0) for _ in range(10)].count(True) == 5


def test_limits_of_a_model_count_beside_those_of_the_tenant() -> None:
    tenant = Tenant.of(
        "acme",
        limits=Limits(requests_per_min=10),
        model_limits={MODEL: Limits(requests_per_min=2), "free": Limits()},
        revision=1,
    )
    account = Account("acme")
    names = {
        model: [meter.name for meter in account.meters_for(tenant, model, 0.0)]
        for model in (MODEL, f"{MODEL}@v2", "free", "other")
    }
    assert names == {MODEL: ["", MODEL], f"{MODEL}@v2": ["", MODEL], "free": [""], "other": [""]}
    changed = Tenant.of("acme", limits=Limits(), revision=2)
    assert account.meters_for(changed, MODEL, 0.0) == ()


def test_idle_accounts_are_forgotten() -> None:
    some = Routers(1, a_tenant(requests_per_min=60, concurrent=5))
    some.take_over("r0")
    assert some.reserve("r0", 0)
    books = some.books["r0"]
    books.forget_idle(100, ())
    assert books.accounts, "a request is in flight"
    some.settle("r0", 0)
    books.forget_idle(100, {"acme"})
    assert books.accounts
    books.forget_idle(100, ())
    assert not books.accounts


@pytest.mark.parametrize("limits", [Limits(), Limits(0, 0, 0), Limits(1, 2, 3, 4, 5)])
def test_limits_survive_the_wire(limits: Limits) -> None:
    assert limits_from(limits_to(limits, 9)) == limits
