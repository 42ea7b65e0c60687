"""Requests of every kind that OpenAI's protocol has, for vLLM's own server and for the mesh.

All are answered by SmolLM2 or MiniLM. Most are greedy or seeded, so that the same request has the
same answer; each text request is also asked as a stream.
"""

from __future__ import annotations

import dataclasses
from typing import Any

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT_MODEL, VECTOR_MODEL = "smollm2@1", "minilm@1"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    path: str
    body: Any
    """A JSON value, or bytes that are sent as they are."""
    encoder: bool = False
    """It is for the embedding model."""
    method: str = "POST"


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me about rivers in three sentences."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TREE_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["name"],
}


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


_CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 4, "max_tokens": 9},
    "no limit": {"max_tokens": None, "stop": "."},
    "system": {"messages": [{"role": "system", "content": "Answer in one word."}, *CAPITAL]},
    "turns": {
        "messages": [*CAPITAL, {"role": "assistant", "content": "Paris."}, *STORY],
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    "named": {"messages": [{"role": "user", "name": "ann", "content": "Say hello."}]},
    "emoji": {"messages": [{"role": "user", "content": "Repeat: 🌊🦆 你好，世界。"}]},
    "n": {"n": 3, "temperature": 1.0, "seed": 7},
    "n stop": {"n": 2, "temperature": 0.9, "seed": 3, "stop": ["a", "e"]},
    "n logprobs": {"n": 2, "temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2},
    "stop text": {"stop": " is"},
    "stop list": {"stop": ["zebra", " France", "Paris"]},
    "stop across tokens": {"stop": ["ital of Fra"]},
    "stop kept": {"stop": [" of"], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [282, 314]},
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 5},
    "most logprobs": {"logprobs": True, "top_logprobs": 20, "max_tokens": 3},
    "seed": {"temperature": 1.0, "seed": 42},
    "another seed": {"temperature": 1.0, "seed": 43, "top_p": 0.9},
    "top_k": {"temperature": 1.5, "seed": 1, "top_k": 5},
    "all top_k": {"temperature": 0.7, "seed": 1, "top_k": -1},
    "min_p": {"temperature": 1.2, "seed": 1, "min_p": 0.1},
    "presence": {"presence_penalty": 2.0, "messages": STORY, "max_tokens": 12},
    "frequency": {"frequency_penalty": 1.5, "messages": STORY, "max_tokens": 12},
    "repetition": {"repetition_penalty": 1.4, "messages": STORY, "max_tokens": 12},
    "penalties and seed": {
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "temperature": 0.8,
        "seed": 9,
    },
    "logit_bias": {"logit_bias": {"504": -100, "260": 5}},
    "bad_words": {"bad_words": ["Paris"]},
    "allowed tokens": {"allowed_token_ids": [504, 3575, 282, 4649], "max_tokens": 5},
    "min_tokens": {"min_tokens": 12, "max_tokens": 16},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 16},
    "json schema": {"response_format": _format(CITY_SCHEMA), "max_tokens": 16},
    "json schema, recursive": {"response_format": _format(TREE_SCHEMA), "max_tokens": 16},
    "json schema, strict": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": CITY_SCHEMA, "strict": True},
        },
        "temperature": 0.7,
        "seed": 2,
        "max_tokens": 16,
    },
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "text format": {"response_format": {"type": "text"}},
    "regex": {"structured_outputs": {"regex": "[A-Z][a-z]{2,8}\\."}},
    "choice": {"structured_outputs": {"choice": ["Paris", "London", "Rome"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "It is " ("Paris" | "Rome") "."'}},
    "schema by structured_outputs": {
        "structured_outputs": {"json": CITY_SCHEMA},
        "max_tokens": 16,
    },
    "tools": {"tools": [WEATHER], "max_tokens": 12},
    "tools, auto": {"tools": [WEATHER], "tool_choice": "auto", "max_tokens": 12},
    "tools, none": {"tools": [WEATHER], "tool_choice": "none"},
    "tools, required": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 16},
    "tools, named": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 16,
    },
    "tool result": {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "How is the weather in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
        ],
    },
    "go on": {
        "messages": [*CAPITAL, {"role": "assistant", "content": "The capital"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "echo": {
        "messages": [*CAPITAL, {"role": "assistant", "content": "The capital"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "no generation prompt": {"add_generation_prompt": False},
    "token ids": {"return_token_ids": True},
    "tokens as ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "special tokens": {"skip_special_tokens": False},
    "prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
    "truncated prompt": {"truncate_prompt_tokens": 16},
    "user and metadata": {"user": "ann", "metadata": {"a": "b"}, "store": False},
    "unknown field": {"not_a_field": {"a": [1]}},
    "nulls": {"stop": None, "n": None, "seed": None, "tools": None, "response_format": None},
    "usage in the end": {"stream_options": {"include_usage": True}},
    "usage all the time": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    },
    "no usage": {"stream_options": {"include_usage": False}},
    "only continuous": {"stream_options": {"continuous_usage_stats": True}},
    "n with usage": {
        "n": 2,
        "temperature": 1.0,
        "seed": 6,
        "stream_options": {"include_usage": True},
    },
}

_COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default length": {"max_tokens": None},
    "several prompts": {"prompt": ["The capital of France is", "Water is", "One, two,"]},
    "token ids": {"prompt": [504, 3575, 282, 4649, 314]},
    "lists of token ids": {"prompt": [[504, 3575, 282, 4649, 314], [504, 1760, 314]]},
    "n": {"n": 2, "temperature": 1.0, "seed": 11},
    "several prompts, n": {"prompt": ["Water is", "Fire is"], "n": 2, "temperature": 1, "seed": 4},
    "echo": {"echo": True},
    "echo logprobs": {"echo": True, "logprobs": 2},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo alone, logprobs": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "logprobs none": {"logprobs": 0},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
    "stop": {"stop": [",", "."], "max_tokens": 12},
    "stop kept": {"stop": ["."], "include_stop_str_in_output": True, "max_tokens": 12},
    "seed": {"temperature": 1.1, "seed": 5, "top_p": 0.95},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2},
    "json schema": {"response_format": _format(CITY_SCHEMA), "max_tokens": 16},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    "logit_bias": {"logit_bias": {"260": -100}},
    "ignore_eos": {"ignore_eos": True, "min_tokens": 5, "max_tokens": 12},
    "token ids back": {"return_token_ids": True},
    "no special tokens": {"add_special_tokens": False},
    "usage in the end": {"stream_options": {"include_usage": True}},
    "usage all the time": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    },
    "best_of": {"best_of": 1},
    "emoji": {"prompt": "🌊🦆🌊🦆🌊🦆🌊", "max_tokens": 16},
}

_RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "Answer in one word."},
    "turns": {"input": [*CAPITAL, {"role": "assistant", "content": "Paris."}, *STORY]},
    "parts": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}]
    },
    "seed": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "not stored": {"store": False, "metadata": {"a": "b"}, "user": "ann"},
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": CITY_SCHEMA}},
        "max_output_tokens": 16,
    },
    "tools": {
        "tools": [{"type": "function", **WEATHER["function"]}],  # type: ignore[dict-item]
        "max_output_tokens": 12,
    },
    "tools, required": {
        "tools": [{"type": "function", **WEATHER["function"]}],  # type: ignore[dict-item]
        "tool_choice": "required",
        "max_output_tokens": 16,
    },
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
}

_MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": "Answer in one word."},
    "system parts": {"system": [{"type": "text", "text": "Answer in one word."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    "stop": {"stop_sequences": [" is"]},
    "short": {"max_tokens": 2},
    "top": {"top_k": 1, "top_p": 0.9, "temperature": 1.0},
    "tools": {
        "tools": [
            {
                "name": "get_weather",
                "description": "Tell the weather.",
                "input_schema": CITY_SCHEMA,
            }
        ],
        "max_tokens": 12,
    },
    "tool result": {
        "messages": [
            {"role": "user", "content": "How is the weather in Paris?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "P"}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sunny."}],
            },
        ],
    },
}

_DOCUMENTS = ["My cat eats fish.", "A river is held by a dam.", "The stream is dammed."]
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": "The capital of France"}),
    "tokenize, texts": ("/tokenize", {"prompt": "Hello 🌊", "return_token_strs": True}),
    "tokenize, bare": ("/tokenize", {"prompt": "Hello", "add_special_tokens": False}),
    "tokenize a chat": ("/tokenize", {"messages": CAPITAL}),
    "tokenize a chat with tools": ("/tokenize", {"messages": CAPITAL, "tools": [WEATHER]}),
    "tokenize nothing": ("/tokenize", {"prompt": ""}),
    "detokenize": ("/detokenize", {"tokens": [504, 3575, 282, 4649]}),
    "detokenize nothing": ("/detokenize", {"tokens": []}),
    "count tokens": ("/v1/messages/count_tokens", {"messages": CAPITAL, "system": "Be brief."}),
}
_VECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vector": (EMBEDDINGS, {"input": "A river is dammed."}),
    "vectors": (EMBEDDINGS, {"input": _DOCUMENTS}),
    "base64": (EMBEDDINGS, {"input": _DOCUMENTS, "encoding_format": "base64"}),
    "float": (EMBEDDINGS, {"input": "A river.", "encoding_format": "float"}),
    "tokens": (EMBEDDINGS, {"input": [101, 1037, 2314, 102]}),
    "lists of tokens": (EMBEDDINGS, {"input": [[101, 1037, 102], [101, 2314, 102]]}),
    "cut": (EMBEDDINGS, {"input": "river " * 400, "truncate_prompt_tokens": 64}),
    "user": (EMBEDDINGS, {"input": "A river.", "user": "ann"}),
    "score": ("/score", {"text_1": _DOCUMENTS[1], "text_2": _DOCUMENTS}),
    "score, one": ("/v1/score", {"text_1": "a", "text_2": "b"}),
    "score, each": ("/v1/score", {"queries": ["a", "b"], "documents": ["b", "a"]}),
    "rerank": ("/rerank", {"query": "dams", "documents": _DOCUMENTS}),
    "rerank, two": ("/v1/rerank", {"query": "dams", "documents": _DOCUMENTS, "top_n": 2}),
    "rerank 2": ("/v2/rerank", {"query": "cats", "documents": _DOCUMENTS}),
    "pooling": ("/pooling", {"input": "A river is dammed."}),
    "pooling, base64": ("/pooling", {"input": ["a", "b"], "encoding_format": "base64"}),
    "tokenize": ("/tokenize", {"prompt": "A river is dammed."}),
    "detokenize": ("/detokenize", {"tokens": [101, 1037, 2314, 102]}),
}

_REFUSED: dict[str, tuple[str, Any]] = {
    "no model of that name": (CHAT, {"model": "nobody", "messages": CAPITAL}),
    "no messages": (CHAT, {"model": TEXT_MODEL}),
    "empty messages": (CHAT, {"messages": []}),
    "messages of a wrong type": (CHAT, {"messages": "hello"}),
    "a message without role": (CHAT, {"messages": [{"content": "x"}]}),
    "content of a wrong type": (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    "a part of an unknown type": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]},
    ),
    "an image for a model of text": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                    ],
                }
            ]
        },
    ),
    "temperature too high": (CHAT, {"messages": CAPITAL, "temperature": 2.5}),
    "temperature below 0": (CHAT, {"messages": CAPITAL, "temperature": -1}),
    "temperature of a wrong type": (CHAT, {"messages": CAPITAL, "temperature": "hot"}),
    "top_p of 0": (CHAT, {"messages": CAPITAL, "top_p": 0}),
    "top_k too low": (CHAT, {"messages": CAPITAL, "top_k": -2}),
    "min_p too high": (CHAT, {"messages": CAPITAL, "min_p": 2}),
    "n of 0": (CHAT, {"messages": CAPITAL, "n": 0}),
    "n of 1.5": (CHAT, {"messages": CAPITAL, "n": 1.5}),
    "n greedy": (CHAT, {"messages": CAPITAL, "n": 2}),
    "n huge": (CHAT, {"messages": CAPITAL, "n": 100_000, "temperature": 1}),
    "max_tokens of 0": (CHAT, {"messages": CAPITAL, "max_tokens": 0}),
    "max_tokens below 0": (CHAT, {"messages": CAPITAL, "max_tokens": -5}),
    "max_tokens beyond the context": (CHAT, {"messages": CAPITAL, "max_tokens": 5000}),
    "min_tokens above max_tokens": (CHAT, {"messages": CAPITAL, "min_tokens": 9, "max_tokens": 5}),
    "penalty too high": (CHAT, {"messages": CAPITAL, "presence_penalty": 3}),
    "repetition of 0": (CHAT, {"messages": CAPITAL, "repetition_penalty": 0}),
    "top_logprobs alone": (CHAT, {"messages": CAPITAL, "top_logprobs": 2}),
    "top_logprobs too many": (CHAT, {"messages": CAPITAL, "logprobs": True, "top_logprobs": 99}),
    "prompt_logprobs in a stream": (
        CHAT,
        {"messages": CAPITAL, "prompt_logprobs": 1, "stream": True},
    ),
    "stream_options alone": (CHAT, {"messages": CAPITAL, "stream_options": {}}),
    "an empty stop": (CHAT, {"messages": CAPITAL, "stop": [""]}),
    "stop of a wrong type": (CHAT, {"messages": CAPITAL, "stop": 5}),
    "bias of no token": (CHAT, {"messages": CAPITAL, "logit_bias": {"999999": 1}}),
    "bias of a word": (CHAT, {"messages": CAPITAL, "logit_bias": {"Paris": 1}}),
    "seed of a wrong type": (CHAT, {"messages": CAPITAL, "seed": "one"}),
    "no such format": (CHAT, {"messages": CAPITAL, "response_format": {"type": "xml"}}),
    "a format without schema": (
        CHAT,
        {"messages": CAPITAL, "response_format": {"type": "json_schema"}},
    ),
    "a schema of a wrong type": (
        CHAT,
        {"messages": CAPITAL, "response_format": _format({"type": "nonsense"})},
    ),
    "a regex that is none": (CHAT, {"messages": CAPITAL, "structured_outputs": {"regex": "(("}}),
    "a grammar that is none": (
        CHAT,
        {"messages": CAPITAL, "structured_outputs": {"grammar": "root ::= ("}},
    ),
    "an empty choice": (CHAT, {"messages": CAPITAL, "structured_outputs": {"choice": []}}),
    "two constraints": (
        CHAT,
        {"messages": CAPITAL, "structured_outputs": {"regex": "a", "choice": ["a"]}},
    ),
    "a choice without tools": (CHAT, {"messages": CAPITAL, "tool_choice": "required"}),
    "a tool that is not there": (
        CHAT,
        {
            "messages": CAPITAL,
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
    ),
    "a tool without a function": (CHAT, {"messages": CAPITAL, "tools": [{"type": "function"}]}),
    "tools of a wrong type": (CHAT, {"messages": CAPITAL, "tools": "none"}),
    "a prompt beyond the context": (
        CHAT,
        {"messages": [{"role": "user", "content": "river " * 4000}]},
    ),
    "no prompt": (COMPLETIONS, {"model": TEXT_MODEL}),
    "an empty list of prompts": (COMPLETIONS, {"prompt": []}),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}),
    "a prompt of mixed types": (COMPLETIONS, {"prompt": ["a", 1]}),
    "a token beyond the vocabulary": (COMPLETIONS, {"prompt": [9_999_999]}),
    "a token below 0": (COMPLETIONS, {"prompt": [-1]}),
    "a suffix": (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    "too many logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 99}),
    "nothing to generate": (COMPLETIONS, {"prompt": "a", "max_tokens": 0}),
    "a completion beyond the context": (COMPLETIONS, {"prompt": "river " * 4000}),
    "JSON that is none": (CHAT, b'{"model": '),
    "a list": (CHAT, b"[]"),
    "nothing": (CHAT, b""),
    "no input": (RESPONSES, {"model": TEXT_MODEL}),
    "an answer that is not known": (
        RESPONSES,
        {"input": "a", "previous_response_id": "resp_1"},
    ),
    "in the background": (RESPONSES, {"input": "a", "background": True}),
    "no max_tokens": (MESSAGES, {"messages": CAPITAL}),
    "messages with max_tokens of 0": (MESSAGES, {"messages": CAPITAL, "max_tokens": 0}),
    "messages of a wrong role": (
        MESSAGES,
        {"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 3},
    ),
    "messages beyond the context": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "river " * 4000}], "max_tokens": 3},
    ),
    "nothing to tokenize": ("/tokenize", {"model": TEXT_MODEL}),
    "a text to detokenize": ("/detokenize", {"tokens": "a"}),
    "a token to detokenize that is none": ("/detokenize", {"tokens": [9_999_999]}),
    "vectors of a chat model": (EMBEDDINGS, {"input": "a"}),
    "scores of a chat model": ("/score", {"text_1": "a", "text_2": "b"}),
    "no such path": ("/v1/nothing", {}),
}
_REFUSED_VECTORS: dict[str, tuple[str, Any]] = {
    "no such encoding": (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}),
    "dimensions": (EMBEDDINGS, {"input": "a", "dimensions": 5}),
    "an empty input": (EMBEDDINGS, {"input": []}),
    "an empty text": (EMBEDDINGS, {"input": ""}),
    "an input of a wrong type": (EMBEDDINGS, {"input": {"a": 1}}),
    "an input beyond the context": (EMBEDDINGS, {"input": "river " * 400}),
    "a token beyond the vocabulary": (EMBEDDINGS, {"input": [9_999_999]}),
    "a chat with an encoder": (CHAT, {"messages": CAPITAL}),
    "a completion of an encoder": (COMPLETIONS, {"prompt": "a"}),
    "messages for an encoder": (MESSAGES, {"messages": CAPITAL, "max_tokens": 3}),
    "a response of an encoder": (RESPONSES, {"input": "a"}),
    "classes of an encoder": ("/classify", {"input": "a"}),
    "no documents": ("/rerank", {"query": "a"}),
    "top_n below 0": ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
    "pairs that do not match": ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
}


# Nothing is generated at length, also where a server takes what the other refuses.
_SHORT = {path: {"temperature": 0, "max_tokens": 5} for path in (CHAT, COMPLETIONS)}


def _bodies(
    kind: str, path: str, base: dict[str, Any], fields: dict[str, dict[str, Any]]
) -> list[Case]:
    cases: list[Case] = []
    for name, changes in fields.items():
        body = {"model": TEXT_MODEL, **base, **changes}
        if "stream_options" not in changes:
            cases.append(Case(f"{kind}: {name}", path, body))
        cases.append(Case(f"{kind}: {name}, streamed", path, {**body, "stream": True}))
    return cases


def _others(fields: dict[str, tuple[str, Any]], *, encoder: bool) -> list[Case]:
    model = VECTOR_MODEL if encoder else TEXT_MODEL
    return [
        Case(
            f"{path}: {name}{', encoder' if encoder else ''}",
            path,
            body if isinstance(body, bytes) else {"model": model, **_SHORT.get(path, {}), **body},
            encoder,
        )
        for name, (path, body) in fields.items()
    ]


GREEDY: dict[str, Any] = {"temperature": 0}
ANSWERED: list[Case] = [
    *_bodies("chat", CHAT, {**GREEDY, "messages": CAPITAL, "max_tokens": 6}, _CHATS),
    *_bodies(
        "completion",
        COMPLETIONS,
        {**GREEDY, "prompt": "The capital of France is", "max_tokens": 6},
        _COMPLETIONS,
    ),
    *_bodies(
        "response",
        RESPONSES,
        {**GREEDY, "input": "What is the capital of France?", "max_output_tokens": 6},
        _RESPONSES,
    ),
    *_bodies("messages", MESSAGES, {**GREEDY, "messages": CAPITAL, "max_tokens": 6}, _MESSAGES),
    *_others(_TEXTS, encoder=False),
    *_others(_VECTORS, encoder=True),
]
REFUSED: list[Case] = [
    *_others(_REFUSED, encoder=False),
    *_others(_REFUSED_VECTORS, encoder=True),
]
