"""Claims on standbys: each standby is claimed by at most one, whoever else tries.

A claim is one transaction: the standby is warm, nobody has claimed it, and the claimer still leads.
It lives under the claimer's lease, so a dead claimer frees it. Once the standby has obeyed, the
claim and the warm key go in one transaction, so there is no moment at which it looks free again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from forebay_common.discovery import Keys
from forebay_common.errors import ForebayError, Reason
from forebay_common.store import Condition, Op, Store

_log = logging.getLogger(__name__)


class Claim:
    """A standby that is ours to activate."""

    def __init__(self, store: Store, *, claim_key: str, warm_key: str, value: bytes) -> None:
        self._store = store
        self._claim_key = claim_key
        self._warm_key = warm_key
        self._value = value
        self.is_settled = False

    async def settle(self) -> None:
        """The standby has obeyed: it is neither warm nor claimed any more."""
        await self._store.commit(
            if_=[Condition.value(self._claim_key, self._value)],
            then=[Op.delete(self._warm_key), Op.delete(self._claim_key)],
        )
        self.is_settled = True

    async def free(self) -> None:
        """The standby has not obeyed: others may claim it."""
        try:
            await self._store.commit(
                if_=[Condition.value(self._claim_key, self._value)],
                then=[Op.delete(self._claim_key)],
            )
        except ForebayError:
            _log.warning("a claim was not freed; it goes with the lease or with the next claim")


class Claims:
    """Claims in the name of one autoscaler."""

    def __init__(self, store: Store, keys: Keys, *, owner: str) -> None:
        self._store = store
        self._keys = keys
        self._owner = owner

    @asynccontextmanager
    async def hold(
        self,
        pool: str,
        replica_id: str,
        *,
        fence: int,
        lease_id: int,
        if_: Sequence[Condition] = (),
    ) -> AsyncIterator[Claim]:
        """Claim a standby; on the way out it is freed unless it was settled.

        Args:
            pool: the standby's pool.
            replica_id: the standby.
            fence: of the leadership in whose name it is claimed.
            lease_id: the lease the claim lives under.
            if_: what else must hold.

        Raises:
            ForebayError: CONFLICT when it is not warm, is claimed, or `if_` does not hold.
        """
        claim_key = self._keys.claim(pool, replica_id)
        warm_key = self._keys.warm(pool, replica_id)
        value = json.dumps({"owner": self._owner, "fence": fence}).encode()
        claim = Claim(self._store, claim_key=claim_key, warm_key=warm_key, value=value)
        try:
            result = await self._store.commit(
                if_=[Condition.exists(warm_key), Condition.absent(claim_key), *if_],
                then=[Op.put(claim_key, value, lease_id=lease_id)],
                else_=[Op.get(claim_key)],
            )
        except ForebayError:
            # Perhaps it was carried out.
            await claim.free()
            raise
        held = result.entries.get(claim_key)
        if not result.succeeded:
            if held is not None and held.value == value:
                # Ours, from a claim whose answer was lost. Nothing else of ours holds it: a replica
                # gets one order at a time.
                await claim.free()
            raise ForebayError(
                Reason.CONFLICT, "The standby is not warm, or claimed.", retry_after_s=1
            )
        try:
            yield claim
        finally:
            if not claim.is_settled:
                await claim.free()
