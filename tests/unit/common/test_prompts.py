"""Prompts written out from whole bodies, as a runner sees them, and from parsed ones, as a router
does: the bytes are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes
from forebay_common.prompts import generate_prompt, openai_prompt
from forebay_router.core.generate import check_generate
from forebay_router.core.openai import PATHS, check_openai

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "水是什么?"}, {"type": "text", "text": "?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "ok", "tool_call_id": "1"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TALK}),
    (CHAT, {"messages": TALK, "tools": [TOOL, TOOL], "temperature": 0.5, "unknown": "é"}),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (COMPLETIONS, {"prompt": "Once upon a time \ud83c\udf0a"}),
    (COMPLETIONS, {"prompt": ["first", "second"]}),
    (COMPLETIONS, {"prompt": [1, 2, 70000]}),
    (COMPLETIONS, {"prompt": [[3, 4], [5]]}),
    (RESPONSES, {"input": "hello", "instructions": "Be brief.", "tools": [TOOL]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "output": "done"},
            ]
        },
    ),
    (MESSAGES, {"messages": TALK[1:2], "system": "Be brief.", "max_tokens": 5}),
    (MESSAGES, {"messages": TALK[1:2], "system": [{"type": "text", "text": "x"}], "max_tokens": 5}),
]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("path", "fields"), BODIES)
def test_router_and_runner_write_a_body_out_the_same(
    path: str, fields: dict[str, Any], spaced: bool
) -> None:
    separators = (" , ", " : ") if spaced else (",", ":")
    body = json.dumps({"model": "m", **fields}, separators=separators).encode()
    written = check_openai(path, body).prompt.prefix_bytes()
    assert written
    assert openai_prompt(path, body) == written


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "Once"},
        {"token_ids": inference.TokenIds(ids=[1, 2, 3])},
        {
            "messages": inference.ChatMessages(
                messages=[inference.ChatMessage(role="user", content="hi")]
            )
        },
    ],
)
def test_router_and_runner_write_a_message_out_the_same(prompt: dict[str, Any]) -> None:
    request = inference.GenerateRequest(model="m", **prompt)
    written = check_generate(request).prompt.prefix_bytes()
    assert written
    assert generate_prompt(inference.GenerateRequest.FromString(request.SerializeToString())) == (
        written
    )


def test_prompts_are_written_as_their_kind() -> None:
    assert openai_prompt(COMPLETIONS, b'{"prompt": "a"}') == text_bytes("a")
    assert openai_prompt(COMPLETIONS, b'{"prompt": ["a", "b"]}') == text_bytes("a")
    assert openai_prompt(COMPLETIONS, b'{"prompt": [1, 2]}') == token_bytes([1, 2])
    assert openai_prompt(COMPLETIONS, b'{"prompt": [[1, 2], [3]]}') == token_bytes([1, 2])
    talk = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert openai_prompt(CHAT, talk) == chat_bytes([("user", ("a",))])
    assert openai_prompt(MESSAGES, talk) == chat_bytes([("user", ("a",))])
    assert openai_prompt(RESPONSES, b'{"input": "a"}') == chat_bytes([("user", ("a",))])


@pytest.mark.parametrize("tools", [[TOOL], [TOOL, TOOL]])
def test_tools_come_first_and_stand_as_they_were_written(tools: list[Any]) -> None:
    written = ",".join(json.dumps(tool) for tool in tools).encode()
    body = json.dumps({"messages": TALK, "tools": tools}).encode()
    plain = openai_prompt(CHAT, json.dumps({"messages": TALK}).encode())
    assert openai_prompt(CHAT, body) == chat_bytes([], tools=written) + plain


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b'{"prompt": 1}'),
        (COMPLETIONS, b'{"prompt": [-1]}'),
        (COMPLETIONS, b'{"prompt": [4294967296]}'),
        (COMPLETIONS, b'{"prompt": []}'),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": [{"content": "a"}]}'),
        (CHAT, b'{"messages": [], "tools": ["\xff"]}'),
        (CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ],
)
def test_what_no_path_takes_is_no_prompt(path: str, body: bytes) -> None:
    assert openai_prompt(path, body) == b""


def test_only_what_generates_has_a_prompt() -> None:
    body = json.dumps({"messages": TALK, "prompt": "a", "input": "a"}).encode()
    assert {path for path in PATHS if openai_prompt(path, body)} == {
        CHAT,
        COMPLETIONS,
        RESPONSES,
        MESSAGES,
    }
