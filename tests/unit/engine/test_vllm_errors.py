"""vLLM's refusals become ours, without the caller's words."""

import json

import pytest
from forebay_common.errors import Reason
from forebay_engine.runner.vllm.errors import from_answer, refuse

REQUEST = json.dumps({"messages": [{"role": "user", "content": "my secret plan for world"}]})


def an_answer(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": param, "code": 400}}).encode()


def test_context_length_has_its_own_reason() -> None:
    error = from_answer(
        400,
        an_answer(
            "This model's maximum context length is 2048 tokens. However, your prompt contains at "
            "least 2049 input tokens. (parameter=input_tokens, value=2049)"
        ),
        b"",
    )
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert error.message.endswith("2049 input tokens.")


def test_validation_error_becomes_field_and_problem() -> None:
    error = from_answer(
        400,
        an_answer(
            "1 validation error:\n  {'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input "
            "should be a valid list', 'input': 'my secret plan for world'}",
            "body.messages",
        ),
        REQUEST.encode(),
    )
    assert error.reason is Reason.INVALID_ARGUMENT
    assert error.param == "messages"
    assert error.message == "'messages': Input should be a valid list."


@pytest.mark.parametrize(
    "message",
    [
        "Template failed on 'my secret plan for world'",
        "value my secret plan for the ... is wrong",
        "2 validation errors for ValidatorIterator\n0.X\n  bad [input_value='my secret plan']",
    ],
)
def test_message_that_repeats_the_request_is_replaced(message: str) -> None:
    error = from_answer(400, an_answer(message), REQUEST.encode())
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "secret" not in error.message


def test_field_is_read_from_a_plain_message() -> None:
    message = "n must be at most 128, got 1000. To increase this limit, set the X variable."
    error = from_answer(400, an_answer(message), b'{"n": 1000}')
    assert (error.param, error.message) == ("n", "n must be at most 128, got 1000.")


def test_dumped_objects_are_left_out() -> None:
    error = refuse("You must use one kind: {'json': None, 'regex': None}", param=None)
    assert error.message == "You must use one kind"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, Reason.UNSUPPORTED),
        (405, Reason.METHOD_NOT_ALLOWED),
        (501, Reason.UNSUPPORTED),
        (503, Reason.QUEUE_FULL),
        (500, Reason.INTERNAL),
        (418, Reason.INTERNAL),
    ],
)
def test_other_statuses_have_their_reasons(status: int, reason: Reason) -> None:
    assert from_answer(status, an_answer("something"), b"").reason is reason


@pytest.mark.parametrize("body", [b"", b"oops", b"[]", b'{"error": "x"}'])
def test_unreadable_answers_are_still_errors(body: bytes) -> None:
    assert from_answer(400, body, b"").reason is Reason.INVALID_ARGUMENT
