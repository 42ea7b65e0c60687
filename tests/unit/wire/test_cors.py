"""What browsers are told about pages of other origins."""

from __future__ import annotations

import pytest
from forebay_wire.core.cors import Cors
from forebay_wire.core.http1 import RequestHead, read_head

PAGE = "https://chat.example.com"


def a_head(method: bytes = b"GET", **headers: str) -> RequestHead:
    fields = [(b"host", b"x")]
    fields += [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return read_head(method, b"/v1/models", "1.1", fields)


def test_a_page_that_is_allowed_may_read_the_answer_and_no_other() -> None:
    cors = Cors([PAGE], exposed=["X-Request-Id", "Retry-After"])
    told = dict(cors.answer(a_head(origin=PAGE)))
    assert told == {
        "Access-Control-Allow-Origin": PAGE,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        "Vary": "Origin",
    }
    for origin in ("https://evil.example", PAGE + ".evil.example", "null", PAGE + ":8443", ""):
        assert cors.answer(a_head(origin=origin)) == (("Vary", "Origin"),)
    assert cors.answer(a_head()) == (("Vary", "Origin"),)


def test_all_pages_may_where_the_star_says_so() -> None:
    told = dict(Cors(["*"]).answer(a_head(origin="https://any.example")))
    assert told["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in told


def test_a_preflight_is_told_what_it_asked_for() -> None:
    cors = Cors([PAGE])
    head = a_head(
        b"OPTIONS",
        origin=PAGE,
        access_control_request_method="POST",
        access_control_request_headers="authorization, content-type",
    )
    assert cors.asked(head) == "POST"
    assert dict(cors.preflight(head)) == {
        "Access-Control-Allow-Methods": "POST",
        "Access-Control-Max-Age": "600",
        "Access-Control-Allow-Headers": "authorization, content-type",
    }


def test_what_is_no_preflight_is_none() -> None:
    cors = Cors([PAGE])
    assert cors.asked(a_head(b"OPTIONS", origin=PAGE)) is None
    assert cors.asked(a_head(b"OPTIONS", access_control_request_method="POST")) is None
    assert cors.asked(a_head(b"POST", origin=PAGE, access_control_request_method="POST")) is None


@pytest.mark.parametrize("origin", ["chat.example.com", "https://", PAGE + "/path", "ftp://x", ""])
def test_what_is_no_origin_is_refused_in_plain_words(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        Cors([origin])
