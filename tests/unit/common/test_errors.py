import grpc
import pytest
from forebay_common.errors import (
    TABLE,
    ForebayError,
    Reason,
    from_rpc_error,
    to_rpc_status,
)


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
