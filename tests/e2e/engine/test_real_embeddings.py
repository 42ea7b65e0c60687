"""The real embedding model through a runner."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from forebay.engine.v1 import engine_service_pb2 as pb
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


async def test_dead_engine_is_seen_and_a_dead_host_leaves_no_engine(embed_host: EngineHost) -> None:
    status = await embed_host.until_active(model_version=EMBED)
    core, worker = engine_pids(status.runner_pid)
    failed = asyncio.create_task(
        embed_host.until(lambda s: s.state == pb.MODEL_STATE_FAILED, model_version=EMBED)
    )
    await embed_host.load_of(model_version=EMBED)
    began = time.monotonic()
    os.kill(core, signal.SIGKILL)
    assert (await failed).reason == "vLLM's engine died."
    assert time.monotonic() - began < 2
    await gone({worker})
    # The host starts it again at once; it is killed with its runner in the middle of that.
    status = await embed_host.until(
        lambda s: s.phase == pb.LOAD_PHASE_WEIGHTS, model_version=EMBED, bound_s=120
    )
    started = {status.runner_pid, *engine_pids(status.runner_pid)}
    shared = set().union(*map(shared_memory, started))
    assert shared
    embed_host.process.kill()
    await gone(started)
    async with asyncio.timeout(10):
        while any(file.exists() for file in shared):
            await asyncio.sleep(0.02)


def shared_memory(pid: int) -> set[Path]:
    """Return the shared memory that a process has mapped and that has a name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "(del" not in line}


def engine_pids(runner: int) -> tuple[int, int]:
    """Return the processes of a runner's engine: vLLM's core and its worker."""
    (core,) = (pid for pid in children(runner) if "EngineCore" in title(pid))
    (worker,) = (pid for pid in children(core) if "Worker" in title(pid))
    return core, worker


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def gone(pids: set[int]) -> None:
    """Wait until processes are no more, or dead and only not yet reaped by who adopted them."""
    async with asyncio.timeout(10):
        while alive := {pid for pid in pids if is_alive(pid)}:
            await asyncio.sleep(0.02)
    assert not alive


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
