"""Lets callers in by their keys, or everybody where the router is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from forebay_common.apikeys import OPERATOR_PREFIX, KeySecrets
from forebay_common.errors import ForebayError, Reason

from forebay_router.core.access import (
    ALL_SCOPES,
    OPERATOR,
    ROUTERS,
    Identity,
    Keyring,
    Scope,
    Tenant,
    bearer_of,
    scope_of_method,
)
from forebay_router.core.refusal import RefusedError

OPEN_TENANT = "default"


class Gate(Protocol):
    """Who a caller is."""

    def identify(self, metadata: Mapping[str, str]) -> Identity:
        """Whose key a call carries.

        Raises:
            ForebayError: UNAUTHENTICATED, or STORE_UNAVAILABLE while no key is known yet.
        """
        ...

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        ...


class OpenGate:
    """Everybody is the tenant `default`, with all scopes. For a machine's own use alone."""

    is_open = True

    def __init__(self) -> None:
        self._everybody = Identity(Tenant(OPEN_TENANT), "", ALL_SCOPES | ROUTERS.scopes)

    def identify(self, metadata: Mapping[str, str]) -> Identity:
        """See `Gate`."""
        return self._everybody


class KeyGate:
    """Callers show API keys, routers what they make of the fleet's secret."""

    is_open = False

    def __init__(
        self,
        keyring: Callable[[], Keyring],
        secrets: KeySecrets,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._keyring = keyring
        self._secrets = secrets
        self._wall_clock = wall_clock

    def identify(self, metadata: Mapping[str, str]) -> Identity:
        """See `Gate`."""
        try:
            text = bearer_of(metadata)
            if text.startswith("fbr-") and self._secrets.is_router_token(text):
                return ROUTERS
            if text.startswith(OPERATOR_PREFIX) and self._secrets.is_operator_token(text):
                return OPERATOR
            return self._keyring().identify(text, self._wall_clock())
        except RefusedError as refused:
            raise as_error(refused) from None


def authorize(gate: Gate, path: str, metadata: Mapping[str, str]) -> None:
    """Check a call of a method that is not relayed.

    Raises:
        ForebayError: UNAUTHENTICATED or PERMISSION_DENIED.
    """
    scope = scope_of_method(path)
    if scope is not None:
        require(gate.identify(metadata), scope)


def require(identity: Identity, scope: Scope) -> None:
    """Raises ForebayError PERMISSION_DENIED where an identity lacks a scope."""
    try:
        identity.require(scope)
    except RefusedError as refused:
        raise as_error(refused) from None


def as_error(refused: RefusedError) -> ForebayError:
    """A core's refusal as the error that crosses hops."""
    return ForebayError(Reason(refused.reason), refused.message, param=refused.param)
