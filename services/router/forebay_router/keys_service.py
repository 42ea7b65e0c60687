"""Serves KeyService: keys and tenants, which every router then follows."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from forebay.router.v1 import key_service_pb2 as pb
from forebay.router.v1 import key_service_pb2_grpc as rpc
from forebay_common.apikeys import KeySecrets
from forebay_common.errors import ForebayError, Reason

from forebay_router.adapters.keys import KeyStore
from forebay_router.core import keys as core
from forebay_router.core.refusal import RefusedError
from forebay_router.gate import as_error

SERVICE = pb.DESCRIPTOR.services_by_name["KeyService"].full_name
_OVERLAP_S_MAX = 365 * 86400

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


def _refusing(
    method: Callable[[_S, _Q, _Context], Awaitable[_A]],
) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    @functools.wraps(method)
    async def call(self: _S, request: _Q, context: _Context) -> _A:
        try:
            return await method(self, request, context)
        except RefusedError as refused:
            raise as_error(refused) from None

    return call


class KeyService(rpc.KeyServiceServicer):
    """Keys and tenants. Who may call it was checked before."""

    def __init__(
        self,
        store: KeyStore,
        secrets: KeySecrets | None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Without secrets, an open router's, keys cannot be made."""
        self._store = store
        self._secrets = secrets
        self._wall_clock = wall_clock

    @_refusing
    async def CreateKey(  # noqa: N802
        self, request: pb.CreateKeyRequest, context: _Context
    ) -> pb.CreateKeyResponse:
        record, text = core.make_key(request, self._keyed(), now_unix_s=self._now())
        await self._store.add_key(record)
        return pb.CreateKeyResponse(key=record.key, text=text)

    @_refusing
    async def ListKeys(  # noqa: N802
        self, request: pb.ListKeysRequest, context: _Context
    ) -> pb.ListKeysResponse:
        keys = await self._store.keys()
        return pb.ListKeysResponse(keys=[key for key in keys if request.tenant in ("", key.tenant)])

    @_refusing
    async def RotateKey(  # noqa: N802
        self, request: pb.RotateKeyRequest, context: _Context
    ) -> pb.RotateKeyResponse:
        if request.overlap_s > _OVERLAP_S_MAX:
            problem = f"'overlap_s' must be at most {_OVERLAP_S_MAX}."
            raise RefusedError("INVALID_ARGUMENT", problem, param="overlap_s")
        now = self._now()
        old = await self._store.change_key(request.key_id, lambda key: key)
        record, text = core.make_key(
            core.successor_of(old, now_unix_s=now), self._keyed(), now_unix_s=now
        )
        await self._store.add_key(record)
        replaced = await self._store.change_key(
            request.key_id,
            lambda key: core.ending(key, overlap_s=request.overlap_s, now_unix_s=now),
        )
        return pb.RotateKeyResponse(key=record.key, text=text, replaced=replaced)

    @_refusing
    async def RevokeKey(  # noqa: N802
        self, request: pb.RevokeKeyRequest, context: _Context
    ) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=await self._store.change_key(request.key_id, _revoked))

    @_refusing
    async def PutTenant(  # noqa: N802
        self, request: pb.PutTenantRequest, context: _Context
    ) -> pb.PutTenantResponse:
        tenant = core.check_tenant(request.tenant)
        return pb.PutTenantResponse(tenant=await self._store.put_tenant(tenant))

    @_refusing
    async def ListTenants(  # noqa: N802
        self, request: pb.ListTenantsRequest, context: _Context
    ) -> pb.ListTenantsResponse:
        return pb.ListTenantsResponse(tenants=await self._store.tenants())

    @_refusing
    async def DeleteTenant(  # noqa: N802
        self, request: pb.DeleteTenantRequest, context: _Context
    ) -> pb.DeleteTenantResponse:
        await self._store.delete_tenant(request.name)
        return pb.DeleteTenantResponse()

    def _keyed(self) -> KeySecrets:
        if self._secrets is None:
            raise ForebayError(
                Reason.UNSUPPORTED, "This router is open: it has no secret to make keys with."
            )
        return self._secrets

    def _now(self) -> int:
        return int(self._wall_clock())


def _revoked(key: pb.ApiKey) -> pb.ApiKey:
    changed = pb.ApiKey()
    changed.CopyFrom(key)
    changed.revoked = True
    return changed
