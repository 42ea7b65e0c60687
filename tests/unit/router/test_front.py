"""What the HTTP front passes on of a request's headers."""

from typing import Any, cast

import pytest
from forebay_common import metadata as md
from forebay_router.adapters.openai import OpenAIFront
from forebay_router.gate import OpenGate
from forebay_wire.core.http1 import HttpLimits, RequestHead, read_head
from forebay_wire.policy import Head
from prometheus_client import CollectorRegistry

CHAT = "/v1/chat/completions"


class FakeExchange:
    """A request, and nobody who reads its answer."""

    def __init__(self, headers: dict[str, str]) -> None:
        fields = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        self.head = RequestHead("POST", CHAT, fields, 2, False, True, False)
        self.body = b"{}"
        self.request_id = "mine"
        self.listener: Any = None


class FakeRelay:
    """Keeps the heads that it gets."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    def call(self, head: Head, message: bytes, caller: Any) -> Any:
        self.heads.append(head)
        return object()


def metadata_of(**headers: str) -> dict[str, str]:
    relay = FakeRelay()
    front = OpenAIFront(
        relay,
        cast("Any", None),
        CollectorRegistry(),
        HttpLimits(),
        not_ready=lambda: (),
        gate=OpenGate(),
        clock=lambda: 0.0,
    )
    endpoint = front.server.find(read_head(b"POST", CHAT.encode(), "1.1", [(b"host", b"x")]))
    endpoint.answer(
        cast("Any", FakeExchange({key.replace("_", "-"): v for key, v in headers.items()}))
    )
    (head,) = relay.heads
    return head.metadata


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ({}, None),
        ({"authorization": "Bearer a"}, "Bearer a"),
        ({"x_api_key": "b"}, "Bearer b"),
        ({"authorization": "Bearer a", "x_api_key": "b"}, "Bearer a"),
    ],
)
def test_a_key_may_come_as_a_bearer_token_or_as_anthropics_clients_send_it(
    headers: dict[str, str], authorization: str | None
) -> None:
    assert metadata_of(**headers).get(md.AUTHORIZATION) == authorization


def test_other_headers_are_left_behind() -> None:
    assert metadata_of(openai_organization="x", x_stainless_timeout="5", user_agent="z") == {}
