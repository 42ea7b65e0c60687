"""A real model's runner is killed in the middle of its answers: clients see a gap and no more."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine

from tests.conftest import EtcdProcess
from tests.mesh import Mesh, running, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(420),
]
_MODELS = Path(__file__).resolve().parents[3] / ".forebay" / "models"
_CHAT = engine.ModelSpec(
    model_version="smollm2@1",
    backend=engine.BACKEND_VLLM,
    artifact_path=str(_MODELS / "smollm2"),
    context_tokens=2048,
    max_sequences=64,
    kv_cache_bytes=1 << 29,
)
_PATH = "/v1/chat/completions"
_CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"type": "string", "maxLength": 16},
        "people": {"type": "integer", "maximum": 99999999},
    },
    "required": ["city", "country", "people"],
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}
_TOKENS = 70


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Two replicas of a real model."""
    folder = tmp_path_factory.mktemp("mesh")
    etcd = EtcdProcess(folder / "etcd")
    etcd.start()
    try:
        async with running(folder, etcd.endpoint, "/failover", _CHAT) as mesh:
            mesh.add_replica("r1", _CHAT)
            mesh.add_replica("r2", _CHAT)
            await mesh.placeable("r1", "r2", timeout_s=240)
            yield mesh
    finally:
        etcd.kill()


class Stream:
    """One streamed answer, as its client has it."""

    def __init__(self, name: str, body: dict[str, Any]) -> None:
        self.name = name
        self.body = body
        self.text = ""
        self.heads: set[tuple[Any, ...]] = set()
        self.ends: list[Any] = []
        self.usage: Any = None
        self.times_s: list[float] = []
        self.grown = asyncio.Event()

    async def follow(self, http: aiohttp.ClientSession, url: str) -> "Stream":
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        async with http.post(url, json=self.body | streamed) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    self._take_in(line.removeprefix(b"data: ").strip())
        return self

    def _take_in(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ends.append("done")
            return
        event = json.loads(data)
        assert "error" not in event, event
        self.heads.add((event["id"], event["created"], event["model"]))
        if event.get("usage"):
            usage = event["usage"]
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                self.ends.append((choice["finish_reason"], choice.get("stop_reason")))
                self.grown.set()
            if choice["delta"].get("content"):
                self.times_s.append(time.monotonic())
                self.grown.set()

    async def until_part(self, count: int) -> None:
        """Wait for so many parts with text, or for the end."""
        async with asyncio.timeout(120):
            while len(self.times_s) < count and not self.ends:
                self.grown.clear()
                await self.grown.wait()

    def answer(self) -> tuple[Any, ...]:
        """What has to be the same in every run."""
        return (self.name, self.text, tuple(self.ends), self.usage, len(self.heads))

    def gap_s(self) -> float:
        return max(b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False))


def streams(stop: str) -> list[Stream]:
    """Answers of all kinds that are hard to go on with; `stop` is in the one about rivers."""

    def asked(name: str, text: str, **options: Any) -> Stream:
        messages = [{"role": "user", "content": text}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": _TOKENS, **options}
        return Stream(name, body)

    return [
        asked("greedy", "Tell me about mountains.", temperature=0),
        asked("seeded", "Tell me a story.", temperature=0.5, seed=11, top_k=5),
        asked(
            "schema",
            "Describe a city as JSON.",
            temperature=0,
            response_format=_SCHEMA,
            presence_penalty=0.7,
        ),
        asked("stop", "Tell me about rivers.", temperature=0, stop=[stop]),
        asked(
            "penalties",
            "Say hello.",
            temperature=0,
            min_tokens=60,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
        ),
        asked("seeded penalty", "Count in words.", temperature=0.4, seed=5, presence_penalty=0.5),
    ]


async def follow(
    http: aiohttp.ClientSession, mesh: Mesh, asked: Sequence[Stream]
) -> list[asyncio.Task[Stream]]:
    url = f"http://{mesh.http}{_PATH}"
    return [asyncio.create_task(stream.follow(http, url)) for stream in asked]


async def gather_answers(
    http: aiohttp.ClientSession, mesh: Mesh, stop: str, into: list[set[Any]]
) -> None:
    """Add what nothing disturbs: each answer by itself, and all of them together."""
    for stream, found in zip(streams(stop), into, strict=True):
        found.add((await asyncio.gather(*await follow(http, mesh, [stream])))[0].answer())
    together = await asyncio.gather(*await follow(http, mesh, streams(stop)))
    for stream, found in zip(together, into, strict=True):
        found.add(stream.answer())


async def test_a_killed_runner_costs_no_answer_a_token(mesh: Mesh) -> None:
    async with aiohttp.ClientSession() as http:
        (rivers,) = await asyncio.gather(
            *await follow(http, mesh, [each for each in streams("\x00") if each.name == "stop"])
        )
        words = rivers.text.split(" ")
        # Two words that come after the cuts, the first of which may be the last before one.
        stop = " ".join(words[12:14])
        asked = streams(stop)
        # Rounding differs with what runs beside: an answer may have more than one right text.
        wanted: list[set[Any]] = [set() for _ in asked]
        await gather_answers(http, mesh, stop, wanted)
        await gather_answers(http, mesh, stop, wanted)
        for ((_, schema, *_),), ((_, stopped, *_),) in [(wanted[2], wanted[3])]:
            assert set(json.loads(schema)) == set(_CITY["required"])
            assert stopped == rivers.text[: rivers.text.index(stop)]
        assert sum(len(each) == 1 for each in wanted) >= 4
        moved = 0.0
        gaps_s: list[float] = []
        for cut in (1, 5, 10):
            asked = streams(stop)
            tasks = await follow(http, mesh, asked)
            await asyncio.gather(*(stream.until_part(cut) for stream in asked))
            victim = max((await mesh.view()).items(), key=lambda each: each[1].in_flight)[0]
            os.kill((await mesh.engine_status(victim)).runner_pid, signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
            for _ in range(6):
                if all(s.answer() in same for s, same in zip(answers, wanted, strict=True)):
                    break
                await gather_answers(http, mesh, stop, wanted)
            for stream, same in zip(answers, wanted, strict=True):
                assert stream.answer() in same, f"killed at part {cut} of {stream.name}"
            gaps_s += [stream.gap_s() for stream in answers]
            now_moved = await _resumed(http, mesh)
            assert now_moved > moved
            moved = now_moved
            await until(lambda name=victim: _is_back(mesh, name), 120)
    print(f"{moved:.0f} answers moved, longest gap {max(gaps_s):.2f} s")


async def _is_back(mesh: Mesh, name: str) -> bool:
    return (await mesh.view())[name].placeable


async def _resumed(http: aiohttp.ClientSession, mesh: Mesh) -> float:
    async with http.get(f"http://{mesh.http}/metrics") as answer:
        page = await answer.text()
    wanted = 'forebay_router_resumes_total{result="resumed"}'
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(wanted))
