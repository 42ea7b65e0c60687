"""What a call can fail with: one class per thing a caller would do differently.

Every class is a `ForebayError`, whose `reason` is the exact word of the contract, and whose
`retry_after_s` is set where the fleet said how long to wait.
"""

# The names say what happened, as httpx's and grpc's own do; a suffix would only repeat the base.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Mapping

import grpc
from forebay_common.errors import ForebayError, Reason, from_rpc_error


class InvalidRequest(ForebayError):
    """The request itself is wrong; `param` names the field where one is to blame."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model's context."""


class Unsupported(InvalidRequest):
    """This hop, model or back end cannot do what was asked."""


class NotFound(ForebayError):
    """What the request names does not exist."""


class ModelNotFound(NotFound):
    """No model, version or alias of that name exists."""


class Conflict(ForebayError):
    """The request contradicts what is stored: read it again, then decide."""


class NotAllowed(ForebayError):
    """The API key is missing, not known, expired or revoked, or may not do this."""


class RateLimited(ForebayError):
    """The tenant's limit is reached; wait `retry_after_s` seconds."""


class Overloaded(ForebayError):
    """No replica can take the request now; wait `retry_after_s` seconds, where given."""


class DeadlineExceeded(ForebayError):
    """The call's `timeout_s` passed; the engine has been told to stop."""


class Cancelled(ForebayError):
    """The call was cancelled, here or by a hop."""


class ReplicaLost(ForebayError):
    """The replica died, and the fleet could not continue the answer elsewhere."""


class Unreachable(ForebayError):
    """Nobody answers at the address, or the connection to it broke."""


class ServerFault(ForebayError):
    """Something failed on the other side; the request is not to blame."""


CLASSES: Mapping[Reason, type[ForebayError]] = {
    Reason.INVALID_ARGUMENT: InvalidRequest,
    Reason.BODY_TOO_LARGE: InvalidRequest,
    Reason.HEADERS_TOO_LARGE: InvalidRequest,
    Reason.ROUTE_NOT_FOUND: InvalidRequest,
    Reason.METHOD_NOT_ALLOWED: InvalidRequest,
    Reason.ARTIFACT_INVALID: InvalidRequest,
    Reason.INSUFFICIENT_MEMORY: InvalidRequest,
    Reason.CONTEXT_LENGTH_EXCEEDED: ContextLengthExceeded,
    Reason.UNSUPPORTED: Unsupported,
    Reason.MODEL_NOT_FOUND: ModelNotFound,
    Reason.POOL_NOT_FOUND: NotFound,
    Reason.REQUEST_NOT_FOUND: NotFound,
    Reason.CONFLICT: Conflict,
    Reason.VERSION_IMMUTABLE: Conflict,
    Reason.VERSION_IN_USE: Conflict,
    Reason.STALE_FENCE: Conflict,
    Reason.NO_REPLICA: Overloaded,
    Reason.QUEUE_FULL: Overloaded,
    Reason.DRAINING: Overloaded,
    Reason.MODEL_NOT_LOADED: Overloaded,
    Reason.DEADLINE_EXCEEDED: DeadlineExceeded,
    Reason.CANCELLED: Cancelled,
    Reason.SLOW_READER: Cancelled,
    Reason.REPLICA_LOST: ReplicaLost,
    Reason.UNAUTHENTICATED: NotAllowed,
    Reason.PERMISSION_DENIED: NotAllowed,
    Reason.RATE_LIMITED: RateLimited,
    Reason.QUARANTINED: InvalidRequest,
    Reason.KEY_NOT_FOUND: NotFound,
    Reason.TENANT_NOT_FOUND: NotFound,
    Reason.INTERNAL: ServerFault,
    Reason.LOAD_FAILED: ServerFault,
    Reason.STORE_UNAVAILABLE: ServerFault,
}


def typed(error: ForebayError) -> ForebayError:
    """The same error as the class of its reason."""
    # A reason of a newer fleet still is a ForebayError.
    cls = CLASSES.get(error.reason, ForebayError)
    return cls(error.reason, error.message, param=error.param, retry_after_s=error.retry_after_s)


def from_call(error: grpc.RpcError, address: str) -> ForebayError:
    """Read the status that a call to `address` ended with."""
    if _is_unreachable(error):
        return Unreachable(
            Reason.REPLICA_LOST, f"Nobody answers at {address}, or the connection broke."
        )
    return typed(from_rpc_error(error))


def _is_unreachable(error: grpc.RpcError) -> bool:
    # A hop that refuses says why in details; gRPC itself, without a peer, cannot.
    if not isinstance(error, grpc.aio.AioRpcError) and not isinstance(error, grpc.Call):
        return False
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return all(key != "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
