"""Text beyond ASCII comes out of every hop and protocol as the engine wrote it.

The simulated engine answers such a prompt with characters whose bytes are two tokens each, a step
of 10 ms apart: whoever cuts at a token, a frame or a packet cuts a character.
"""

import asyncio
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect

from tests.mesh import Mesh

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
_CHAT = "/v1/chat/completions"
_BOUND_S = 60.0
_PROMPTS = {
    "families": "A family is \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466.",
    "skin tones": "\U0001f44d\U0001f3fb\U0001f44d\U0001f3ff \U0001f469\U0001f3fd\u200d\U0001f680",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \U0001f3f4\U000e0067\U000e0062\U000e0065"
    "\U000e006e\U000e0067\U000e007f",
    "split tokens": "é ñ 水 河 你好 🌊🦆🌊🦆",
    "Chinese": "你好，世界。请讲一个关于河流的故事。",
    "Japanese": "川の水はどこへ流れますか。ガギグ",
    "Korean": "\u1112\u1161\u11ab\u1100\u1173\u11af 한글",
    "combining marks": "e\u0301 n\u0303 Z\u0334\u0351\u0306a\u0301lgo \u0915\u094d\u0937\u093f",
    "right to left": "مرحبا \u200fשלום\u200e",
    "beyond the first plane": "𝒳 𐍈 𓂀 \U0010fffd",
    "nothing to see": "\ufeff\u200b\u200d\ufe0f\u2028é",
}
_CASES = [pytest.param(prompt, id=name) for name, prompt in _PROMPTS.items()]


@pytest_asyncio.fixture(loop_scope="module")
async def hops(shared_mesh: Mesh) -> AsyncIterator[dict[str, rpc.InferenceServiceStub]]:
    """Every hop of a replica, first the runner, which nobody stands before."""
    record = await shared_mesh.replica_record("r1")
    assert record is not None
    status = await shared_mesh.engine_status("r1", "sim@1")
    addresses = {
        "runner": f"unix:{status.socket_path}",
        "batcher": record.address,
        "router": shared_mesh.grpc,
    }
    async with (
        connect(addresses["runner"]) as runner,
        connect(addresses["batcher"]) as batcher,
        connect(addresses["router"]) as router,
    ):
        channels = {"runner": runner, "batcher": batcher, "router": router}
        yield {name: rpc.InferenceServiceStub(channel) for name, channel in channels.items()}


def _document(prompt: str, *, stream: bool, stop: str = "") -> dict[str, Any]:
    return {
        "model": "sim@1",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 400,
        "stream": stream,
        **({"stop": stop} if stop else {}),
    }


def _encode(document: dict[str, Any], *, escapes: bool = False) -> bytes:
    return json.dumps(document, ensure_ascii=escapes).encode()


async def _generate(stub: rpc.InferenceServiceStub, prompt: str, stop: str) -> str:
    request = pb.GenerateRequest(
        model="sim@1",
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingOptions(max_tokens=400, stop=[stop] if stop else []),
    )
    call = stub.Generate(request, timeout=_BOUND_S)
    return "".join([part.text_delta async for part in call])


async def _call_openai(stub: rpc.InferenceServiceStub, document: dict[str, Any]) -> bytes:
    request = pb.CallOpenAIRequest(path=_CHAT, body=_encode(document))
    return b"".join([part.body async for part in stub.CallOpenAI(request, timeout=_BOUND_S)])


async def _post(
    address: str, body: bytes, *, sends: Iterator[int], reads: Iterator[int]
) -> tuple[bytes, bytes]:
    """Head and body of an answer; both ways in pieces of so many bytes."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    head = f"POST {_CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    left = memoryview(head.encode() + b"Connection: close\r\n\r\n" + body)
    received = bytearray()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setblocking(False)
        async with asyncio.timeout(_BOUND_S):
            await loop.sock_connect(client, (host, int(port)))
            while left:
                size = next(sends)
                await loop.sock_sendall(client, left[:size])
                left = left[size:]
            while piece := await loop.sock_recv(client, next(reads)):
                received += piece
    head_bytes, _, rest = bytes(received).partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 200 "), bytes(received)
    return head_bytes, rest


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            assert body == b"\r\n"
            return whole
        whole += body[:count]
        assert body[count : count + 2] == b"\r\n"
        body = body[count + 2 :]


def _text_of_events(body: bytes) -> str:
    """The text of a stream, each of whose events is a document of its own."""
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    assert events.pop() == b"data: [DONE]"
    texts = []
    for event in events:
        assert event.startswith(b"data: ") and b"\n" not in event
        # Strictly: half a character is no UTF-8.
        [choice] = json.loads(event[6:].decode())["choices"]
        texts.append(choice["delta"].get("content") or "")
    assert len(texts) > 5, "it was streamed"
    return "".join(texts)


def _text_of_whole(body: bytes) -> str:
    [choice] = json.loads(body.decode())["choices"]
    return str(choice["message"]["content"])


async def _texts(
    mesh: Mesh, hops: dict[str, rpc.InferenceServiceStub], prompt: str, stop: str = ""
) -> dict[str, str]:
    """What each way to ask gives."""
    streamed = _document(prompt, stream=True, stop=stop)
    whole = _document(prompt, stream=False, stop=stop)
    rng = random.Random(prompt)

    def at_once() -> Iterator[int]:
        return itertools.repeat(1 << 16)

    def anyhow() -> Iterator[int]:
        return iter(lambda: rng.randint(1, 23), 0)

    async def sse(sends: Iterator[int], reads: Iterator[int], *, escapes: bool = False) -> str:
        body = _encode(streamed, escapes=escapes)
        head, answer = await _post(mesh.http, body, sends=sends, reads=reads)
        assert b"text/event-stream" in head
        return _text_of_events(_unchunked(answer))

    async def answered(sends: Iterator[int], reads: Iterator[int]) -> str:
        _, answer = await _post(mesh.http, _encode(whole), sends=sends, reads=reads)
        return _text_of_whole(answer)

    async def grpc_sse(stub: rpc.InferenceServiceStub) -> str:
        return _text_of_events(await _call_openai(stub, streamed))

    async def grpc_whole(stub: rpc.InferenceServiceStub) -> str:
        return _text_of_whole(await _call_openai(stub, whole))

    ways = {
        **{f"Generate at the {hop}": _generate(stub, prompt, stop) for hop, stub in hops.items()},
        **{f"CallOpenAI, streamed, at the {hop}": grpc_sse(stub) for hop, stub in hops.items()},
        **{f"CallOpenAI, whole, at the {hop}": grpc_whole(stub) for hop, stub in hops.items()},
        "HTTP, streamed": sse(at_once(), at_once()),
        "HTTP, streamed, asked in escapes": sse(at_once(), at_once(), escapes=True),
        "HTTP, streamed, byte by byte": sse(itertools.repeat(1), itertools.repeat(1)),
        "HTTP, streamed, cut anywhere": sse(anyhow(), anyhow()),
        "HTTP, whole": answered(at_once(), at_once()),
        "HTTP, whole, cut anywhere": answered(anyhow(), anyhow()),
    }
    return dict(zip(ways, await asyncio.gather(*ways.values()), strict=True))


def _assert_equal(texts: dict[str, str]) -> str:
    """The one text."""
    expected = texts["Generate at the runner"]
    assert texts == dict.fromkeys(texts, expected)
    assert "\ufffd" not in expected
    return expected


@pytest.mark.parametrize("prompt", _CASES)
async def test_every_way_gives_the_text_that_the_runner_wrote(
    shared_mesh: Mesh, hops: dict[str, rpc.InferenceServiceStub], prompt: str
) -> None:
    text = _assert_equal(await _texts(shared_mesh, hops, prompt))
    assert not text.isascii()


async def test_a_stop_text_of_split_characters_ends_every_way_at_the_same_place(
    shared_mesh: Mesh, hops: dict[str, rpc.InferenceServiceStub]
) -> None:
    prompt = _PROMPTS["Chinese"]
    free = await _generate(hops["runner"], prompt, "")
    stop = next(character for character in free[len(free) // 2 :] if not character.isascii())
    text = _assert_equal(await _texts(shared_mesh, hops, prompt, stop))
    assert text == free.partition(stop)[0]
