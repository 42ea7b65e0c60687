"""Carries out what a tick has ordered, each order with the leader's fence."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_grpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.channel import ChannelPool
from forebay_common.election import Leadership
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.store import Store

from forebay_autoscaler.adapters.claims import Claims
from forebay_autoscaler.core.model import Effect, Kind
from forebay_autoscaler.launcher import Launcher, LaunchOrder

_log = logging.getLogger(__name__)


class Orders:
    """Orders in the name of whoever leads when they are given."""

    def __init__(
        self,
        store: Store,
        claims: Claims,
        launcher: Launcher,
        channels: ChannelPool,
        *,
        activate_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        self._store = store
        self._claims = claims
        self._launcher = launcher
        self._channels = channels
        self._activate_timeout_s = activate_timeout_s
        self._drain_timeout_s = drain_timeout_s

    async def carry_out(
        self,
        effect: Effect,
        *,
        pool: str,
        specs: tuple[engine.ModelSpec, ...],
        addresses: Mapping[str, str],
        leadership: Leadership,
    ) -> None:
        """Do it, and return when it is done.

        Args:
            effect: what to do.
            pool: the replica's pool.
            specs: what a launched replica loads.
            addresses: of the batchers that are announced, by replica.
            leadership: in whose name.

        Raises:
            ForebayError: it was not done; STALE_FENCE when this leader has been replaced.
        """
        if not leadership.is_valid(time.monotonic()):
            raise _stale()
        replica_id = effect.replica_id
        if effect.kind is Kind.LAUNCH:
            await self._launcher.launch(LaunchOrder(replica_id, pool, specs))
        elif not self._launcher.carries_out:
            _log.info("dry run: %s", effect)
        elif effect.kind is Kind.ACTIVATE:
            await self._activate(pool, replica_id, addresses.get(replica_id), leadership)
        elif effect.kind is Kind.DRAIN:
            await self._drain(replica_id, addresses.get(replica_id), leadership)
        else:
            await self._launcher.stop(replica_id)

    async def _activate(
        self, pool: str, replica_id: str, address: str | None, leadership: Leadership
    ) -> None:
        if address is None:
            raise ForebayError(Reason.NO_REPLICA, "The standby is not announced.")
        async with self._claims.hold(
            pool,
            replica_id,
            fence=leadership.fence,
            lease_id=leadership.session.lease_id,
            if_=[leadership.still_led],
        ) as claim:
            request = batcher.ActivateReplicaRequest(fence=leadership.fence)
            stub = batcher_grpc.BatcherServiceStub(self._channels.get(address))
            try:
                await stub.ActivateReplica(request, timeout=self._activate_timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            await claim.settle()

    async def _drain(self, replica_id: str, address: str | None, leadership: Leadership) -> None:
        self._launcher.mark_leaving(replica_id, leaving=True)
        if address is not None:
            request = batcher.DrainReplicaRequest(fence=leadership.fence)
            stub = batcher_grpc.BatcherServiceStub(self._channels.get(address))
            try:
                await stub.DrainReplica(request, timeout=self._drain_timeout_s)
            except grpc.aio.AioRpcError as error:
                await self._consider(replica_id, from_rpc_error(error), leadership)
        await self._launcher.stop(replica_id)

    async def _consider(self, replica_id: str, error: ForebayError, leadership: Leadership) -> None:
        """Whether a replica that did not drain is stopped all the same.

        One that has obeyed a higher fence is left alone, unless etcd says that this leader leads:
        etcd was then set up anew and counts from 1. Whatever else it is, its time is over, or it is
        dead.
        """
        if error.reason is not Reason.STALE_FENCE:
            _log.warning("replica %s did not drain (%s) and is stopped", replica_id, error.reason)
            return
        with contextlib.suppress(ForebayError):
            result = await self._store.commit(if_=[leadership.still_led], then=[])
            if result.succeeded:
                return
        self._launcher.mark_leaving(replica_id, leaving=False)
        raise _stale()


def _stale() -> ForebayError:
    return ForebayError(Reason.STALE_FENCE, "This autoscaler no longer leads.")
