"""What a caller's arguments become, and which of them are refused before a call is made."""

from typing import Any

import pytest
from forebay_client.errors import InvalidRequest
from forebay_client.requests import (
    Message,
    call_of,
    conversation,
    embed_request,
    generate_request,
)


def a_call(**options: Any) -> Any:
    return call_of(options, model="m", default_timeout_s=5.0)


def test_text_is_sent_as_it_is() -> None:
    request = generate_request("m", "hello", {"max_tokens": 3, "temperature": 0, "stop": "x"})
    assert request.WhichOneof("prompt") == "text"
    assert request.sampling.max_tokens == 3
    assert request.sampling.HasField("temperature")
    assert list(request.sampling.stop) == ["x"]


def test_what_is_not_given_stays_absent() -> None:
    assert not generate_request("m", "hello", {"timeout_s": 3}).HasField("sampling")


def test_token_ids_and_messages_have_their_own_forms() -> None:
    assert list(generate_request("m", [1, 2], {}).token_ids.ids) == [1, 2]
    request = generate_request("m", [Message("user", "hi")], {})
    assert request.messages.messages[0].content == "hi"


@pytest.mark.parametrize("prompt", [[], [-1], ["text"], [1, Message("user", "hi")], [1.5]])
def test_a_prompt_of_no_known_form_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("m", prompt, {})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -1), ("max_tokens", 1.5), ("temperature", "hot"), ("stop", 3)],
)
def test_a_sampling_value_that_does_not_fit_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("m", "hello", {name: value})
    assert caught.value.param == name


def test_a_conversation_may_be_a_question_or_mappings() -> None:
    assert conversation("hi") == (Message("user", "hi"),)
    turns = conversation([{"role": "system", "content": "be brief"}])
    assert turns == (Message("system", "be brief"),)
    for wrong in ([], [{"role": "user"}], ["hi"]):
        with pytest.raises(InvalidRequest):
            conversation(wrong)  # type: ignore[arg-type]


def test_embedding_inputs_may_be_text_or_token_ids() -> None:
    request = embed_request("m", ["a", [1, 2]])
    assert [one.WhichOneof("input") for one in request.inputs] == ["text", "token_ids"]
    assert len(embed_request("m", "alone").inputs) == 1
    with pytest.raises(InvalidRequest):
        embed_request("m", [])


def test_a_call_has_a_request_id_and_the_default_deadline() -> None:
    call = a_call()
    assert dict(call.metadata)["x-request-id"] == call.request_id
    assert call.timeout_s == 5.0
    assert a_call(timeout_s=None).timeout_s is None


def test_a_call_carries_what_it_was_given() -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    call = a_call(session="s", priority_class="BATCH", traceparent=parent, request_id="r.1")
    assert dict(call.metadata) == {
        "x-request-id": "r.1",
        "forebay-session": "s",
        "forebay-class": "BATCH",
        "traceparent": parent,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", "with space"),
        ("timeout_s", 0),
        ("session", "línea"),
        ("session", "a\nb"),
        ("priority_class", "URGENT"),
    ],
)
def test_a_call_option_that_cannot_travel_names_itself(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        a_call(**{name: value})
    assert caught.value.param == name


def test_an_option_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="max_token"):
        a_call(max_token=3)
