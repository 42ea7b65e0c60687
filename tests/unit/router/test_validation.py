"""What a request must look like."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common.prefixes import chat_bytes, text_bytes, token_bytes
from forebay_router.core.generate import check_embed, check_generate
from forebay_router.core.openai import check_openai
from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import Wanted, digest_of
from hypothesis import given
from hypothesis import strategies as st

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SECRET = "a secret prompt"


def a_chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": SECRET}], **fields}


def a_completion(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": SECRET, **fields}


def an_embedding(**fields: Any) -> dict[str, Any]:
    return {"model": "embed", "input": SECRET, **fields}


def without(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != field}


def refusal(path: str, body: Any) -> RefusedError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RefusedError) as refused:
        check_openai(path, raw)
    assert SECRET not in refused.value.message
    return refused.value


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, without(a_chat(), "model"), "model"),
        (CHAT, without(a_chat(), "messages"), "messages"),
        (CHAT, a_chat(model=7), "model"),
        (CHAT, a_chat(model=""), "model"),
        (CHAT, a_chat(model="m" * 201), "model"),
        (CHAT, a_chat(messages="hello"), "messages"),
        (CHAT, a_chat(messages=[]), "messages"),
        (CHAT, a_chat(messages=[{"content": "x"}]), "messages[0].role"),
        (CHAT, a_chat(messages=[{"role": 1, "content": "x"}]), "messages[0].role"),
        (CHAT, a_chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (
            CHAT,
            a_chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]),
            "messages[0].content[0].text",
        ),
        (CHAT, a_chat(stream="yes"), "stream"),
        (CHAT, a_chat(stream=1), "stream"),
        (CHAT, a_chat(stream_options={"include_usage": "x"}), "stream_options.include_usage"),
        (CHAT, a_chat(n=0), "n"),
        (CHAT, a_chat(n=17), "n"),
        (CHAT, a_chat(max_tokens=0), "max_tokens"),
        (CHAT, a_chat(max_tokens="many"), "max_tokens"),
        (CHAT, a_chat(max_completion_tokens=-1), "max_completion_tokens"),
        (CHAT, a_chat(temperature=2.5), "temperature"),
        (CHAT, a_chat(temperature="hot"), "temperature"),
        (CHAT, a_chat(top_p=0), "top_p"),
        (CHAT, a_chat(presence_penalty=3), "presence_penalty"),
        (CHAT, a_chat(frequency_penalty=-3), "frequency_penalty"),
        (CHAT, a_chat(logprobs=5), "logprobs"),
        (CHAT, a_chat(top_logprobs=21), "top_logprobs"),
        (CHAT, a_chat(stop=["x"] * 17), "stop"),
        (CHAT, a_chat(stop=["x", 1]), "stop[1]"),
        (CHAT, a_chat(seed="one"), "seed"),
        (CHAT, a_chat(top_k="all"), "top_k"),
        (CHAT, a_chat(top_k=-2), "top_k"),
        (CHAT, a_chat(min_p=1.5), "min_p"),
        (CHAT, a_chat(repetition_penalty=0), "repetition_penalty"),
        (CHAT, a_chat(stop_token_ids=[1, "x"]), "stop_token_ids[1]"),
        (CHAT, a_chat(ignore_eos="no"), "ignore_eos"),
        (CHAT, a_chat(parallel_tool_calls=2), "parallel_tool_calls"),
        (CHAT, a_chat(logit_bias={"5": "x"}), "logit_bias[...]"),
        (CHAT, a_chat(tools="none"), "tools"),
        (COMPLETIONS, without(a_completion(), "prompt"), "prompt"),
        (COMPLETIONS, a_completion(prompt=5), "prompt"),
        (COMPLETIONS, a_completion(prompt=[]), "prompt"),
        (COMPLETIONS, a_completion(prompt=["a", 1]), "prompt[1]"),
        (COMPLETIONS, a_completion(prompt=[3, -1]), "prompt"),
        (COMPLETIONS, a_completion(prompt=[3, 1 << 31]), "prompt"),
        (COMPLETIONS, a_completion(prompt=[[]]), "prompt[0]"),
        (COMPLETIONS, a_completion(prompt=[[1], [1, -1]]), "prompt[1]"),
        (COMPLETIONS, a_completion(prompt=["a"] * 2049), "prompt"),
        (COMPLETIONS, a_completion(best_of=17), "best_of"),
        (COMPLETIONS, a_completion(logprobs=21), "logprobs"),
        (EMBEDDINGS, without(an_embedding(), "input"), "input"),
        (EMBEDDINGS, an_embedding(input={}), "input"),
        (EMBEDDINGS, an_embedding(input=[]), "input"),
        (EMBEDDINGS, an_embedding(input=[[1], "a"]), "input[1]"),
        (EMBEDDINGS, an_embedding(dimensions=0), "dimensions"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    error = refusal(path, body)
    assert (error.reason, error.param) == ("INVALID_ARGUMENT", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model":"m"} trailing',
        b"\xff\xfe",
        b'{"model":"m","messages":[{"role":"user"}],"unknown":"\xff"}',
        b'{"model":"m","messages":[{"role":"user"}],"temperature":NaN}',
        b'{"model":"m","messages":[{"role":"user"}],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps(a_chat()).encode("utf-16"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(CHAT, body).reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize("path", ["", "/v1/chat", "/v1/models", "/v1/chat/completions/"])
def test_another_path_is_no_route(path: str) -> None:
    assert refusal(path, a_chat()).reason == "ROUTE_NOT_FOUND"


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        (CHAT, a_chat(), "chat"),
        (CHAT, a_chat(stream=None, n=None, stop=None, max_tokens=None), "chat"),
        (CHAT, a_chat(stream=True, stream_options={"include_usage": True}), "chat"),
        (CHAT, a_chat(vllm_xargs={"a": [1]}, guided_json={}, chat_template_kwargs={}), "chat"),
        (CHAT, a_chat(messages=[{"role": "observation", "content": "x"}]), "chat"),
        (CHAT, a_chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), "chat"),
        (
            CHAT,
            a_chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]),
            "chat",
        ),
        (CHAT, a_chat(temperature=0, top_p=1, n=16, stop=["x"] * 16, top_logprobs=20), "chat"),
        (COMPLETIONS, a_completion(), "chat"),
        (COMPLETIONS, a_completion(prompt=["a", "b"]), "chat"),
        (COMPLETIONS, a_completion(prompt=[1, 2, 3]), "chat"),
        (COMPLETIONS, a_completion(prompt=[[1], [2, 3]]), "chat"),
        (EMBEDDINGS, an_embedding(input=["a"], encoding_format="base64"), "embed"),
    ],
)
def test_a_right_body_passes(path: str, body: dict[str, Any], model: str) -> None:
    assert check_openai(path, json.dumps(body).encode()).model == model


def test_prompts_are_estimated_at_four_characters_a_token() -> None:
    body = a_chat(messages=[{"role": "user", "content": "x" * 400}])
    assert check_openai(CHAT, json.dumps(body).encode()).prompt_tokens == 101
    tokens = json.dumps(a_completion(prompt=[[1, 2], [3]])).encode()
    assert check_openai(COMPLETIONS, tokens).prompt_tokens == 3


@given(st.binary(max_size=200), st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS]))
def test_no_bytes_break_the_check(body: bytes, path: str) -> None:
    try:
        check_openai(path, body)
    except RefusedError as refused:
        assert refused.reason == "INVALID_ARGUMENT"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(["messages", "stream", "n", "stop", "max_tokens", "seed"]), json_values)
def test_whatever_a_field_holds_it_passes_or_is_named(field: str, value: Any) -> None:
    try:
        check_openai(CHAT, json.dumps(a_chat(**{field: value})).encode())
    except RefusedError as refused:
        assert refused.param is not None
        assert refused.param.startswith(field)


def a_generate(**sampling: Any) -> inference.GenerateRequest:
    options = inference.SamplingOptions(**sampling) if sampling else None
    return inference.GenerateRequest(model="chat", text=SECRET, sampling=options)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (inference.GenerateRequest(text="x"), "model"),
        (inference.GenerateRequest(model="m" * 201, text="x"), "model"),
        (inference.GenerateRequest(model="chat"), "prompt"),
        (inference.GenerateRequest(model="chat", token_ids=inference.TokenIds()), "token_ids.ids"),
        (inference.GenerateRequest(model="chat", messages=inference.ChatMessages()), "messages"),
        (
            inference.GenerateRequest(
                model="chat",
                messages=inference.ChatMessages(
                    messages=[
                        inference.ChatMessage(role="user"),
                        inference.ChatMessage(role="wizard"),
                    ]
                ),
            ),
            "messages[1].role",
        ),
        (a_generate(max_tokens=0), "sampling.max_tokens"),
        (a_generate(temperature=-0.1), "sampling.temperature"),
        (a_generate(temperature=float("nan")), "sampling.temperature"),
        (a_generate(top_p=0.0), "sampling.top_p"),
        (a_generate(presence_penalty=2.1), "sampling.presence_penalty"),
        (a_generate(frequency_penalty=-2.1), "sampling.frequency_penalty"),
        (a_generate(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (a_generate(repetition_penalty=float("inf")), "sampling.repetition_penalty"),
        (a_generate(logprobs=21), "sampling.logprobs"),
        (a_generate(stop=["x"] * 17), "sampling.stop"),
        (a_generate(stop=["x", ""]), "sampling.stop[1]"),
    ],
)
def test_a_wrong_field_of_generate_is_named(
    request_: inference.GenerateRequest, param: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        check_generate(request_)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    "request_",
    [
        a_generate(),
        a_generate(max_tokens=1, temperature=0, top_p=1, logprobs=0, stop=["x"] * 16),
        inference.GenerateRequest(model="chat", text=""),
        inference.GenerateRequest(model="chat", token_ids=inference.TokenIds(ids=[1])),
    ],
)
def test_a_right_generate_passes(request_: inference.GenerateRequest) -> None:
    assert check_generate(request_).model == "chat"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (inference.EmbedRequest(inputs=[inference.EmbedInput(text="x")]), "model"),
        (inference.EmbedRequest(model="embed"), "inputs"),
        (inference.EmbedRequest(model="embed", inputs=[inference.EmbedInput()]), "inputs[0]"),
        (
            inference.EmbedRequest(model="embed", inputs=[inference.EmbedInput(text="x")] * 2049),
            "inputs",
        ),
    ],
)
def test_a_wrong_field_of_embed_is_named(request_: inference.EmbedRequest, param: str) -> None:
    with pytest.raises(RefusedError) as refused:
        check_embed(request_)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)


def test_a_right_embed_passes() -> None:
    inputs = [
        inference.EmbedInput(text="x"),
        inference.EmbedInput(token_ids=inference.TokenIds(ids=[1, 2])),
    ]
    assert check_embed(inference.EmbedRequest(model="embed", inputs=inputs)).prompt_tokens == 3


def want(path: str, body: dict[str, Any]) -> Wanted:
    return check_openai(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body", "max_tokens", "answers"),
    [
        (CHAT, a_chat(), None, 1),
        (CHAT, a_chat(max_tokens=7, n=3), 7, 3),
        (CHAT, a_chat(max_tokens=7, max_completion_tokens=5), 5, 1),
        (COMPLETIONS, a_completion(), 16, 1),
        (COMPLETIONS, a_completion(echo=True, max_tokens=0), 0, 1),
        (COMPLETIONS, a_completion(prompt=["a", "b"], n=2, max_tokens=9), 9, 4),
        (COMPLETIONS, a_completion(prompt=[1, 2, 3]), 16, 1),
        (COMPLETIONS, a_completion(prompt=[[1], [2, 3]]), 16, 2),
        (EMBEDDINGS, an_embedding(input=["a", "b"]), 0, 1),
    ],
)
def test_the_tokens_a_request_may_generate_are_known(
    path: str, body: dict[str, Any], max_tokens: int | None, answers: int
) -> None:
    wanted = want(path, body)
    assert (wanted.max_tokens, wanted.answers) == (max_tokens, answers)


def test_the_tokens_a_generate_may_generate_are_known() -> None:
    assert check_generate(a_generate()).max_tokens is None
    assert check_generate(a_generate(temperature=0)).max_tokens is None
    assert check_generate(a_generate(max_tokens=5)).max_tokens == 5
    inputs = [inference.EmbedInput(text="x")]
    assert check_embed(inference.EmbedRequest(model="embed", inputs=inputs)).max_tokens == 0


def test_only_streams_of_tokens_can_be_resumed() -> None:
    assert not want(CHAT, a_chat()).is_resumable
    assert not want(EMBEDDINGS, an_embedding()).is_resumable
    for wanted in (
        want(CHAT, a_chat(stream=True)),
        want(COMPLETIONS, a_completion(stream=True)),
        check_generate(a_generate()),
    ):
        assert wanted.streams
        assert wanted.is_resumable


TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    {"role": "tool", "content": "Three", "tool_call_id": "1"},
]


@pytest.mark.parametrize(
    ("path", "body", "question"),
    [
        (CHAT, a_chat(messages=TURNS), "One\ntwo"),
        (CHAT, a_chat(messages=TURNS[:1]), "Be brief."),
        (COMPLETIONS, a_completion(prompt="One"), "One"),
        (COMPLETIONS, a_completion(prompt=["One", "two"]), "One\ntwo"),
        (COMPLETIONS, a_completion(prompt=[1, 2]), ""),
        (EMBEDDINGS, an_embedding(input="One"), "One"),
    ],
)
def test_what_was_asked_last_is_found(path: str, body: dict[str, Any], question: str) -> None:
    assert want(path, body).question(100) == question


def test_what_was_asked_is_cut_in_the_middle() -> None:
    wanted = want(COMPLETIONS, a_completion(prompt="begin" + "x" * 1000 + "the end"))
    assert wanted.question(9) == "begi" + "e end"
    assert wanted.question(0) == ""


def of_generate(**prompt: Any) -> Wanted:
    return check_generate(inference.GenerateRequest(model="chat", **prompt))


CONVERSATION = inference.ChatMessages(
    messages=[
        inference.ChatMessage(role="system", content="Be brief."),
        inference.ChatMessage(role="user", content="One"),
        inference.ChatMessage(role="assistant", content="Two"),
    ]
)


@pytest.mark.parametrize(
    ("wanted", "question", "prefix"),
    [
        (of_generate(text="One"), "One", text_bytes("One")),
        (of_generate(token_ids=inference.TokenIds(ids=[1, 2])), "", token_bytes([1, 2])),
        (
            of_generate(messages=CONVERSATION),
            "One",
            chat_bytes([("system", ["Be brief."]), ("user", ["One"]), ("assistant", ["Two"])]),
        ),
    ],
)
def test_a_generate_knows_its_prompt(wanted: Wanted, question: str, prefix: bytes) -> None:
    assert wanted.question(100) == question
    assert wanted.prompt.prefix_bytes() == prefix


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        (COMPLETIONS, a_completion(prompt="One"), text_bytes("One")),
        (COMPLETIONS, a_completion(prompt=["One", "two"]), text_bytes("One")),
        (COMPLETIONS, a_completion(prompt=[7, 8]), token_bytes([7, 8])),
        (COMPLETIONS, a_completion(prompt=[[7], [8]]), token_bytes([7])),
        (EMBEDDINGS, an_embedding(), b""),
        (
            CHAT,
            a_chat(messages=TURNS[:2]),
            chat_bytes([("system", ["Be brief."]), ("user", ["One", "two"])]),
        ),
    ],
)
def test_a_prompt_is_written_out_as_prefixes_are_named(
    path: str, body: dict[str, Any], prefix: bytes
) -> None:
    assert want(path, body).prompt.prefix_bytes() == prefix


def test_a_digest_is_of_the_message_the_version_and_the_key() -> None:
    key = b"k" * 16
    digests: Sequence[bytes] = [
        digest_of(b"message", "chat@1", key=key),
        digest_of(b"message", "chat@2", key=key),
        digest_of(b"another", "chat@1", key=key),
        digest_of(b"message", "chat@1", key=b"K" * 16),
    ]
    assert len(set(digests)) == 4
    assert digest_of(b"message", "chat@1", key=key) == digests[0]
