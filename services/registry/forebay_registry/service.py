"""RegistryService: the contract, translated to the rules in core and the catalogue in etcd."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.registry.v1 import registry_service_pb2_grpc as registry_grpc
from forebay_common.errors import ForebayError, Reason
from prometheus_client import Counter

from forebay_registry.adapters.catalogue_store import CatalogueStore
from forebay_registry.catalogue_loop import CatalogueFeed
from forebay_registry.core import catalogue
from forebay_registry.core.names import check_name, is_name
from forebay_registry.core.refusal import RefusedError

SERVICE = registry.DESCRIPTOR.services_by_name["RegistryService"].full_name

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S")
_Q = TypeVar("_Q")
_A = TypeVar("_A")

_CALLS = Counter(
    "forebay_registry_calls_total", "Calls by method and outcome.", ["method", "outcome"]
)


def _refusing(
    method: Callable[[_S, _Q, _Context], Awaitable[_A]],
) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """Turns the core's refusals into errors, and counts."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: _S, request: _Q, context: _Context) -> _A:
        try:
            answer = await method(self, request, context)
        except RefusedError as refused:
            _CALLS.labels(name, refused.reason).inc()
            raise ForebayError(
                Reason(refused.reason), refused.message, param=refused.param
            ) from None
        except ForebayError as error:
            _CALLS.labels(name, error.reason.value).inc()
            raise
        _CALLS.labels(name, "OK").inc()
        return answer

    return call


class RegistryServicer(registry_grpc.RegistryServiceServicer):
    """Serves the catalogue. Keeps nothing of its own: any number of instances may run."""

    def __init__(self, store: CatalogueStore, feed: CatalogueFeed, *, max_versions: int) -> None:
        self._store = store
        self._feed = feed
        self._max_versions = max_versions

    async def put(self, request: registry.PutVersionRequest) -> registry.Model:
        """Create or replace a version. Raises RefusedError or ForebayError."""
        check_name(request.model, param="model")
        now_unix_s = int(time.time())
        return await self._store.put_version(
            request.model,
            lambda model: catalogue.put_version(
                model,
                request.model,
                request.version,
                now_unix_s=now_unix_s,
                max_versions=self._max_versions,
            ),
        )

    @_refusing
    async def PutVersion(  # noqa: N802
        self, request: registry.PutVersionRequest, context: _Context
    ) -> registry.PutVersionResponse:
        return registry.PutVersionResponse(model=await self.put(request))

    @_refusing
    async def DeleteVersion(  # noqa: N802
        self, request: registry.DeleteVersionRequest, context: _Context
    ) -> registry.DeleteVersionResponse:
        check_name(request.model, param="model")
        check_name(request.version, param="version")
        await self._store.delete_version(request.model, request.version)
        return registry.DeleteVersionResponse()

    @_refusing
    async def GetModel(  # noqa: N802
        self, request: registry.GetModelRequest, context: _Context
    ) -> registry.GetModelResponse:
        # A text that is no name cannot be in the catalogue, and is not asked for.
        model = await self._store.model(request.name) if is_name(request.name) else None
        return registry.GetModelResponse(model=_found(model))

    @_refusing
    async def ListModels(  # noqa: N802
        self, request: registry.ListModelsRequest, context: _Context
    ) -> registry.ListModelsResponse:
        return registry.ListModelsResponse(catalogue=await self._store.listing())

    @_refusing
    async def SetSplit(  # noqa: N802
        self, request: registry.SetSplitRequest, context: _Context
    ) -> registry.SetSplitResponse:
        check_name(request.model, param="model")
        model = await self._store.change_model(
            request.model,
            lambda model: catalogue.set_split(
                _found(model), request.split, expected_revision=request.expected_revision
            ),
        )
        return registry.SetSplitResponse(model=model)

    @_refusing
    async def SetShadow(  # noqa: N802
        self, request: registry.SetShadowRequest, context: _Context
    ) -> registry.SetShadowResponse:
        check_name(request.model, param="model")
        shadow = request.shadow if request.HasField("shadow") else None
        model = await self._store.change_model(
            request.model,
            lambda model: catalogue.set_shadow(
                _found(model), shadow, expected_revision=request.expected_revision
            ),
        )
        return registry.SetShadowResponse(model=model)

    @_refusing
    async def PutAlias(  # noqa: N802
        self, request: registry.PutAliasRequest, context: _Context
    ) -> registry.PutAliasResponse:
        check_name(request.alias.name, param="alias.name")
        return registry.PutAliasResponse(alias=await self._store.put_alias(request.alias))

    @_refusing
    async def DeleteAlias(  # noqa: N802
        self, request: registry.DeleteAliasRequest, context: _Context
    ) -> registry.DeleteAliasResponse:
        check_name(request.name, param="name")
        await self._store.delete_alias(request.name)
        return registry.DeleteAliasResponse()

    async def WatchCatalogue(  # noqa: N802
        self, request: registry.WatchCatalogueRequest, context: _Context
    ) -> AsyncIterator[registry.WatchCatalogueResponse]:
        async for newest in self._feed.catalogues():
            yield registry.WatchCatalogueResponse(catalogue=newest)


def _found(model: registry.Model | None) -> registry.Model:
    if model is None:
        raise RefusedError("MODEL_NOT_FOUND", "No model has this name.")
    return model
