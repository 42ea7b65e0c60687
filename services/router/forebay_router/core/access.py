"""Who may do what: keys, tenants, and the scope that each method and route needs.

Every refusal of a key reads the same, whether it is unknown, wrong, expired or revoked, and takes
as long: a hash is made and compared for every text that looks like a key.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hmac
import re
from collections.abc import Mapping
from enum import IntEnum

from forebay_common.apikeys import KeySecrets, key_id_of

from forebay_router.core.refusal import RefusedError

_BEARER = "bearer "


class Scope(IntEnum):
    """What a key may be used for. The numbers are the contract's."""

    INFERENCE = 1
    READ = 2
    ADMIN = 3
    ROUTER = 100
    """Of routers among one another; no key has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Token buckets; None does not limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None
    request_burst: int | None = None
    token_burst: int | None = None

    @property
    def limit_anything(self) -> bool:
        """Whether there is any."""
        return not (self.requests_per_min is self.tokens_per_min is self.concurrent is None)


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays, and what it may use."""

    name: str
    models: tuple[str, ...] = ()
    """Patterns; empty is all."""
    priority_classes: frozenset[str] = frozenset()
    """Empty is all."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    model_limits: Mapping[str, Limits] = dataclasses.field(default_factory=dict)
    weight: int = 1
    revision: int = 0
    may_ask: re.Pattern[str] | None = None
    """Made of `models`."""
    is_limited: bool = False
    """Whether its requests are counted at all; made of its limits."""

    @classmethod
    def of(cls, name: str, models: tuple[str, ...] = (), **fields: object) -> Tenant:
        """A tenant with what is made of its fields."""
        may_ask = re.compile("|".join(map(fnmatch.translate, models))) if models else None
        tenant = cls(name, models, may_ask=may_ask, **fields)  # type: ignore[arg-type]  # its own
        is_limited = tenant.limits.limit_anything or any(
            limits.limit_anything for limits in tenant.model_limits.values()
        )
        return dataclasses.replace(tenant, is_limited=is_limited)

    def allows_model(self, name: str) -> bool:
        """Whether it may ask for a name; of `name@version` the name suffices."""
        if self.may_ask is None:
            return True
        return bool(self.may_ask.match(name) or self.may_ask.match(name.partition("@")[0]))

    def check(self, model: str, priority_class: str) -> None:
        """Raises RefusedError PERMISSION_DENIED for what it may not use."""
        if self.may_ask is not None and not self.allows_model(model):
            raise RefusedError(
                "PERMISSION_DENIED", "The key's tenant may not ask this model.", param="model"
            )
        if self.priority_classes and priority_class not in self.priority_classes:
            allowed = ", ".join(sorted(self.priority_classes))
            raise RefusedError(
                "PERMISSION_DENIED",
                f"The key's tenant may ask in class {allowed} only.",
                param="forebay-class",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """An API key as it is stored."""

    key_id: str
    tenant: str
    scopes: frozenset[Scope]
    hash: bytes = dataclasses.field(repr=False)
    secret_id: str
    expires_unix_s: int = 0
    """0 is never."""
    revoked: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who calls."""

    tenant: Tenant
    key_id: str
    scopes: frozenset[Scope]

    def require(self, scope: Scope) -> None:
        """Raises RefusedError PERMISSION_DENIED where the key may not be used for it."""
        if scope not in self.scopes:
            raise RefusedError(
                "PERMISSION_DENIED", f"The key needs the scope {scope.name.lower()} for this."
            )


ALL_SCOPES = frozenset({Scope.INFERENCE, Scope.READ, Scope.ADMIN})
_NOBODY = Tenant("")
ROUTERS = Identity(_NOBODY, "", frozenset({Scope.ROUTER}))
OPERATOR = Identity(_NOBODY, "", frozenset({Scope.READ, Scope.ADMIN}))
"""Whoever holds the file of secrets."""


class Keyring:
    """All keys and tenants at one moment."""

    def __init__(
        self, secrets: KeySecrets, keys: Mapping[str, Key], tenants: Mapping[str, Tenant]
    ) -> None:
        self._secrets = secrets
        self._identities = {
            key.key_id: (
                key,
                Identity(tenants[key.tenant], key.key_id, _with_implied(key.scopes)),
            )
            for key in keys.values()
            if key.tenant in tenants
        }

    def identify(self, text: str, now_unix_s: float) -> Identity:
        """Whose key a text is.

        Raises:
            RefusedError: UNAUTHENTICATED.
        """
        key_id = key_id_of(text)
        found = self._identities.get(key_id) if key_id is not None else None
        if found is None:
            if key_id is not None:
                hmac.compare_digest(self._secrets.newest.hash(text), bytes(32))
            raise _unknown()
        key, identity = found
        secret = self._secrets.find(key.secret_id) or self._secrets.newest
        if not hmac.compare_digest(secret.hash(text), key.hash):
            raise _unknown()
        if key.revoked or 0 < key.expires_unix_s <= now_unix_s:
            raise _unknown()
        return identity


def bearer_of(metadata: Mapping[str, str]) -> str:
    """The key that a caller shows: `authorization: Bearer KEY`, or `x-api-key`.

    Raises:
        RefusedError: UNAUTHENTICATED, when there is none.
    """
    given = metadata.get("authorization")
    if given is not None and given[:7].lower() == _BEARER:
        return given[7:].strip()
    text = metadata.get("x-api-key")
    if text is None:
        raise RefusedError(
            "UNAUTHENTICATED", "An API key is needed: send 'Authorization: Bearer KEY'."
        )
    return text.strip()


def _unknown() -> RefusedError:
    return RefusedError("UNAUTHENTICATED", "The API key is not valid.")


def _with_implied(scopes: frozenset[Scope]) -> frozenset[Scope]:
    return ALL_SCOPES if Scope.ADMIN in scopes else scopes


# What each method needs; None is open to everybody. What is not listed needs ADMIN.
_INFERENCE = "/forebay.inference.v1.InferenceService/"
_ROUTER = "/forebay.router.v1.RouterService/"
METHOD_SCOPES: Mapping[str, Scope | None] = {
    _INFERENCE + "Generate": Scope.INFERENCE,
    _INFERENCE + "Embed": Scope.INFERENCE,
    _INFERENCE + "CallOpenAI": Scope.INFERENCE,
    _ROUTER + "ListRoutes": Scope.READ,
    _ROUTER + "ListReplicas": Scope.READ,
    _ROUTER + "ExplainRequest": Scope.READ,
    "/forebay.router.v1.QuotaService/Exchange": Scope.ROUTER,
    "/forebay.router.v1.QuotaService/Recall": Scope.ROUTER,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Scope.READ,
}
ROUTE_SCOPES: Mapping[str, Scope | None] = {
    "/health/live": None,
    "/health/ready": None,
    "/metrics": Scope.READ,
}
"""Of HTTP; every other route asks models."""


def scope_of_method(path: str) -> Scope | None:
    """What a gRPC method needs."""
    return METHOD_SCOPES.get(path, Scope.ADMIN)


def scope_of_route(path: str) -> Scope | None:
    """What an HTTP route needs."""
    return ROUTE_SCOPES.get(path, Scope.INFERENCE)
