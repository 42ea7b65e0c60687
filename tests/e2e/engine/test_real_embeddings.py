"""The real embedding model through a runner."""

import json

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_common.errors import Reason, from_rpc_error

from tests.engine_host import EngineHost

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
EMBED = "minilm@1"
TEXTS = ["A river runs through the town.", "The stream flows by the village.", "def main(): pass"]


async def test_similar_texts_are_close(embed_host: EngineHost) -> None:
    runner = await embed_host.runner(model_version=EMBED)
    answer = await runner.Embed(
        inference.EmbedRequest(inputs=[inference.EmbedInput(text=text) for text in TEXTS])
    )
    vectors = [list(embedding.values) for embedding in answer.embeddings]
    assert [len(vector) for vector in vectors] == [384, 384, 384]
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]) + 0.2
    assert answer.usage.prompt_tokens > 0
    body = json.dumps({"model": "x", "input": TEXTS}).encode()
    request = inference.CallOpenAIRequest(path="/v1/embeddings", body=body)
    (message,) = [message async for message in runner.CallOpenAI(request)]
    document = json.loads(message.body)
    for vector, entry in zip(vectors, document["data"], strict=True):
        assert dot(vector, entry["embedding"]) > 0.99
    assert message.usage.prompt_tokens == document["usage"]["prompt_tokens"]
    assert message.usage.prompt_tokens == answer.usage.prompt_tokens


async def test_text_is_not_generated(embed_host: EngineHost) -> None:
    runner = await embed_host.runner(model_version=EMBED)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(aiter(runner.Generate(inference.GenerateRequest(text="hello"))))
    assert from_rpc_error(failure.value).reason is Reason.UNSUPPORTED


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
