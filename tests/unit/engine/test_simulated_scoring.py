"""Tokens and scores as the simulated engine gives them."""

import json
from typing import Any

import pytest
from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import language, openai, scoring, tokenizer
from forebay_engine.core.simulated.scoring import ScoreRequest, TextOfRequest, TokensRequest


def parse(path: str, **fields: Any) -> Any:
    return scoring.parse_other(path, json.dumps(fields).encode())


def document_of(request: ScoreRequest) -> Any:
    vectors = [language.embed(tokens, dimensions=16) for tokens in request.inputs]
    document = scoring.score_document(
        request, vectors, answer_id="r1", model="tiny@1", created_unix_s=7, prompt_tokens=9
    )
    return json.loads(document)


def test_a_text_is_tokens_and_tokens_are_a_text() -> None:
    request = parse("/tokenize", prompt="hello there", return_token_strs=True)
    assert isinstance(request, TokensRequest)
    document = json.loads(scoring.tokens_document(request, context_tokens=99))
    assert document["tokens"] == tokenizer.encode("hello there")
    assert (document["count"], document["max_model_len"]) == (len(document["tokens"]), 99)
    assert "".join(document["token_strs"]) == "hello there"
    back = parse("/detokenize", tokens=document["tokens"])
    assert isinstance(back, TextOfRequest)
    assert json.loads(scoring.text_document(back)) == {"prompt": "hello there"}


def test_a_conversation_is_tokenized_by_its_template() -> None:
    request = parse("/tokenize", messages=[{"role": "user", "content": "hello"}])
    assert tokenizer.decode(request.tokens) == "<|user|>\nhello\n<|assistant|>\n"
    assert json.loads(scoring.tokens_document(request, context_tokens=9))["token_strs"] is None


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_closest_document_comes_first(path: str) -> None:
    documents = ["my cat eats fish", "a river is dammed", "the dam holds a river"]
    document = document_of(parse(path, query="a river is dammed", documents=documents))
    assert document["id"] == "score-r1"
    results = document["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1)
    assert results[0]["document"]["text"] == documents[1]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    few = document_of(parse(path, query="a river", documents=documents, top_n=2))
    assert len(few["results"]) == 2


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")]
)
def test_pairs_are_scored_in_their_order(names: tuple[str, str]) -> None:
    left, right = names
    one = document_of(parse("/score", **{left: "hello", right: ["hello", "there"]}))
    assert [entry["index"] for entry in one["data"]] == [0, 1]
    assert one["data"][0]["score"] == pytest.approx(1)
    assert one["usage"]["total_tokens"] == 9
    each = document_of(parse("/v1/score", **{left: ["a", "b"], right: ["a", "b"]}))
    assert [entry["score"] for entry in each["data"]] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/rerank", {"documents": ["x"]}, "query"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": [5]}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/score", {"text_1": "x"}, "text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"queries": ["x"] * 2049, "documents": "y"}, "queries"),
    ],
)
def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(path, **fields)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)


def test_other_paths_are_left_to_the_protocol_or_not_offered() -> None:
    assert scoring.parse_other("/v1/chat/completions", b"{}") is None
    for path in ("/v1/responses", "/v1/messages", "/pooling", "/classify"):
        with pytest.raises(Refused) as refused:
            openai.parse_request(path, b"{}")
        assert refused.value.reason == "UNSUPPORTED"
