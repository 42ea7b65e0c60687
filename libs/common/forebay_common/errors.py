"""One table from reason to gRPC status, HTTP status and OpenAI error.

`ForebayError` is the only error that crosses a hop. Its message is written for the caller: what is
wrong and what to do; it never holds a path, an address, a stack or a prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from forebay_common.metadata import Metadata

DOMAIN = "forebay"
_RETRY_AFTER_S_MAX = 86_400.0


class Reason(StrEnum):
    """Why a request was not answered. Low in number, stable, and the same word everywhere."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    HEADERS_TOO_LARGE = "HEADERS_TOO_LARGE"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    UNSUPPORTED = "UNSUPPORTED"
    NO_REPLICA = "NO_REPLICA"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    REPLICA_LOST = "REPLICA_LOST"
    DRAINING = "DRAINING"
    INTERNAL = "INTERNAL"
    ARTIFACT_INVALID = "ARTIFACT_INVALID"
    INSUFFICIENT_MEMORY = "INSUFFICIENT_MEMORY"
    LOAD_FAILED = "LOAD_FAILED"
    MODEL_NOT_LOADED = "MODEL_NOT_LOADED"
    VERSION_IMMUTABLE = "VERSION_IMMUTABLE"
    VERSION_IN_USE = "VERSION_IN_USE"
    CONFLICT = "CONFLICT"
    POOL_NOT_FOUND = "POOL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    STALE_FENCE = "STALE_FENCE"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    SLOW_READER = "SLOW_READER"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RATE_LIMITED = "RATE_LIMITED"
    QUARANTINED = "QUARANTINED"
    KEY_NOT_FOUND = "KEY_NOT_FOUND"
    TENANT_NOT_FOUND = "TENANT_NOT_FOUND"


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What one reason becomes at the border."""

    grpc: grpc.StatusCode
    http: int
    openai_type: str
    openai_code: str | None
    retryable: bool
    """The same request may succeed a little later, or on another replica."""
    replica_fault: bool
    """Speaks against the replica that gave it, not against the caller or the load."""


_BAD = "invalid_request_error"
_SERVER = "server_error"
_BUSY = "overloaded_error"


def _row(
    code: grpc.StatusCode,
    http: int,
    openai_type: str,
    openai_code: str | None,
    *,
    retryable: bool = False,
    replica_fault: bool = False,
) -> Status:
    return Status(code, http, openai_type, openai_code, retryable, replica_fault)


_Code = grpc.StatusCode
TABLE: Mapping[Reason, Status] = {
    Reason.INVALID_ARGUMENT: _row(_Code.INVALID_ARGUMENT, 400, _BAD, None),
    Reason.BODY_TOO_LARGE: _row(_Code.RESOURCE_EXHAUSTED, 413, _BAD, "body_too_large"),
    Reason.HEADERS_TOO_LARGE: _row(_Code.RESOURCE_EXHAUSTED, 431, _BAD, "headers_too_large"),
    Reason.MODEL_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "model_not_found"),
    Reason.ROUTE_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "unknown_url"),
    Reason.METHOD_NOT_ALLOWED: _row(_Code.UNIMPLEMENTED, 405, _BAD, "method_not_allowed"),
    Reason.CONTEXT_LENGTH_EXCEEDED: _row(
        _Code.INVALID_ARGUMENT, 400, _BAD, "context_length_exceeded"
    ),
    Reason.UNSUPPORTED: _row(_Code.FAILED_PRECONDITION, 400, _BAD, "unsupported"),
    Reason.NO_REPLICA: _row(_Code.UNAVAILABLE, 503, _BUSY, "no_replica", retryable=True),
    Reason.QUEUE_FULL: _row(_Code.RESOURCE_EXHAUSTED, 503, _BUSY, "queue_full", retryable=True),
    Reason.DEADLINE_EXCEEDED: _row(
        _Code.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded"
    ),
    Reason.CANCELLED: _row(_Code.CANCELLED, 499, _BAD, "cancelled"),
    Reason.REPLICA_LOST: _row(
        _Code.UNAVAILABLE, 502, _SERVER, "replica_lost", retryable=True, replica_fault=True
    ),
    Reason.DRAINING: _row(_Code.UNAVAILABLE, 503, _BUSY, "draining", retryable=True),
    Reason.INTERNAL: _row(_Code.INTERNAL, 500, _SERVER, "internal_error", replica_fault=True),
    Reason.ARTIFACT_INVALID: _row(_Code.FAILED_PRECONDITION, 400, _BAD, "artifact_invalid"),
    Reason.INSUFFICIENT_MEMORY: _row(_Code.FAILED_PRECONDITION, 400, _BAD, "insufficient_memory"),
    Reason.LOAD_FAILED: _row(_Code.ABORTED, 500, _SERVER, "load_failed", replica_fault=True),
    Reason.MODEL_NOT_LOADED: _row(
        _Code.UNAVAILABLE, 503, _BUSY, "model_not_loaded", retryable=True
    ),
    Reason.VERSION_IMMUTABLE: _row(_Code.FAILED_PRECONDITION, 409, _BAD, "version_immutable"),
    Reason.VERSION_IN_USE: _row(_Code.FAILED_PRECONDITION, 409, _BAD, "version_in_use"),
    Reason.CONFLICT: _row(_Code.ABORTED, 409, _BAD, "conflict", retryable=True),
    Reason.POOL_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "pool_not_found"),
    Reason.REQUEST_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "request_not_found"),
    Reason.STALE_FENCE: _row(_Code.FAILED_PRECONDITION, 409, _BAD, "stale_fence"),
    Reason.STORE_UNAVAILABLE: _row(
        _Code.UNAVAILABLE, 503, _SERVER, "store_unavailable", retryable=True
    ),
    # What is exhausted is the room to keep an answer that its caller does not take.
    Reason.SLOW_READER: _row(_Code.RESOURCE_EXHAUSTED, 408, _BAD, "slow_reader"),
    Reason.UNAUTHENTICATED: _row(_Code.UNAUTHENTICATED, 401, _BAD, "invalid_api_key"),
    Reason.PERMISSION_DENIED: _row(_Code.PERMISSION_DENIED, 403, _BAD, "permission_denied"),
    Reason.RATE_LIMITED: _row(
        _Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded", retryable=True
    ),
    # The request has ended several runners: it is not tried on another.
    Reason.QUARANTINED: _row(_Code.FAILED_PRECONDITION, 422, _BAD, "quarantined"),
    Reason.KEY_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "key_not_found"),
    Reason.TENANT_NOT_FOUND: _row(_Code.NOT_FOUND, 404, _BAD, "tenant_not_found"),
}

# How a peer's bare status reads when it carries no ErrorInfo of ours: a proxy's, a library's, or
# that of a connection that broke.
_BY_CODE: Mapping[int, tuple[Reason, str]] = {
    code_pb2.UNAVAILABLE: (Reason.REPLICA_LOST, "The replica's connection was lost."),
    code_pb2.CANCELLED: (Reason.CANCELLED, "The call was cancelled."),
    code_pb2.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "The deadline passed."),
    code_pb2.INVALID_ARGUMENT: (Reason.INVALID_ARGUMENT, "The request was refused as malformed."),
    code_pb2.RESOURCE_EXHAUSTED: (Reason.BODY_TOO_LARGE, "The message is larger than allowed."),
    code_pb2.UNIMPLEMENTED: (Reason.UNSUPPORTED, "The method is not offered there."),
}


class ForebayError(Exception):
    """A request is refused or has failed, for one reason of the table."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        answer: Metadata = (),
    ) -> None:
        """`answer` is for the caller alone: HTTP headers, or trailing metadata of the call."""
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.answer = answer

    @property
    def status(self) -> Status:
        """The reason's row of the table."""
        return TABLE[self.reason]

    def __repr__(self) -> str:
        return f"ForebayError({self.reason.value}, {self.message!r})"

    def openai_body(self) -> dict[str, Any]:
        """The error as OpenAI's HTTP API shapes it."""
        return {
            "error": {
                "message": self.message,
                "type": self.status.openai_type,
                "param": self.param,
                "code": self.status.openai_code,
            }
        }

    def retry_after_header(self) -> str | None:
        """Whole seconds for `Retry-After`, at least 1; None where waiting does not help."""
        if self.retry_after_s is None:
            return "1" if self.status.http == 503 else None
        return str(max(1, math.ceil(self.retry_after_s)))


def to_rpc_status(error: ForebayError) -> Any:
    """The error as a grpc.Status with ErrorInfo and, where waiting helps, RetryInfo."""
    return rpc_status.to_status(_to_message(error))


def to_trailers(error: ForebayError) -> tuple[int, str, bytes]:
    """The error as `grpc-status`, `grpc-message` (not yet percent-encoded), and
    `grpc-status-details-bin` (not yet base64)."""
    message = _to_message(error)
    return message.code, message.message, message.SerializeToString()


def _to_message(error: ForebayError) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)
    if error.param is not None:
        info.metadata["param"] = error.param
    details = [_pack(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=getattr(code_pb2, error.status.grpc.name), message=error.message, details=details
    )


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ForebayError) -> NoReturn:
    """End a call with the error's status. Trailing metadata set before is kept."""
    status = to_rpc_status(error)
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(status.code, status.details, kept + tuple(status.trailing_metadata))
    raise AssertionError("abort() returned")


def from_rpc_error(error: grpc.RpcError) -> ForebayError:
    """Read a peer's status, by the rules of `from_status`."""
    if not isinstance(error, grpc.aio.AioRpcError) and not isinstance(error, grpc.Call):
        return ForebayError(Reason.INTERNAL, "The call failed.")
    trailing = error.trailing_metadata() or ()
    packed = next((v for k, v in trailing if k == "grpc-status-details-bin"), None)
    number: int = error.code().value[0]
    return from_status(number, packed if isinstance(packed, bytes) else None)


def from_status(code: int, details: bytes | None) -> ForebayError:
    """Read a peer's `grpc-status` and `grpc-status-details-bin`.

    Without our ErrorInfo, or when the details are malformed, the code alone decides, and the peer's
    text is dropped, because a foreign text may hold an address.
    """
    if details is not None:
        error = _from_details(details)
        if error is not None:
            return error
    reason, message = _BY_CODE.get(code, (Reason.INTERNAL, "The replica failed."))
    return ForebayError(reason, message)


def _from_details(packed: bytes) -> ForebayError | None:
    info: error_details_pb2.ErrorInfo | None = None
    retry_after_s: float | None = None
    try:
        status = status_pb2.Status.FromString(packed)
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                delay_s = retry.retry_delay.ToMilliseconds() / 1000
                retry_after_s = min(max(0.0, delay_s), _RETRY_AFTER_S_MAX)
    except DecodeError:
        return None
    if info is None or info.domain != DOMAIN or info.reason not in Reason.__members__:
        return None
    return ForebayError(
        Reason(info.reason),
        status.message,
        param=info.metadata.get("param"),
        retry_after_s=retry_after_s,
    )
