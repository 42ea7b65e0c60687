"""The decisions of each pool in etcd, so that every instance can explain and none is forgotten."""

from __future__ import annotations

import logging

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay_common.discovery import Keys, from_json, to_json
from forebay_common.election import Leadership
from forebay_common.store import Op, Store

from forebay_autoscaler.core.model import Decision
from forebay_autoscaler.messages import decision_message, decision_of

_log = logging.getLogger(__name__)


class DecisionStore:
    """One key per pool, which only the leader writes. Raises ForebayError while etcd is away."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def load(self, pool: str) -> tuple[Decision, ...]:
        """The decisions as last saved, newest first."""
        entry = await self._store.get(self._keys.decisions(pool))
        if entry is None:
            return ()
        try:
            saved = from_json(autoscaler.ExplainPoolResponse, entry.value)
        except ValueError:
            _log.warning("%s cannot be decoded and is left out", entry.key)
            return ()
        return tuple(map(decision_of, saved.decisions))

    async def save(
        self, pool: str, decisions: tuple[Decision, ...], leadership: Leadership
    ) -> None:
        """Replace a pool's decisions, unless this leader has been replaced."""
        message = autoscaler.ExplainPoolResponse(decisions=map(decision_message, decisions))
        await self._store.commit(
            if_=[leadership.still_led], then=[Op.put(self._keys.decisions(pool), to_json(message))]
        )
