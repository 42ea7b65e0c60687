import os

import pytest
from forebay_common.metadata import Usage, request_id_from, texts
from hypothesis import given
from hypothesis import strategies as st

_counts = st.integers(min_value=0, max_value=2**40)


@given(_counts, _counts, _counts)
def test_usage_survives_its_encoding(prompt: int, completion: int, cached: int) -> None:
    usage = Usage(prompt, completion, cached)
    assert Usage.decode(usage.encode()) == usage


@given(st.text(max_size=20))
def test_a_malformed_usage_is_none_and_never_an_error(value: str) -> None:
    decoded = Usage.decode(value)
    assert decoded is None or value.count(",") == 2


def test_usage_of_more_digits_than_can_be_tokens_is_malformed() -> None:
    assert Usage.decode("9" * 5000 + ",1,1") is None


@pytest.mark.parametrize("value", [None, "", "a b", "a\nb", "x" * 129, "é"])
def test_a_request_id_that_could_do_harm_is_replaced(value: str | None) -> None:
    made = request_id_from(value)
    assert made != value
    assert made.startswith("req-")


def test_a_harmless_request_id_is_kept() -> None:
    assert request_id_from("chat:42_a.b-c") == "chat:42_a.b-c"


def test_a_forked_process_makes_ids_of_its_own() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, request_id_from(None).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as sent:
        assert sent.read() != request_id_from(None)


def test_binary_metadata_is_left_out() -> None:
    assert texts((("a", "1"), ("b-bin", b"2"), ("a", "3"))) == {"a": "3"}
