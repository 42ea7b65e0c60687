"""Serves QuotaService, which routers speak among themselves."""

from __future__ import annotations

from typing import Any

import grpc
from forebay.router.v1 import quota_service_pb2 as pb
from forebay.router.v1 import quota_service_pb2_grpc as rpc

from forebay_router.adapters.quota import Quota

SERVICE = "forebay.router.v1.QuotaService"

Context = grpc.aio.ServicerContext[Any, Any]


class QuotaService(rpc.QuotaServiceServicer):
    """One router's accounts, for the others."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    async def Exchange(  # noqa: N802
        self, request: pb.ExchangeRequest, context: Context
    ) -> pb.ExchangeResponse:
        """Settle and reserve."""
        return await self._quota.exchange(request)

    async def Recall(  # noqa: N802
        self, request: pb.RecallRequest, context: Context
    ) -> pb.RecallResponse:
        """Give accounts up."""
        return self._quota.recall(request)
