import grpc
import pytest
from forebay_common.errors import (
    TABLE,
    ForebayError,
    Reason,
    from_rpc_error,
    from_status,
    to_rpc_status,
    to_trailers,
)
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2


def _as_peer_sees_it(error: ForebayError) -> grpc.aio.AioRpcError:
    status = to_rpc_status(error)
    return grpc.aio.AioRpcError(
        status.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*status.trailing_metadata),
        details=status.details,
    )


def test_every_reason_has_a_row() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_survives_a_hop_unchanged(reason: Reason) -> None:
    sent = ForebayError(reason, "What is wrong.", param="model", retry_after_s=1.5)
    seen = from_rpc_error(_as_peer_sees_it(sent))
    assert (seen.reason, seen.message) == (reason, "What is wrong.")
    assert (seen.param, seen.retry_after_s) == ("model", 1.5)


@pytest.mark.parametrize("reason", list(Reason))
def test_trailers_and_grpcs_own_status_say_the_same(reason: Reason) -> None:
    sent = ForebayError(reason, "What is wrong.", param="model", retry_after_s=1.5)
    status = to_rpc_status(sent)
    code, message, details = to_trailers(sent)
    assert (code, message) == (status.code.value[0], status.details)
    assert dict(status.trailing_metadata) == {"grpc-status-details-bin": details}
    seen = from_status(code, details)
    assert (seen.reason, seen.message) == (reason, "What is wrong.")
    assert (seen.param, seen.retry_after_s) == ("model", 1.5)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, Reason.CANCELLED),
        (3, Reason.INVALID_ARGUMENT),
        (4, Reason.DEADLINE_EXCEEDED),
        (8, Reason.BODY_TOO_LARGE),
        (12, Reason.UNSUPPORTED),
        (14, Reason.REPLICA_LOST),
        (2, Reason.INTERNAL),
        (99, Reason.INTERNAL),
        (-1, Reason.INTERNAL),
    ],
)
@pytest.mark.parametrize("details", [None, b"", b"\xff\xff", b"\x12\x02\xff\xfe"])
def test_a_bare_or_malformed_status_is_read_by_its_code(
    code: int, reason: Reason, details: bytes | None
) -> None:
    assert from_status(code, details).reason is reason


def test_malformed_details_inside_a_well_formed_status_do_not_raise() -> None:
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    details = status_pb2.Status(code=14, message="10.1.2.3", details=[broken]).SerializeToString()
    seen = from_status(code_pb2.UNAVAILABLE, details)
    assert seen.reason is Reason.REPLICA_LOST
    assert "10.1.2.3" not in seen.message


@pytest.mark.parametrize(("seconds", "expected"), [(-5, 0.0), (2**62, 86_400.0)])
def test_an_absurd_time_to_wait_is_bounded_and_can_be_passed_on(
    seconds: int, expected: float
) -> None:
    info, retry = any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="forebay"))
    delay = duration_pb2.Duration(seconds=seconds)
    retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    details = status_pb2.Status(code=8, message="x", details=[info, retry]).SerializeToString()
    seen = from_status(code_pb2.RESOURCE_EXHAUSTED, details)
    assert seen.retry_after_s == expected
    assert from_status(*to_trailers(seen)[::2]).retry_after_s == expected


@pytest.mark.parametrize("reason", list(Reason))
def test_a_client_error_is_never_the_replicas_fault(reason: Reason) -> None:
    status = TABLE[reason]
    if status.http < 500:
        assert not status.replica_fault
    if status.http == 503:
        assert status.retryable


def test_a_foreign_status_is_read_by_its_code_and_its_text_is_dropped() -> None:
    foreign = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="failed to connect to ipv4:10.1.2.3:99",
    )
    seen = from_rpc_error(foreign)
    assert seen.reason is Reason.REPLICA_LOST
    assert "10.1.2.3" not in seen.message


def test_openai_shape() -> None:
    body = ForebayError(Reason.MODEL_NOT_FOUND, "No such model.", param="model").openai_body()
    assert body == {
        "error": {
            "message": "No such model.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "header"),
    [
        (Reason.NO_REPLICA, None, "1"),
        (Reason.NO_REPLICA, 2.2, "3"),
        (Reason.NO_REPLICA, 0.01, "1"),
        (Reason.INVALID_ARGUMENT, None, None),
    ],
)
def test_retry_after_is_whole_seconds(
    reason: Reason, retry_after_s: float | None, header: str | None
) -> None:
    error = ForebayError(reason, "x", retry_after_s=retry_after_s)
    assert error.retry_after_header() == header
