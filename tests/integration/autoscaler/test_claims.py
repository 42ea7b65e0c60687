"""Claims on standbys, against a real etcd."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from forebay_autoscaler.adapters.claims import Claims
from forebay_common.discovery import Keys
from forebay_common.election import Election
from forebay_common.errors import ForebayError, Reason
from forebay_common.lease import Lease
from forebay_common.store import Store

pytestmark = pytest.mark.integration


@pytest.fixture
async def store(etcd: str) -> AsyncIterator[Store]:
    async with Store.open((etcd,)) as store:
        yield store


async def test_of_two_claimers_never_both_win(store: Store, namespace: str) -> None:
    keys = Keys(namespace)
    rng = random.Random(3)
    holders: set[str] = set()
    wins = {"a": 0, "b": 0}
    async with Lease.open(store, 5) as one, Lease.open(store, 5) as two:
        await one.held()
        await two.held()

        async def claim(owner: str, lease: Lease, replica_id: str) -> bool:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            claims = Claims(store, keys, owner=owner)
            try:
                async with claims.hold("p", replica_id, fence=1, lease_id=lease.id) as held:
                    assert not holders, "two hold it at once"
                    holders.add(owner)
                    await asyncio.sleep(0)
                    holders.discard(owner)
                    if rng.random() < 0.7:
                        await held.settle()
                        wins[owner] += 1
                        return True
            except ForebayError as error:
                assert error.reason is Reason.CONFLICT
            return False

        for turn in range(200):
            replica_id = f"r-{turn}"
            await store.put(keys.warm("p", replica_id), b"{}")
            won = await asyncio.gather(claim("a", one, replica_id), claim("b", two, replica_id))
            assert sum(won) <= 1
            warm = await store.get(keys.warm("p", replica_id))
            assert (warm is None) == (sum(won) == 1)
            assert await store.get(keys.claim("p", replica_id)) is None
    assert min(wins.values()) > 20, wins
    print(f"200 races: {wins}, 0 double claims")


async def test_what_is_not_warm_is_not_claimed(store: Store, namespace: str) -> None:
    async with Lease.open(store, 2) as lease:
        await lease.held()
        claims = Claims(store, Keys(namespace), owner="a")
        with pytest.raises(ForebayError) as refused:
            async with claims.hold("p", "r", fence=1, lease_id=lease.id):
                pass
        assert refused.value.reason is Reason.CONFLICT


async def test_a_claim_whose_order_fails_is_freed(store: Store, namespace: str) -> None:
    keys = Keys(namespace)
    await store.put(keys.warm("p", "r"), b"{}")
    async with Lease.open(store, 2) as lease:
        await lease.held()
        with pytest.raises(RuntimeError):
            async with Claims(store, keys, owner="a").hold("p", "r", fence=1, lease_id=lease.id):
                assert await store.get(keys.claim("p", "r")) is not None
                raise RuntimeError
        assert await store.get(keys.claim("p", "r")) is None
        assert await store.get(keys.warm("p", "r")) is not None


async def test_a_claim_of_ours_whose_answer_was_lost_is_in_nobodys_way_for_long(
    store: Store, namespace: str
) -> None:
    keys = Keys(namespace)
    await store.put(keys.warm("p", "r"), b"{}")
    async with Lease.open(store, 2) as lease:
        await lease.held()
        claims = Claims(store, keys, owner="a")
        await store.put(keys.claim("p", "r"), b'{"owner": "a", "fence": 1}', lease_id=lease.id)
        with pytest.raises(ForebayError):
            async with claims.hold("p", "r", fence=1, lease_id=lease.id):
                pass
        async with claims.hold("p", "r", fence=1, lease_id=lease.id):
            pass


async def test_a_claim_goes_with_its_claimer(store: Store, namespace: str) -> None:
    keys = Keys(namespace)
    await store.put(keys.warm("p", "r"), b"{}")
    async with Lease.open(store, 2) as lease:
        await lease.held()
        hold = Claims(store, keys, owner="a").hold("p", "r", fence=1, lease_id=lease.id)
        await hold.__aenter__()
        assert await store.get(keys.claim("p", "r")) is not None
    assert await store.get(keys.claim("p", "r")) is None


async def test_a_leader_that_was_replaced_claims_nothing(store: Store, namespace: str) -> None:
    keys = Keys(namespace)
    await store.put(keys.warm("p", "r"), b"{}")
    async with Lease.open(store, 2) as lease:
        election = Election(store, lease, keys.leader("autoscaler"), "a")
        async with election.campaign() as leadership:
            pass
        claims = Claims(store, keys, owner="a")
        with pytest.raises(ForebayError) as refused:
            async with claims.hold(
                "p", "r", fence=leadership.fence, lease_id=lease.id, if_=[leadership.still_led]
            ):
                pass
        assert refused.value.reason is Reason.CONFLICT
