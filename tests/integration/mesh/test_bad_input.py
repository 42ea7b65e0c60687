"""What no caller should send: one clear error at the first hop, and nothing else changes."""

import asyncio
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.channel import connect
from forebay_common.discovery import Keys, to_json
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.store import Store

from tests.mesh import Mesh, until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
_SECRET = "the-prompt-is-a-secret"
_MESSAGES = [{"role": "user", "content": _SECRET}]
# A path, an address, a traceback, or a name of Python.
_LEAK = re.compile(r"(/[\w.-]+){2,}|127\.0\.0\.1|unix:|Traceback|<class|\.py\b")
_ROUTES = re.compile(r"/v1/[a-z/]+")
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", "messages": _MESSAGES, "max_tokens": 2, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", "prompt": _SECRET, "max_tokens": 2, **fields}).encode()


def embedding(**fields: Any) -> bytes:
    return json.dumps({"model": "encoder", "input": _SECRET, **fields}).encode()


def spliced(text: str) -> bytes:
    """A right chat with more text before its end."""
    return chat()[:-1] + b", " + text.encode() + b"}"


_WRONG: dict[str, list[Any]] = {
    "model": [None, 5, "", "x" * 201, [], {}],
    "messages": [None, 5, "x", [], [None], [[]], {"a": 1}],
    "stream": ["yes", 1, []],
    "stream_options": [5, "x", [], {"include_usage": 3}],
    "n": [0, 17, 1.5, "1", True, 10**30],
    "max_tokens": [0, -1, 1.5, "2", [], 10**30],
    "max_completion_tokens": [0, -1, "2", {}],
    "min_tokens": [-1, "2"],
    "temperature": [-0.1, 2.1, "hot", [], True],
    "top_p": [0, 1.1, -1, "x"],
    "top_k": [-2, 0.5, "x"],
    "seed": [1.5, "x", [], 10**30],
    "stop": [5, "", [5], ["a"] * 17, {"a": 1}],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-2.1, 2.1, []],
    "repetition_penalty": [0, -1, "x"],
    "logit_bias": [5, "x", [], {"5": "x"}],
    "logprobs": [5, "x"],
    "top_logprobs": [-1, 21, "x"],
    "ignore_eos": [1, "x"],
    "user": [5, []],
    "tools": [5, "x", [5]],
    "response_format": [5, "json", []],
}


def wrong_chats() -> Iterator[tuple[str, str, bytes, int, str | None]]:
    for field, values in _WRONG.items():
        for value in values:
            yield field, _CHAT, chat(**{field: value}), 400, None


_BODIES: list[tuple[str | None, str, bytes, int, str | None]] = [
    *wrong_chats(),
    ("messages", _CHAT, chat(messages=[{"role": 5, "content": "x"}]), 400, None),
    ("messages", _CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, None),
    ("model", _CHAT, chat(model="nope"), 404, "model_not_found"),
    ("model", _CHAT, chat(model="sim@nope"), 404, "model_not_found"),
    ("model", _CHAT, chat(model="sim@"), 404, "model_not_found"),
    ("model", _CHAT, chat(model="@1"), 404, "model_not_found"),
    ("model", _CHAT, chat(model="a\r\nb"), 404, "model_not_found"),
    ("model", _CHAT, chat(model="nope", stream=True), 404, "model_not_found"),
    (None, _CHAT, b"", 400, None),
    (None, _CHAT, b"{", 400, None),
    (None, _CHAT, b"null", 400, None),
    (None, _CHAT, b"[]", 400, None),
    (None, _CHAT, b"\0" * 100, 400, None),
    (None, _CHAT, chat() + b"x", 400, None),
    (None, _CHAT, b"\xef\xbb\xbf" + chat(), 400, None),
    (None, _CHAT, chat().decode().encode("utf-16"), 400, None),
    (None, _CHAT, spliced('"temperature": NaN'), 400, None),
    (None, _CHAT, spliced('"x": Infinity'), 400, None),
    ("temperature", _CHAT, spliced('"temperature": 1e999'), 400, None),
    (None, _CHAT, spliced('"x": ' + "[" * 50_000 + "]" * 50_000), 400, None),
    (None, _CHAT, spliced('"x": "%s"').replace(b"%s", b"\xff\xfe"), 400, None),
    (None, _CHAT, spliced('"user": "\\ud800"'), 400, None),
    ("max_tokens", _CHAT, spliced('"max_tokens": "x"'), 400, None),
    ("max_tokens", _CHAT, spliced('"max_tokens": ' + "9" * 5000), 400, None),
    (None, _CHAT, chat(messages=[{"role": "user", "content": "w " * 40_000}]), 400, "ctx"),
    (
        None,
        _CHAT,
        chat(messages=[{"role": "user", "content": "w " * 40_000}], stream=True),
        400,
        "ctx",
    ),
    (None, _CHAT, chat(model="encoder"), 400, "unsupported"),
    (None, _CHAT, chat(model="encoder", stream=True), 400, "unsupported"),
    (None, _COMPLETIONS, completion(model="encoder"), 400, "unsupported"),
    (None, _COMPLETIONS, completion(prompt="w " * 40_000), 400, "ctx"),
    ("prompt", _COMPLETIONS, completion(prompt=""), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[[]]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=["a", 1]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[-1]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[10**9]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[10**30]), 400, None),
    ("prompt", _COMPLETIONS, completion(prompt=[True]), 400, None),
    ("best_of", _COMPLETIONS, completion(best_of=17), 400, None),
    ("echo", _COMPLETIONS, completion(echo=5), 400, None),
    (None, _EMBEDDINGS, embedding(model="sim"), 400, "unsupported"),
    (None, _EMBEDDINGS, embedding(input="w " * 40_000), 400, "ctx"),
    ("input", _EMBEDDINGS, embedding(input=""), 400, None),
    ("input", _EMBEDDINGS, embedding(input=[]), 400, None),
    ("input", _EMBEDDINGS, embedding(input=["a"] * 2049), 400, None),
    ("input", _EMBEDDINGS, embedding(input=[10**9]), 400, None),
    ("encoding_format", _EMBEDDINGS, embedding(encoding_format="x"), 400, None),
    ("dimensions", _EMBEDDINGS, embedding(dimensions=0), 400, None),
]


def assert_clear(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    told = json.dumps(error)
    assert _SECRET not in told
    assert not _LEAK.search(_ROUTES.sub("", told)), told


async def test_every_wrong_body_gets_one_clear_error(shared_mesh: Mesh) -> None:
    async with aiohttp.ClientSession(f"http://{shared_mesh.http}") as http:
        for param, path, body, status, code in _BODIES:
            async with http.post(path, data=body) as answer:
                case = (path, body[:200], await answer.text())
                assert answer.status == status, case
                assert answer.content_type == "application/json", case
                error = json.loads(case[2])["error"]
            assert_clear(error)
            assert error["code"] == ("context_length_exceeded" if code == "ctx" else code), case
            assert (error["param"] or "").startswith(param or ""), case
            assert bool(error["param"]) >= bool(param), case
    assert shared_mesh.errors_logged() == []


async def test_the_official_client_raises_what_its_callers_expect(shared_mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{shared_mesh.http}/v1", api_key="unused", max_retries=0, timeout=10
    ) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=_MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="sim", messages=_MESSAGES, n=99)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            await client.embeddings.create(model="sim", input="x")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="lone", prompt="x")
        assert caught.value.code == "no_replica"


async def test_a_body_at_the_limit_reaches_the_engine(shared_mesh: Mesh) -> None:
    """Every hop takes what the router takes; the engine says that the prompt is too long."""
    limit = 16 << 20
    body = chat(messages=[{"role": "user", "content": "%"}])
    body = body.replace(b"%", b"x" * (limit - len(body) + 1))
    assert len(body) == limit
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{shared_mesh.http}{_CHAT}", data=body) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert_clear(error)


async def test_an_alias_of_what_is_deleted_is_not_found(shared_mesh: Mesh) -> None:
    alias = registry.Alias(name="ghost", target="gone@1")
    async with Store.open([shared_mesh.etcd]) as store:
        await store.put(Keys(shared_mesh.namespace).alias("ghost"), to_json(alias))
    async with aiohttp.ClientSession(f"http://{shared_mesh.http}") as http:

        async def listed() -> bool:
            async with http.get("/v1/models/ghost") as answer:
                return answer.status == 200

        await until(listed, 5)
        async with http.post(_CHAT, data=chat(model="ghost")) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_small_body_that_grows_without_end_is_too_large(
    shared_mesh: Mesh, encoding: str
) -> None:
    bomb = zlib.compress(b" " * (64 << 20), wbits=31 if encoding == "gzip" else 15)
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"http://{shared_mesh.http}{_CHAT}", data=bomb, headers={"Content-Encoding": encoding}
        ) as answer,
    ):
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "body_too_large"


async def exchange(address: str, sent: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Send bytes, and read every answer until the server closes or falls silent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        writer.write(sent)
        while head := await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5):
            first, *lines = head.decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await reader.readexactly(int(headers["content-length"]))
            answers.append((int(first.split()[1]), headers, body))
            if reader.at_eof() or len(answers) == sent.count(b" HTTP/1.1\r\n"):
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
    return answers


def a_request(*headers: str, body: bytes | None = None, path: str = _CHAT) -> bytes:
    body = chat() if body is None else body
    lines = (f"POST {path} HTTP/1.1", "Host: x", *headers, f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /v1/models\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /v1/models/%00%0d%0aX:1 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /v1/chat/completions/ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (a_request("Content-Length: 5"), 400),
        (a_request("Transfer-Encoding: chunked"), 400),
        (a_request("X-Long: " + "y" * 40_000), 431),
        (a_request(*(f"X-{n}: y" for n in range(200))), 431),
        (a_request("X-Control: a\x01b"), 400),
        (a_request("Content-Encoding: gzip"), 400),
        (a_request("X-Request-Timeout-S: 0"), 400),
        (a_request("X-Request-Timeout-S: -1"), 400),
        (a_request("X-Request-Timeout-S: nan"), 400),
        (a_request("X-Request-Timeout-S: 1e3"), 400),
        (a_request("X-Request-Timeout-S: 0.000001"), 504),
        (a_request("X-Request-Timeout-S: 99999999999"), 200),
        (a_request("Forebay-Class: URGENT"), 400),
        (a_request("Forebay-Tenant: \xff"), 400),
        (a_request("Forebay-Session: " + "s" * 300), 400),
        (a_request("Traceparent: garbage"), 200),
        (a_request("Traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-01"), 200),
        (a_request("Tracestate: =,;", "Baggage: \xff"), 200),
        (a_request("X-Request-Id: a b"), 200),
        (a_request("X-Request-Id: " + "x" * 500), 200),
        (a_request("Forebay-Model: nope@1", "Forebay-Attempt: x"), 200),
    ],
)
async def test_wrong_heads_get_one_answer(shared_mesh: Mesh, sent: bytes, status: int) -> None:
    answers = await exchange(shared_mesh.http, sent)
    assert [answer[0] for answer in answers] == [status]
    [(_, headers, body)] = answers
    assert re.fullmatch(r"req-[0-9a-f]{24}", headers["x-request-id"])
    if status != 200:
        assert_clear(json.loads(body)["error"])
    assert shared_mesh.errors_logged() == []


async def test_each_of_several_requests_on_one_connection_gets_its_answer(
    shared_mesh: Mesh,
) -> None:
    sent = a_request() + a_request(body=b"{") + a_request(path="/v1/no") + a_request()
    answers = await exchange(shared_mesh.http, sent)
    assert [status for status, _, _ in answers] == [200, 400, 404, 200]


_SERVICE = "/forebay.inference.v1.InferenceService"


def generate(**fields: Any) -> bytes:
    fields = {"model": "sim@1", "text": _SECRET, **fields}
    return pb.GenerateRequest(
        **{k: v for k, v in fields.items() if v is not None}
    ).SerializeToString()


def sampled(**options: Any) -> bytes:
    return generate(sampling=pb.SamplingOptions(**{"max_tokens": 2, **options}))


def said(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns])


def called(path: str, body: bytes) -> bytes:
    return pb.CallOpenAIRequest(path=path, body=body).SerializeToString()


_NAN = float("nan")
# Refused alike by whichever hop is called first.
_ANYWHERE: list[tuple[str, bytes, Reason]] = [
    ("Generate", b"\xff\xfe\xfd", Reason.INVALID_ARGUMENT),
    ("Generate", generate()[:-3], Reason.INVALID_ARGUMENT),
    ("Generate", b"\x0a\x05sim@1\x12\x02\xff\xfe", Reason.INVALID_ARGUMENT),
    ("Generate", generate(text=None), Reason.INVALID_ARGUMENT),
    ("Generate", generate(text=""), Reason.INVALID_ARGUMENT),
    ("Generate", generate(text=None, token_ids=pb.TokenIds()), Reason.INVALID_ARGUMENT),
    (
        "Generate",
        generate(text=None, token_ids=pb.TokenIds(ids=[2**32 - 1])),
        Reason.INVALID_ARGUMENT,
    ),
    ("Generate", generate(text=None, messages=said()), Reason.INVALID_ARGUMENT),
    ("Generate", generate(text="w " * 40_000), Reason.CONTEXT_LENGTH_EXCEEDED),
    ("Generate", sampled(max_tokens=0), Reason.INVALID_ARGUMENT),
    ("Generate", sampled(logprobs=21), Reason.INVALID_ARGUMENT),
    ("Generate", sampled(stop=["a"] * 17), Reason.INVALID_ARGUMENT),
    ("Embed", b"\xff\xff", Reason.INVALID_ARGUMENT),
    ("Embed", pb.EmbedRequest(model="sim@1").SerializeToString(), Reason.INVALID_ARGUMENT),
    (
        "Embed",
        pb.EmbedRequest(model="sim@1", inputs=[pb.EmbedInput(text="x")]).SerializeToString(),
        Reason.UNSUPPORTED,
    ),
    ("CallOpenAI", b"\x99\x99", Reason.INVALID_ARGUMENT),
    ("CallOpenAI", called(_CHAT, b""), Reason.INVALID_ARGUMENT),
    ("CallOpenAI", called(_CHAT, b"[" * 50_000), Reason.INVALID_ARGUMENT),
    ("CallOpenAI", called(_CHAT, chat(model="sim@1", messages=5)), Reason.INVALID_ARGUMENT),
    (
        "CallOpenAI",
        called(_CHAT, b'{"model":"sim@1","x":' + b"[" * 9000 + b"]" * 9000 + b"}"),
        Reason.INVALID_ARGUMENT,
    ),
    ("CallOpenAI", called("/etc/passwd", chat(model="sim@1")), Reason.ROUTE_NOT_FOUND),
    ("NoSuchMethod", b"", Reason.METHOD_NOT_ALLOWED),
]
# The router knows the catalogue and the contract's bounds; the engine has its own.
_AT_THE_ROUTER: list[tuple[str, bytes, Reason]] = [
    ("Generate", b"", Reason.INVALID_ARGUMENT),
    ("Generate", generate(model=""), Reason.INVALID_ARGUMENT),
    ("Generate", generate(model="x" * 201), Reason.INVALID_ARGUMENT),
    ("Generate", generate(model="nope"), Reason.MODEL_NOT_FOUND),
    ("Generate", generate(model="sim@nope"), Reason.MODEL_NOT_FOUND),
    ("Generate", generate(model="encoder"), Reason.UNSUPPORTED),
    ("Generate", generate(text=None, messages=said(("hacker", "x"))), Reason.INVALID_ARGUMENT),
    *(
        ("Generate", sampled(**{option: value}), Reason.INVALID_ARGUMENT)
        for option, values in {
            "temperature": (-1, 2.1, _NAN, float("inf")),
            "top_p": (0, -1, 1.1, _NAN),
            "presence_penalty": (-2.1, 2.1, _NAN),
            "frequency_penalty": (-2.1, 2.1, _NAN),
            "repetition_penalty": (0, -1, _NAN, float("inf")),
            "stop": ([""],),
        }.items()
        for value in values
    ),
]


async def refusal(
    channel: Any, method: str, message: bytes, *metadata: tuple[str, str]
) -> ForebayError:
    """The one status of a call, with its reason."""
    make = channel.unary_unary if method == "Embed" else channel.unary_stream
    call = make(f"{_SERVICE}/{method}")(message, metadata=metadata, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if method == "Embed" else call.read())
    assert any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata())
    error = from_rpc_error(caught.value)
    assert_clear(error.openai_body()["error"])
    return error


@pytest.mark.parametrize("hop", ["router", "batcher", "runner"])
async def test_every_wrong_message_gets_one_reason_at_each_hop(shared_mesh: Mesh, hop: str) -> None:
    record = await shared_mesh.replica_record("r1")
    assert record is not None
    runner = (await shared_mesh.engine_status("r1", "sim@1")).socket_path
    address = {"router": shared_mesh.grpc, "batcher": record.address, "runner": f"unix:{runner}"}
    cases = [*_ANYWHERE, *(_AT_THE_ROUTER if hop == "router" else ())]
    async with connect(address[hop]) as channel:
        for method, message, reason in cases:
            error = await refusal(channel, method, message)
            assert error.reason is reason, (method, message[:100], error)
    assert shared_mesh.errors_logged() == []


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("forebay-class", "URGENT", Reason.INVALID_ARGUMENT),
        ("forebay-class", "", Reason.INVALID_ARGUMENT),
        ("forebay-tenant", "x" * 300, Reason.INVALID_ARGUMENT),
        ("forebay-session", "", Reason.INVALID_ARGUMENT),
        ("forebay-model", "", Reason.INVALID_ARGUMENT),
        ("forebay-model", "nope@1", Reason.MODEL_NOT_FOUND),
        ("forebay-model", "@", Reason.MODEL_NOT_FOUND),
    ],
)
async def test_wrong_metadata_is_named(
    shared_mesh: Mesh, key: str, value: str, reason: Reason
) -> None:
    async with connect(shared_mesh.grpc) as channel:
        error = await refusal(channel, "Generate", generate(), (key, value))
    assert error.reason is reason
    assert error.param in (key, "model")


async def test_the_fleet_is_as_it_was(shared_mesh: Mesh) -> None:
    """No caller's mistake speaks against a replica. Runs after all of the above."""
    await shared_mesh.placeable("r1", "r2", timeout_s=1)
    for name in ("r1", "r2"):
        assert (await shared_mesh.engine_status(name, "sim@1")).restarts == 0
    assert shared_mesh.errors_logged() == []
