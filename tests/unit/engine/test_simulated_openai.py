"""OpenAI's protocol as the simulated engine speaks it."""

import base64
import json
import struct
from typing import Any

import pytest
from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import openai, tokenizer
from forebay_engine.core.simulated.answer import Choice, ChoiceDelta, TokenLogprob
from forebay_engine.core.simulated.openai import EmbeddingRequest, Kind, TextRequest
from forebay_engine.core.simulated.planner import Emission, Finish

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
VECTORS = "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]


def parse(path: str, **fields: Any) -> TextRequest:
    request = openai.parse_request(path, json.dumps(fields).encode())
    assert isinstance(request, TextRequest)
    return request


def refusal_of(path: str, body: bytes) -> Refused:
    with pytest.raises(Refused) as refused:
        openai.parse_request(path, body)
    return refused.value


def a_head(kind: Kind = Kind.CHAT) -> openai.AnswerHead:
    return openai.AnswerHead(
        kind=kind,
        request_id="r1",
        model="tiny@1",
        fingerprint="simulated-x",
        created_unix_s=1_700_000_000,
    )


def a_delta(text: str = "", *, finish: Finish | None = None, index: int = 0) -> ChoiceDelta:
    return ChoiceDelta(index, text, tuple(tokenizer.encode(text)), (), finish)


def events_of(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts[-1] == ""
    return [
        "[DONE]" if part == "data: [DONE]" else json.loads(part.removeprefix("data: "))
        for part in parts[:-1]
    ]


def test_chat_is_rendered_by_its_template() -> None:
    request = parse(CHAT, messages=[{"role": "system", "content": "be kind"}, *HELLO])
    assert tokenizer.decode(request.prompts[0]) == (
        "<|system|>\nbe kind\n<|user|>\nhello\n<|assistant|>\n"
    )
    assert (request.choices_per_prompt, request.max_tokens, request.stream) == (1, None, False)


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(CHAT, messages=[{"role": "user", "content": parts}])
    assert "a\nb" in tokenizer.decode(request.prompts[0])


def test_newer_token_limit_wins() -> None:
    assert parse(CHAT, messages=HELLO, max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_completion_takes_texts_and_tokens() -> None:
    assert len(parse(TEXT, prompt=["a", "b c"]).prompts) == 2
    assert parse(TEXT, prompt=[1, 2, 3]).prompts == ((1, 2, 3),)
    assert parse(TEXT, prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
    assert parse(TEXT, prompt="a").max_tokens == 16


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "sesame"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["sesame"]}, "messages.0"),
        (CHAT, {"messages": [{"content": "sesame"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": HELLO, "temperature": "sesame"}, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": 3}, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": True}, "temperature"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"messages": HELLO, "n": 1000}, "n"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "stop"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
        (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
        (CHAT, {"messages": HELLO, "stream_options": {}}, "stream_options"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[1, "sesame"]]}, "prompt"),
        (TEXT, {"prompt": [99_999_999]}, "prompt"),
        (VECTORS, {"input": ["a"] * 2049}, "input"),
        (VECTORS, {"input": "a", "encoding_format": "sesame"}, "encoding_format"),
    ],
)
def test_wrong_fields_are_named_and_not_repeated(
    path: str, fields: dict[str, Any], param: str
) -> None:
    refused = refusal_of(path, json.dumps(fields).encode())
    assert (refused.reason, refused.param) == ("INVALID_ARGUMENT", param)
    assert "sesame" not in refused.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"x":' + b"[" * 9000 + b"]" * 9000 + b"}"]
)
def test_other_bodies_are_refused(body: bytes) -> None:
    assert refusal_of(CHAT, body).reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_what_is_not_simulated_is_said(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    assert refusal_of(CHAT, body).reason == "UNSUPPORTED"


def test_unknown_path_is_refused() -> None:
    assert refusal_of("/v1/images", b"{}").reason == "ROUTE_NOT_FOUND"


def test_chat_stream_has_role_text_finish_usage_and_end() -> None:
    request = parse(CHAT, messages=HELLO, stream=True, stream_options={"include_usage": True})
    writer = openai.EventWriter(a_head(), request)
    data = (
        writer.opening(1)
        + writer.deltas([a_delta(" sun"), a_delta()])
        + writer.deltas([a_delta(" sea", finish=Finish.LENGTH)])
        + writer.closing(openai.usage_document(3, 2, 1))
    )
    *events, end = events_of(data)
    assert end == "[DONE]"
    assert {event["id"] for event in events} == {"chatcmpl-r1"}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [choice for event in events for choice in event["choices"]]
    assert [choice["delta"] for choice in deltas] == [
        {"role": "assistant", "content": ""},
        {"content": " sun"},
        {"content": " sea"},
        {},
    ]
    assert [choice["finish_reason"] for choice in deltas] == [None, None, None, "length"]
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 5
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_stream_without_usage_has_no_usage_field() -> None:
    request = parse(TEXT, prompt="a", stream=True)
    writer = openai.EventWriter(a_head(Kind.COMPLETION), request)
    assert writer.opening(1) == b""
    data = writer.deltas([a_delta(" sun", finish=Finish.STOP)])
    data += writer.closing(openai.usage_document(1, 1, 0))
    event, end = events_of(data)
    assert end == "[DONE]"
    assert event["object"] == "text_completion"
    assert event["choices"] == [
        {"index": 0, "text": " sun", "logprobs": None, "finish_reason": "stop"}
    ]
    assert "usage" not in event


def test_chat_document_has_every_choice() -> None:
    request = parse(CHAT, messages=HELLO, n=2, logprobs=True, top_logprobs=1)
    logprob = TokenLogprob(tokenizer.encode(" sun")[0], -0.1, ((5, -0.1),))
    choices = [
        ChoiceDelta(0, " sun", (1,), (logprob,), Finish.STOP),
        a_delta(" sea sky", finish=Finish.LENGTH, index=1),
    ]
    document = json.loads(
        openai.answer_document(a_head(), request, choices, openai.usage_document(3, 3, 0))
    )
    assert document["object"] == "chat.completion"
    assert document["system_fingerprint"] == "simulated-x"
    assert [choice["message"]["content"] for choice in document["choices"]] == [" sun", " sea sky"]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]
    (entry,) = document["choices"][0]["logprobs"]["content"]
    assert entry["token"] == " sun"
    assert entry["bytes"] == list(b" sun")
    assert len(entry["top_logprobs"]) == 1


def test_embeddings_come_as_numbers_or_packed() -> None:
    request = openai.parse_request(VECTORS, b'{"input":["a","b"],"encoding_format":"base64"}')
    assert request == EmbeddingRequest(inputs=((256,), (257,)), as_base64=True)
    packed = openai.embedding_document("m", [[0.5, -1.0]], as_base64=True, prompt_tokens=2)
    (entry,) = json.loads(packed)["data"]
    assert struct.unpack("<2f", base64.b64decode(entry["embedding"])) == (0.5, -1.0)
    plain = json.loads(
        openai.embedding_document("m", [[0.5, -1.0]], as_base64=False, prompt_tokens=2)
    )
    assert plain["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
    assert plain["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_events_are_valid_whatever_the_text_and_the_choice(path: str) -> None:
    fields = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    request = parse(path, **fields, stream=True, n=2)
    writer = openai.EventWriter(a_head(request.kind), request)
    texts = ['"quoted" \\ \n\r\t\x00\x7f', "水🌊\u2028é", "data: [DONE]\n\n"]
    deltas = [a_delta(text, index=index) for text in texts for index in (0, 1)]
    choices = [event["choices"][0] for event in events_of(writer.deltas(deltas))]
    assert [choice["index"] for choice in choices] == [0, 1] * 3
    given = [c["delta"]["content"] if path == CHAT else c["text"] for c in choices]
    assert given == [text for text in texts for _ in (0, 1)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_log_probabilities_are_in_the_events(path: str) -> None:
    fields = {"messages": HELLO, "logprobs": True} if path == CHAT else {"prompt": "a"}
    request = parse(path, **{"logprobs": 1, **fields}, stream=True)
    writer = openai.EventWriter(a_head(request.kind), request)
    first, _ = tokenizer.encode("水")
    delta = ChoiceDelta(0, "", (first,), (TokenLogprob(first, -0.5, ()),), None)
    (event,) = events_of(writer.deltas([delta]))
    logprobs = event["choices"][0]["logprobs"]
    if path == CHAT:
        assert bytes(logprobs["content"][0]["bytes"]) == "水".encode()[:1]
    else:
        assert logprobs["token_logprobs"] == [-0.5]


def emissions(text: str, finish: Finish | None = None) -> list[Emission]:
    tokens = tokenizer.encode(text)
    ends = [None] * (len(tokens) - 1) + [finish]
    return [Emission(1, token, 0, end, 0) for token, end in zip(tokens, ends, strict=True)]


def grown(choice: Choice, given: list[Emission]) -> ChoiceDelta:
    for emission in given:
        choice.add(emission)
    return choice.take()


def test_stop_text_ends_a_choice_and_its_later_tokens_are_nothing() -> None:
    choice = Choice(index=0, seed=0, stops=("sea",))
    first = grown(choice, emissions(" sun sea sky"))
    assert (first.text, first.finish, len(first.tokens)) == (" sun ", Finish.STOP, 2)
    assert grown(choice, emissions(" sky")).tokens == []


def test_end_of_sequence_is_a_token_without_text() -> None:
    choice = Choice(index=0, seed=0)
    grown(choice, emissions(" sun"))
    end = grown(choice, [Emission(1, tokenizer.END_OF_SEQUENCE, 0, Finish.STOP, 0)])
    assert (end.text, end.tokens, end.finish) == ("", [tokenizer.END_OF_SEQUENCE], Finish.STOP)


def test_what_is_taken_late_is_the_same_in_fewer_parts() -> None:
    given = emissions(" the 水 sun 🌊🦆 sea", Finish.LENGTH)
    often, late = (Choice(index=0, seed=1, logprobs=2) for _ in range(2))
    parts = [grown(often, [emission]) for emission in given]
    whole = grown(late, given)
    assert whole.text == "".join(part.text for part in parts) == " the 水 sun 🌊🦆 sea"
    assert whole.tokens == [token for part in parts for token in part.tokens]
    assert whole.logprobs == [entry for part in parts for entry in part.logprobs]
    assert whole.finish is parts[-1].finish is Finish.LENGTH
    assert all("\ufffd" not in part.text for part in parts)
    assert len({len(part.text) for part in parts}) > 1, "no token was half a character"


def test_taken_log_probabilities_do_not_grow_any_more() -> None:
    choice = Choice(index=0, seed=0, logprobs=0)
    before = choice.take()
    grown(choice, emissions(" sun"))
    assert list(before.logprobs) == []


def test_log_probabilities_have_the_chosen_token_first() -> None:
    choice = Choice(index=0, seed=0, logprobs=3)
    (entry,) = grown(choice, emissions(" sun")).logprobs
    assert entry.top[0] == (entry.token, entry.logprob)
    assert len({token for token, _ in entry.top}) == 3
    values = [value for _, value in entry.top]
    assert values == sorted(values, reverse=True)
