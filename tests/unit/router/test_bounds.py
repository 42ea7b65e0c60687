"""What a caller can make large, and where media may come from."""

import json
from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_router.core.bounds import Bounds, listed_hosts
from forebay_router.core.constraints import repeats
from forebay_router.core.generate import check_embed, check_generate
from forebay_router.core.media import is_listed
from forebay_router.core.openai import PATHS, check_openai
from forebay_router.core.refusal import RefusedError
from forebay_router.core.wanted import Wanted
from hypothesis import given
from hypothesis import strategies as st

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SECRET = "a secret prompt"
FORMAT = "response_format.json_schema.schema"
TURN = {"role": "user", "content": SECRET}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    COMPLETIONS: {"prompt": SECRET},
    EMBEDDINGS: {"input": SECRET},
    RESPONSES: {"input": SECRET},
    MESSAGES: {"messages": [TURN], "max_tokens": 5},
    COUNT: {"messages": [TURN]},
    "/pooling": {"input": SECRET},
    "/classify": {"input": [SECRET]},
    "/rerank": {"query": SECRET, "documents": ["a", "b"]},
    "/v1/rerank": {"query": SECRET, "documents": ["a", "b"]},
    "/v2/rerank": {"query": SECRET, "documents": ["a", "b"]},
    "/score": {"text_1": SECRET, "text_2": ["a", "b"]},
    "/v1/score": {"queries": SECRET, "documents": ["a", "b"]},
    "/tokenize": {"prompt": SECRET},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def want(path: str, bounds: Bounds = Bounds(), **fields: Any) -> Wanted:  # noqa: B008
    body = {"model": "m", **BASES[path], **fields}
    return check_openai(path, json.dumps(body).encode(), bounds)


def refused(path: str, bounds: Bounds = Bounds(), **fields: Any) -> RefusedError:  # noqa: B008
    with pytest.raises(RefusedError) as caught:
        want(path, bounds, **fields)
    assert SECRET not in caught.value.message
    return caught.value


def parts(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(entries)}]


def an_image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def a_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def a_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"properties": {"inner": schema}}
    return schema


def test_every_path_that_is_served_has_a_case() -> None:
    assert set(BASES) == PATHS


@pytest.mark.parametrize("path", sorted(PATHS))
def test_each_path_takes_its_least_body_and_needs_a_model(path: str) -> None:
    assert want(path).model == "m"
    assert refused(path, model=None).param == "model"


@pytest.mark.parametrize(
    ("path", "param", "missing"),
    [
        (RESPONSES, "input", ("input",)),
        (MESSAGES, "messages", ("messages",)),
        (MESSAGES, "max_tokens", ("max_tokens",)),
        (EMBEDDINGS, "input", ("input",)),
        ("/classify", "input", ("input",)),
        ("/rerank", "query", ("query",)),
        ("/rerank", "documents", ("documents",)),
        ("/score", "text_2", ("text_2",)),
        ("/score", "text_1", ("text_1",)),
        ("/score", "queries", ("text_1", "text_2")),
        ("/v1/score", "documents", ("documents",)),
        ("/tokenize", "prompt", ("prompt",)),
        ("/detokenize", "tokens", ("tokens",)),
    ],
)
def test_what_is_missing_is_named(path: str, param: str, missing: tuple[str, ...]) -> None:
    body = {"model": "m", **{k: v for k, v in BASES[path].items() if k not in missing}}
    with pytest.raises(RefusedError) as caught:
        check_openai(path, json.dumps(body).encode())
    assert (caught.value.reason, caught.value.param) == ("INVALID_ARGUMENT", param)


@pytest.mark.parametrize(
    ("path", "fields", "operation", "prompt_tokens"),
    [
        (RESPONSES, {"input": "x" * 400, "instructions": "y" * 40}, "chat", 111),
        (RESPONSES, {"input": [{"role": "user", "content": "x" * 400}]}, "chat", 101),
        (MESSAGES, {"system": "x" * 400}, "chat", 104),
        (COUNT, {"system": "x" * 400}, "tokenize", 1),
        (
            EMBEDDINGS,
            {"input": None, "messages": [{"role": "user", "content": "x" * 40}]},
            "embeddings",
            11,
        ),
        ("/rerank", {"query": "x" * 40, "documents": ["y" * 40] * 10}, "rerank", 201),
        ("/score", {"text_1": "x" * 40, "text_2": ["y" * 40] * 10}, "score", 201),
        ("/tokenize", {"prompt": "x" * 400}, "tokenize", 1),
    ],
)
def test_what_the_engine_will_read_is_estimated(
    path: str, fields: dict[str, Any], operation: str, prompt_tokens: int
) -> None:
    wanted = want(path, **fields)
    assert (wanted.operation, wanted.prompt_tokens) == (operation, prompt_tokens)


def test_what_needs_a_memory_is_not_offered() -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
        error = refused(RESPONSES, **fields)
        assert (error.reason, error.param) == ("UNSUPPORTED", next(iter(fields)))
    assert want(RESPONSES, store=True, background=False, previous_response_id=None).model == "m"


TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop": "x" * 1025}, "stop"),
    (CHAT, {"stop": ["x", "y" * 1025]}, "stop"),
    (CHAT, {"messages": [TURN] * 2049}, "messages"),
    (CHAT, {"messages": parts(*[{"type": "text", "text": ""}] * 2049)}, "messages[...].content"),
    (CHAT, {"max_tokens": (1 << 20) + 1}, "max_tokens"),
    (CHAT, {"max_completion_tokens": (1 << 20) + 1}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    (CHAT, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (CHAT, {"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
    (CHAT, {"logprob_token_ids": [1] * 1025}, "logprob_token_ids"),
    (CHAT, {"bad_words": ["x"] * 1025}, "bad_words"),
    (CHAT, {"tools": [a_tool({})] * 129}, "tools"),
    (CHAT, {"tools": [a_tool({"description": "x" * 100_000})] * 3}, "tools"),
    (CHAT, {"tools": [a_tool({}), a_tool(nested(40))]}, "tools[1]"),
    (CHAT, {"tools": [{"function": 5}]}, "tools[0].function"),
    (CHAT, {"tools": [5]}, "tools[0]"),
    (CHAT, {"response_format": a_format({"title": "x" * 140_000})}, FORMAT),
    (CHAT, {"response_format": a_format(nested(40))}, FORMAT),
    (CHAT, {"response_format": 5}, "response_format"),
    (CHAT, {"structured_outputs": {"regex": "x" * 2049}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"regex": "(a{99}){999}"}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"grammar": "x" * 16_385}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"grammar": "(" * 65}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"choice": ["x"] * 2049}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"choice": ["x" * 140_000]}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"json": nested(40)}}, "structured_outputs.json"),
    (CHAT, {"structured_outputs": {"json": json.dumps(nested(40))}}, "structured_outputs.json"),
    (COMPLETIONS, {"best_of": 17}, "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": ["x"] * 200, "n": 16}, "n"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"response_format": a_format(nested(40))}, FORMAT),
    (RESPONSES, {"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
    (RESPONSES, {"max_output_tokens": 1 << 21}, "max_output_tokens"),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {"tools": [{"type": "function", "parameters": nested(40)}]}, "tools[0]"),
    (RESPONSES, {"text": {"format": {"schema": nested(40)}}}, "text.format.schema"),
    (MESSAGES, {"max_tokens": 1 << 21}, "max_tokens"),
    (MESSAGES, {"stop_sequences": ["x"] * 17}, "stop_sequences"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": nested(40)}]}, "tools[0]"),
    (
        MESSAGES,
        {"output_config": {"format": {"schema": nested(40)}}},
        "output_config.format.schema",
    ),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "input"),
    ("/rerank", {"documents": ["x"] * 2049}, "documents"),
    ("/score", {"text_2": ["x"] * 2049}, "text_2"),
    ("/detokenize", {"tokens": [1 << 31]}, "tokens"),
    *((path, {"kv_transfer_params": {}}, "kv_transfer_params") for path in (CHAT, MESSAGES)),
]


@pytest.mark.parametrize(("path", "fields", "param"), TOO_MUCH)
def test_too_much_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    error = refused(path, **fields)
    assert (error.reason, error.param) == ("INVALID_ARGUMENT", param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 16, "top_logprobs": 20, "stop": ["x" * 1024] * 16, "max_tokens": 1 << 20}),
        (CHAT, {"min_tokens": 9, "max_tokens": 9, "logit_bias": {"5": -100}}),
        (CHAT, {"tools": [a_tool(nested(20))] * 128, "response_format": a_format(nested(20))}),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": None}),
        (CHAT, {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}),
        (CHAT, {"tools": None, "response_format": None, "kv_transfer_params": None}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (COMPLETIONS, {"prompt": ["x"] * 2048}),
        (COMPLETIONS, {"max_tokens": 16, "structured_outputs": {"choice": ["yes", "no"]}}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "text": {"format": {"type": "text"}}}),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}], "text": {}}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "system": "x"}),
        ("/rerank", {"documents": "x", "top_n": 1}),
    ],
)
def test_what_is_within_the_bounds_passes(path: str, fields: dict[str, Any]) -> None:
    assert want(path, **fields).model == "m"


def test_bounds_are_what_the_operator_sets() -> None:
    bounds = Bounds(choices=2, stops=1, generated_tokens=100)
    for fields in ({"n": 3}, {"stop": ["x", "y"]}, {"max_tokens": 101}):
        assert refused(CHAT, bounds, **fields).param == next(iter(fields))
    sampling = inference.SamplingOptions(max_tokens=101)
    request = inference.GenerateRequest(model="m", text="x", sampling=sampling)
    with pytest.raises(RefusedError, match="at most 100"):
        check_generate(request, bounds)
    assert check_generate(request).max_tokens == 101


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"max_tokens": 5, "min_tokens": 6}, "sampling.min_tokens"),
        ({"max_tokens": (1 << 20) + 1}, "sampling.max_tokens"),
        ({"stop": ["x", "y" * 1025]}, "sampling.stop[1]"),
        ({"logprobs": 21}, "sampling.logprobs"),
    ],
)
def test_a_generate_has_the_same_bounds(sampling: dict[str, Any], param: str) -> None:
    options = inference.SamplingOptions(**sampling)
    with pytest.raises(RefusedError) as caught:
        check_generate(inference.GenerateRequest(model="m", text=SECRET, sampling=options))
    assert caught.value.param == param


def test_inputs_of_embed_are_bounded_too() -> None:
    request = inference.EmbedRequest(model="m", inputs=[inference.EmbedInput(text="x")] * 3)
    with pytest.raises(RefusedError, match="more than 2 entries"):
        check_embed(request, Bounds(inputs=2))


A = {"$ref": "#/$defs/a"}
B = {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {**A, "$defs": {"a": A}},
        {**A, "$defs": {"a": B, "b": {"anyOf": [{"type": "null"}, A]}}},
        {"properties": {"x": A}, "$defs": {"a": {"allOf": [{"if": A}]}}},
        {"items": {"oneOf": [{"$ref": "#/items"}]}},
        {"\u0024ref": "#"},
    ],
)
def test_a_reference_without_an_end_is_refused(schema: Any) -> None:
    assert "leads back to itself" in refused(CHAT, response_format=a_format(schema)).message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {**A, "$defs": {"a": {"anyOf": [{"type": "null"}, {"properties": {"next": A}}]}}},
        {"allOf": [A, A, A], "$defs": {"a": {"type": "string"}}},
        {"$ref": "#/not/there"},
        {"properties": {"schema": A}, "$defs": {"a": {"enum": ["$ref"]}}},
    ],
)
def test_a_schema_of_trees_passes(schema: Any) -> None:
    assert want(CHAT, response_format=a_format(schema)).model == "m"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "http://169.254.169.254/schema"}, "another document"),
        ({"maxLength": 10_001}, "'maxLength' above 10000"),
        ({"items": {"minItems": 1e9}}, "'minItems' above 10000"),
        ({"pattern": "(a{100}){101}"}, "repeats more than 10000 times"),
        ({"patternProperties": {"(a{100}){101}": {}}}, "repeats more than 10000 times"),
        ({"enum": list(range(2049))}, "more than 2048 enum values"),
        ({"properties": {f"p{n}": {} for n in range(513)}}, "more than 512 properties"),
        ({"prefixItems": [{"properties": {"a": {}, "b": {}}}] * 257}, "more than 512 properties"),
    ],
)
def test_what_makes_a_schema_slow_is_refused(schema: Any, problem: str) -> None:
    assert problem in refused(CHAT, response_format=a_format(schema)).message


def test_the_schemas_of_structural_tags_are_found() -> None:
    legacy = {
        "type": "structural_tag",
        "triggers": ["<"],
        "structures": [{"schema": {"$ref": "#"}}],
    }
    nested_tag = {"type": "structural_tag", "format": {"content": {"json_schema": {"$ref": "#"}}}}
    for tag in (legacy, nested_tag):
        assert refused(CHAT, response_format=tag).param == "response_format"
    error = refused(CHAT, structured_outputs={"structural_tag": json.dumps(nested_tag)})
    assert error.param == "structured_outputs.structural_tag"


def test_many_references_are_followed_in_no_time() -> None:
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 5} for n in range(400)}
    assert want(CHAT, response_format=a_format({"$defs": definitions})).model == "m"


@pytest.mark.parametrize(
    ("pattern", "copies"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){3}", 6),
        ("((a{10}){10}){10}", 1000),
        ("(a|b){5}", 15),
        ("a{,5}", 5),
        ("a{2,5}", 5),
        ("a{2,}", 4),
        ("(a+)+", 4),
        ("[a-z(){9}]{4}", 4),
        (r"\(a\){3}", 5),
        (r"[\]]{7}", 7),
        ("a{99999999999}", 1 << 30),
        (")))", 3),
        ("(((", 0),
        ("a?", 1),
    ],
)
def test_the_copies_a_pattern_makes_are_counted(pattern: str, copies: int) -> None:
    assert repeats(pattern) == copies


@given(st.text(alphabet="ab(){}[]\\|*+?,0123456789", max_size=60))
def test_no_pattern_breaks_the_count(pattern: str) -> None:
    assert repeats(pattern) >= 0


def test_brackets_in_a_grammars_texts_are_no_nesting() -> None:
    grammar = 'root ::= "(" * 5\n' * 200
    assert want(CHAT, structured_outputs={"grammar": grammar}).model == "m"


HOSTS = frozenset({"images.example.com", "internal.example.com:8443"})


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com/a/b.png?c=d&e=%20",
        "http://images.example.com",
        "HTTPS://Images.Example.COM/a",
        "https://images.example.com:443/a",
        "https://internal.example.com:8443/a",
    ],
)
def test_a_listed_host_is_passed_on(url: str) -> None:
    assert is_listed(url, HOSTS)
    assert want(CHAT, Bounds(media_hosts=HOSTS), messages=parts(an_image(url))).model == "m"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "http://2130706433/",
        "http://0x7f000001/",
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "ftp://images.example.com/a",
        "gopher://images.example.com/a",
        "//images.example.com/a",
        "images.example.com/a",
        "https://images.example.com.evil.com/a",
        "https://evil.com/images.example.com",
        "https://images.example.com@evil.com/a",
        "https://evil.com\\@images.example.com/a",
        "https://evil.com#@images.example.com/a",
        "https://images.example.com:8080/a",
        "https://images.example.com:@evil.com/",
        "https://images.example.com%2eevil.com/",
        "https://images.example.com\t/",
        " https://images.example.com/",
        "https://images.example.com/a\nb",
        "https://images.example.com./a",
        "https://imаges.example.com/a",
        "https:images.example.com/a",
        "https:///images.example.com/a",
        "blob:https://images.example.com/a",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    assert not is_listed(url, HOSTS)
    error = refused(CHAT, Bounds(media_hosts=HOSTS), messages=parts(an_image(url)))
    assert error.param == "messages[0].content[0].url"


def test_hosts_are_listed_with_commas() -> None:
    listed = " Images.example.com,internal.example.com:8443 ,,"
    assert listed_hosts(listed) == HOSTS
    assert listed_hosts("") == frozenset()
    for wrong in ("https://a.com", "a.com/b", "*.a.com", "a b", "user@a.com", "a.com:x"):
        with pytest.raises(ValueError, match="is not a host"):
            listed_hosts(wrong)


EVIL = "http://evil.com/a"
SOURCE = {"type": "image", "source": {"type": "url", "url": EVIL}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": parts({"type": "image_url", "image_url": EVIL})}),
        (CHAT, {"messages": parts({"image_url": EVIL})}),
        (CHAT, {"messages": parts({"type": "text", "text": "x", "uuid": "1", "image_url": EVIL})}),
        (CHAT, {"messages": parts({"type": "audio_url", "audio_url": {"url": EVIL}})}),
        (CHAT, {"messages": parts({"type": "video_url", "video_url": {"url": EVIL}})}),
        (CHAT, {"messages": parts({"type": "file", "file": {"file_url": EVIL}})}),
        (CHAT, {"messages": parts({"type": "new", "a": [{"b": {"url": EVIL}}]})}),
        (CHAT, {"messages": [{"role": "tool", "content": [an_image(EVIL)]}]}),
        (RESPONSES, {"input": parts({"type": "input_image", "image_url": EVIL})}),
        (RESPONSES, {"input": parts({"type": "input_file", "file_url": EVIL})}),
        (RESPONSES, {"input": [{"output": [{"type": "input_image", "image_url": EVIL}]}]}),
        (RESPONSES, {"input": [{"output": {"type": "screenshot", "image_url": EVIL}}]}),
        (MESSAGES, {"messages": parts(SOURCE)}),
        (MESSAGES, {"system": [SOURCE]}),
        (MESSAGES, {"messages": parts({"type": "tool_result", "content": [SOURCE]})}),
        (EMBEDDINGS, {"input": None, "messages": parts(an_image(EVIL))}),
        ("/pooling", {"messages": parts(an_image(EVIL))}),
        ("/tokenize", {"messages": parts(an_image(EVIL))}),
        ("/rerank", {"documents": [{"content": [an_image(EVIL)]}]}),
        ("/rerank", {"query": {"content": [an_image(EVIL)]}}),
        ("/score", {"text_2": ["x", {"content": [an_image(EVIL)]}]}),
    ],
)
def test_wherever_a_url_stands_it_is_looked_at(path: str, fields: dict[str, Any]) -> None:
    error = refused(path, **fields)
    assert error.param is not None
    assert error.param.endswith("url")
    assert EVIL not in error.message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": parts(an_image("data:image/png;base64,AAAA"))}),
        (CHAT, {"messages": parts({"type": "input_audio", "input_audio": {"data": "AAAA"}})}),
        (CHAT, {"messages": parts({"type": "text", "text": EVIL})}),
        (MESSAGES, {"messages": parts({"type": "tool_use", "id": "1", "input": {"url": EVIL}})}),
        (RESPONSES, {"input": [{"type": "function_call", "arguments": json.dumps({"url": EVIL})}]}),
    ],
)
def test_words_and_data_are_no_urls(path: str, fields: dict[str, Any]) -> None:
    assert want(path, **fields).model == "m"


def test_data_has_a_size() -> None:
    bounds = Bounds(media_bytes=100)
    for part in (
        an_image("data:image/png;base64," + "A" * 100),
        {"type": "input_audio", "input_audio": {"data": "A" * 101}},
        {"type": "image_embeds", "image_embeds": "A" * 101},
    ):
        assert "more than 100 characters" in refused(CHAT, bounds, messages=parts(part)).message


def test_parts_without_an_end_are_not_looked_through() -> None:
    part = {"type": "new", "a": [[]] * 100_001}
    assert "more than 100000 entries" in refused(CHAT, messages=parts(part)).message
    many = [{"type": "new", "a": [0] * 400}] * 300
    assert refused(CHAT, messages=parts(*many)).param == "messages[0].content[248]"


def test_prompts_of_the_other_protocols_are_known() -> None:
    input_ = [{"role": "user", "content": [{"type": "input_text", "text": "One"}]}]
    for wanted in (
        want(RESPONSES, input="One"),
        want(RESPONSES, input=[*input_, {"role": "assistant", "content": "Two"}]),
        want(MESSAGES, messages=input_, system="Be brief."),
        want("/rerank", query="One"),
        want("/score", text_1="One"),
        want("/tokenize", prompt="One"),
    ):
        assert wanted.question(10) == "One"
        assert not wanted.is_resumable
    by_messages = want(MESSAGES, messages=input_, system="Be brief.").prompt.prefix_bytes()
    by_responses = want(RESPONSES, input="One", instructions="Be brief.").prompt.prefix_bytes()
    assert by_messages == by_responses != b""
    assert want("/detokenize").question(10) == ""
    assert want("/rerank").prompt.prefix_bytes() == b""


NAMES = st.sampled_from(
    ["$ref", "properties", "enum", "pattern", "items", "anyOf", "schema", "url", "type", "content"]
)


def test_prompts_that_differ_in_no_text_have_other_names() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    data = {"type": "base64", "data": "AAAA"}
    bodies: list[Wanted] = [
        want(CHAT),
        want(CHAT, tools=[a_tool({})]),
        want(CHAT, tools=[a_tool({"type": "object"})]),
        want(CHAT, messages=[TURN, {"role": "assistant"}]),
        want(CHAT, messages=[TURN, {"role": "assistant", "tool_calls": [call]}]),
        want(CHAT, messages=[TURN, {"role": "assistant", "tool_calls": [call, call]}]),
        want(CHAT, messages=parts(an_image("data:image/png;base64,AAAA"))),
        want(CHAT, messages=parts(an_image("data:image/png;base64,BBBB"))),
        want(MESSAGES, messages=parts({"type": "image", "source": data})),
        want(MESSAGES, messages=parts({"type": "image", "source": {**data, "data": "BBBB"}})),
        want(MESSAGES, messages=parts({"type": "tool_use", "id": "1", "input": {"a": 1}})),
        want(MESSAGES, messages=parts({"type": "tool_use", "id": "1", "input": {"a": 2}})),
        want(MESSAGES, messages=parts({"type": "tool_result", "content": "One"})),
        want(RESPONSES, input=[{"type": "function_call", "arguments": "{}"}]),
        want(RESPONSES, input=[{"type": "function_call_output", "output": "One"}]),
    ]
    assert len({wanted.prompt.prefix_bytes() for wanted in bodies}) == len(bodies)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from(sorted(PATHS)),
    st.sampled_from(["messages", "input", "tools", "response_format", "text", "documents"]),
    json_values,
)
def test_whatever_a_field_holds_the_check_ends(path: str, field: str, value: Any) -> None:
    try:
        want(path, **{field: value})
    except RefusedError as error:
        assert error.reason == "INVALID_ARGUMENT"


@given(json_values)
def test_whatever_a_schema_holds_the_check_ends(schema: Any) -> None:
    try:
        want(CHAT, structured_outputs={"json": schema}, tools=[a_tool(schema)])
    except RefusedError as error:
        assert error.reason == "INVALID_ARGUMENT"
