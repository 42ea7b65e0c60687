"""Paths beside chat, completions and embeddings: each with its own protocol's errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from forebay_common.errors import Reason
from forebay_router.core.openai import PATHS

from .conftest import (
    CHAT,
    WAIT_S,
    RunningRouter,
    Script,
    StandIn,
    StartStandIn,
    a_refusal,
)

pytestmark = pytest.mark.integration

TURNS = [{"role": "user", "content": "hello"}]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    "/v1/completions": {"prompt": "hello"},
    "/v1/embeddings": {"input": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": TURNS, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/pooling": {"input": "hello"},
    "/classify": {"input": "hello"},
    "/rerank": {"query": "hello", "documents": ["a"]},
    "/v1/rerank": {"query": "hello", "documents": ["a"]},
    "/v2/rerank": {"query": "hello", "documents": ["a"]},
    "/score": {"text_1": "hello", "text_2": "a"},
    "/v1/score": {"text_1": "hello", "text_2": "a"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture
async def stand_in(start_stand_in: StartStandIn) -> StandIn:
    return await start_stand_in()


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        router.url, timeout=aiohttp.ClientTimeout(total=WAIT_S)
    ) as session:
        yield session


def a_body(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "chat", **BODIES[path], **fields}


async def test_every_path_reaches_the_replica_as_it_was_sent(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    assert set(BODIES) == PATHS
    for count, path in enumerate(sorted(PATHS), start=1):
        async with http.post(path, json=a_body(path, unknown={"kept": [1]})) as answer:
            assert answer.status == 200
            await answer.json()
        seen = await stand_in.arrival(count)
        assert seen.request.path == path
        assert json.loads(seen.request.body) == a_body(path, unknown={"kept": [1]})


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nope"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
    ],
)
async def test_a_refusal_has_anthropics_shape(
    stand_in: StandIn,
    http: aiohttp.ClientSession,
    *,
    fields: dict[str, Any],
    status: int,
    kind: str,
) -> None:
    async with http.post(MESSAGES, json=a_body(MESSAGES, **fields)) as answer:
        document = await answer.json()
        assert (answer.status, set(document)) == (status, {"type", "error"})
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
        assert document["error"]["type"] == kind


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (Reason.QUEUE_FULL, 503, "overloaded_error"),
        (Reason.DEADLINE_EXCEEDED, 504, "timeout_error"),
        (Reason.INTERNAL, 500, "api_error"),
        (Reason.CONTEXT_LENGTH_EXCEEDED, 400, "invalid_request_error"),
    ],
)
async def test_a_replicas_refusal_has_it_too(
    stand_in: StandIn, http: aiohttp.ClientSession, *, reason: Reason, status: int, kind: str
) -> None:
    stand_in.usual = a_refusal(reason)
    async with http.post(MESSAGES, json=a_body(MESSAGES)) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["type"] == kind


async def test_a_wrong_method_has_it_too(http: aiohttp.ClientSession) -> None:
    async with http.get(MESSAGES) as answer:
        # No endpoint is served under it, so nobody knows which protocol was meant.
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_fails_ends_with_its_protocols_event(
    stand_in: StandIn, http: aiohttp.ClientSession, path: str
) -> None:
    stand_in.usual = Script(tokens=2, error=a_refusal(Reason.INTERNAL).error)
    async with http.post(path, json=a_body(path, stream=True)) as answer:
        assert answer.status == 200
        last = (await answer.text()).rstrip().split("\n\n")[-1]
    name, _, data = last.rpartition("data: ")
    event = json.loads(data)
    if path == CHAT:
        assert (name, set(event)) == ("", {"error"})
        return
    assert (name, event["type"]) == ("event: error\n", "error")
    if path == RESPONSES:
        assert event["code"] == event["error"]["code"] == "internal_error"
        assert event["message"] == event["error"]["message"]
    else:
        assert event["error"]["type"] == "api_error"


async def test_openais_client_raises_what_ends_a_responses_stream(
    router: RunningRouter, stand_in: StandIn
) -> None:
    stand_in.usual = Script(tokens=2, error=a_refusal(Reason.INTERNAL).error)
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
    ) as client:
        stream = await client.responses.create(model="chat", input="hello", stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
    assert caught.value.code == "internal_error"


async def test_what_answers_would_have_to_be_kept_for_is_refused(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    for field, value in (("previous_response_id", "resp_1"), ("background", True)):
        async with http.post(RESPONSES, json=a_body(RESPONSES, **{field: value})) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, "unsupported", field)
    assert stand_in.seen == []


async def test_headers_of_the_ecosystem_are_taken_or_left(
    stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    headers = {
        "x-request-id": "mine",
        "OpenAI-Organization": "org",
        "OpenAI-Project": "project",
        "OpenAI-Beta": "assistants=v2",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "tools-2024-04-04",
        "X-Request-Timeout": "soon",
        "x-stainless-timeout": "600",
        "x-stainless-retry-count": "0",
        "Authorization": "Bearer unused",
        "x-api-key": "unused",
        "Content-Type": "text/plain",
    }
    async with http.post(CHAT, data=json.dumps(a_body(CHAT)), headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "mine"
    seen = await stand_in.arrival()
    assert seen.metadata["x-request-id"] == "mine"
    # A key is for the router alone.
    assert "unused" not in " ".join(seen.metadata.values())


async def test_models_answer_head_as_get(
    router: RunningRouter, stand_in: StandIn, http: aiohttp.ClientSession
) -> None:
    async with http.post(CHAT, json=a_body(CHAT)) as answer:
        assert answer.status == 200
    for path in ("/v1/models", "/v1/models/chat"):
        async with http.get(path) as whole, http.head(path) as head:
            assert (whole.status, head.status) == (200, 200)
            assert head.headers["content-length"] == str(len(await whole.read()))
            assert await head.read() == b""
