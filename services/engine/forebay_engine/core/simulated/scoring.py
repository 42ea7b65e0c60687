"""What the simulated engine offers beside text and vectors: tokens of a text, and scores of pairs.

A score is the cosine of the two vectors, as vLLM has it for models that embed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import openai, tokenizer

_INPUTS_MAX = 2048
_SPELLINGS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensRequest:
    """A `/tokenize` that needs no further checks."""

    tokens: tuple[int, ...]
    with_texts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOfRequest:
    """A `/detokenize` that needs no further checks."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A score or a rerank that needs no further checks."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    most: int | None
    """How many of a rerank's results are wanted, 0 being all; None for a score."""

    @property
    def inputs(self) -> list[list[int]]:
        """What has to be embedded: the queries, then the documents."""
        return [tokenizer.encode(text) for text in (*self.queries, *self.documents)]


OtherRequest = TokensRequest | TextOfRequest | ScoreRequest


def parse_other(path: str, body: bytes) -> OtherRequest | None:
    """Return the request of a body; None for a path that is not one of these.

    Raises Refused: INVALID_ARGUMENT with the field, UNSUPPORTED with the field.
    """
    if path == "/tokenize":
        return _parse_tokens(openai.fields_of(body))
    if path == "/detokenize":
        fields = openai.fields_of(body)
        return TextOfRequest(tokens=_token_ids(fields.get("tokens")))
    if path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        return _parse_rerank(openai.fields_of(body))
    if path in ("/score", "/v1/score"):
        return _parse_score(openai.fields_of(body))
    return None


def tokens_document(request: TokensRequest, *, context_tokens: int) -> bytes:
    """Return the answer to `/tokenize`."""
    texts = [tokenizer.decode((token,)) for token in request.tokens]
    return _encode(
        {
            "count": len(request.tokens),
            "max_model_len": context_tokens,
            "tokens": request.tokens,
            "token_strs": texts if request.with_texts else None,
        }
    )


def text_document(request: TextOfRequest) -> bytes:
    """Return the answer to `/detokenize`."""
    return _encode({"prompt": tokenizer.decode(request.tokens)})


def score_document(
    request: ScoreRequest,
    vectors: Sequence[Sequence[float]],
    *,
    answer_id: str,
    model: str,
    created_unix_s: int,
    prompt_tokens: int,
) -> bytes:
    """Return the answer to a score or a rerank.

    Args:
        request: what was asked.
        vectors: of unit length, one for each of its inputs, in their order.
        answer_id: the request's id, without a prefix.
        model: the model's name.
        created_unix_s: seconds since the Unix epoch.
        prompt_tokens: of all pairs.
    """
    count = len(request.queries)
    documents = vectors[count:]
    queries = vectors[:count] if count > 1 else [vectors[0]] * len(documents)
    scores = [
        sum(map(float.__mul__, left, right)) for left, right in zip(queries, documents, strict=True)
    ]
    answer_id = f"score-{answer_id}"
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if request.most is None:
        entries = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return _encode(
            {
                "id": answer_id,
                "object": "list",
                "created": created_unix_s,
                "model": model,
                "data": entries,
                "usage": {**usage, "completion_tokens": 0},
            }
        )
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        {
            "index": index,
            "document": {"text": request.documents[index], "multi_modal": None},
            "relevance_score": scores[index],
        }
        for index in best[: request.most or len(best)]
    ]
    return _encode({"id": answer_id, "model": model, "usage": usage, "results": results})


def _parse_tokens(fields: Mapping[str, Any]) -> TokensRequest:
    if fields.get("messages") is not None:
        text = openai.chat_prompt(fields)
    else:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise _invalid("prompt", "must be a text")
        text = prompt
    with_texts = fields.get("return_token_strs")
    if with_texts is not None and not isinstance(with_texts, bool):
        raise _invalid("return_token_strs", "must be true or false")
    return TokensRequest(tokens=tuple(tokenizer.encode(text)), with_texts=bool(with_texts))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise _invalid("tokens", "must be a list of token ids")
    if not tokenizer.is_vocabulary(value):
        raise _invalid("tokens", "has a token id outside the vocabulary")
    return tuple(value)


def _parse_rerank(fields: Mapping[str, Any]) -> ScoreRequest:
    query = fields.get("query")
    if not isinstance(query, str):
        raise _no_text("query")
    most = fields.get("top_n")
    if most is not None and (type(most) is not int or most < 0):
        raise _invalid("top_n", "must be 0 or more")
    documents = _texts(fields.get("documents"), "documents")
    return ScoreRequest(queries=(query,), documents=documents, most=most or 0)


def _parse_score(fields: Mapping[str, Any]) -> ScoreRequest:
    names = next(
        (pair for pair in _SPELLINGS if all(fields.get(name) is not None for name in pair)),
        ("text_1", "text_2"),
    )
    queries, documents = (_texts(fields.get(name), name) for name in names)
    if len(queries) not in (1, len(documents)):
        raise _invalid(names[0], f"must have one entry, or as many as '{names[1]}'")
    return ScoreRequest(queries=queries, documents=documents, most=None)


def _texts(value: object, name: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise _no_text(name)
    if not 1 <= len(texts) <= _INPUTS_MAX:
        raise _invalid(name, f"must have 1 to {_INPUTS_MAX} entries")
    return tuple(texts)


def _no_text(name: str) -> Refused:
    return _invalid(name, "must be a text")


def _invalid(name: str, problem: str) -> Refused:
    return Refused("INVALID_ARGUMENT", f"'{name}' {problem}.", param=name)
