"""Serves RouterService: what this router sees, and how it chose."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

import grpc
from forebay.router.v1 import router_service_pb2 as router
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from forebay_common.errors import ForebayError, Reason

from forebay_router.adapters.catalogue import CatalogueView
from forebay_router.adapters.replicas import Fleet
from forebay_router.core.breakers import Breakers
from forebay_router.core.explain import Attempt, Recent
from forebay_router.core.place import Exclusion, Replica, standing_of

SERVICE = "forebay.router.v1.RouterService"
_UINT32_MAX = 2**32 - 1

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_rpc.RouterServiceServicer):
    """One router's view. It changes nothing."""

    def __init__(
        self,
        catalogue: CatalogueView,
        fleet: Fleet,
        breakers: Breakers,
        recent: Recent,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._breakers = breakers
        self._recent = recent
        self._clock = clock

    async def ListRoutes(  # noqa: N802
        self, request: router.ListRoutesRequest, context: Context
    ) -> router.ListRoutesResponse:
        """What each name resolves to."""
        return router.ListRoutesResponse(
            catalogue=self._catalogue.contract(),
            age_ms=_age_ms(self._catalogue.age_s(self._clock())),
        )

    async def ListReplicas(  # noqa: N802
        self, request: router.ListReplicasRequest, context: Context
    ) -> router.ListReplicasResponse:
        """The replicas as this router sees them."""
        routed = []
        for contract, replica in self._fleet.contracts():
            excluded = exclusion_from_all(replica, self._fleet, self._breakers.excluded)
            routed.append(
                router.RoutedReplica(
                    replica=contract,
                    in_flight=self._fleet.placer.in_flight(replica.replica_id),
                    placeable=excluded is None,
                    excluded_reason=excluded.value if excluded is not None else "",
                )
            )
        return router.ListReplicasResponse(
            replicas=routed, age_ms=_age_ms(self._fleet.age_s(self._clock()))
        )

    async def ExplainRequest(  # noqa: N802
        self, request: router.ExplainRequestRequest, context: Context
    ) -> router.ExplainRequestResponse:
        """How a recent request was placed."""
        record = self._recent.get(request.request_id)
        if record is None:
            raise ForebayError(
                Reason.REQUEST_NOT_FOUND,
                "The request is not among this router's recent ones.",
                param="request_id",
            )
        return router.ExplainRequestResponse(
            request_id=record.request_id,
            requested_model=record.requested_model,
            model_version=record.model_version,
            attempts=[_attempt(attempt) for attempt in record.attempts],
            outcome=record.outcome,
            trace_id=record.trace_id,
            via=record.via,
            tier_reason=record.tier_reason,
            waits=[
                router.Wait(what=wait.what, waited_ms=1000 * wait.waited_s, detail=wait.detail)
                for wait in record.waits
            ],
            tenant=record.tenant,
            priority_class=record.priority_class,
            prompt_tokens=min(record.prompt_tokens, _UINT32_MAX),
            duration_ms=1000 * record.duration_s(self._clock()),
        )


def exclusion_from_all(
    replica: Replica, fleet: Fleet, ejected: Container[str] = ()
) -> Exclusion | None:
    """Why no model of a replica can be placed there; None when one can."""
    if replica.models and replica.replica_id in fleet.down:
        return Exclusion.DOWN
    exclusion: Exclusion | None = Exclusion.MODEL_ABSENT
    for load in replica.models.values():
        exclusion = standing_of(replica, load)
        if exclusion is None:
            return Exclusion.EJECTED if replica.replica_id in ejected else None
    return exclusion


def count_placeable(fleet: Fleet, ejected: Container[str] = ()) -> int:
    """Replicas that can take requests for at least one model."""
    return sum(exclusion_from_all(replica, fleet, ejected) is None for replica in fleet.replicas())


def _attempt(attempt: Attempt) -> router.Attempt:
    return router.Attempt(
        replica_id=attempt.replica_id,
        candidates=[
            router.Candidate(
                replica_id=candidate.replica_id,
                cost=candidate.cost,
                excluded_reason=candidate.excluded.value if candidate.excluded else "",
                queue_ms=candidate.queue_ms,
                prefill_ms=candidate.prefill_ms,
                other_ms=candidate.other_ms,
                cached_tokens=candidate.cached_tokens,
            )
            for candidate in attempt.candidates
        ],
        predicted_ms=attempt.predicted_ms,
        placeable=attempt.placeable,
        excluded=attempt.excluded,
        outcome=attempt.outcome,
        first_message_ms=attempt.first_message_ms,
        kind=attempt.kind,
    )


def _age_ms(age_s: float) -> int:
    return round(min(age_s * 1000, _UINT32_MAX))
