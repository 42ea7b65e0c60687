"""What it is worth to send a prompt where its beginning is cached, with a real model.

Two replicas with a real model on the CPU (vLLM, SmolLM2-135M) answer questions about documents of a
thousand tokens. Each replica's KV cache holds five sixths of the documents. The same questions go
through this router and through the same router with round robin instead of its own placement, in
turns, each time about other documents; throughput is compared.

Needs the model: `python -m forebay_engine.prepare smollm2 --into .forebay/models/smollm2`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.discovery import Instance, Keys
from forebay_common.store import Store

from bench.report import Report
from tests.conftest import EtcdProcess
from tests.mesh import Mesh, until

GOAL = 1.5
ROUNDS = 2
DOCUMENTS = 24
ASKED = 6
"""How often each document is asked about."""
AT_ONCE = 4
_MODEL = "smollm2@1"
_ARTIFACT = Path(__file__).parent.parent / ".forebay" / "models" / "smollm2"
_TOKEN_BYTES = 23_040
"""Of the KV cache: keys and values of 30 layers, 3 heads, 64 dimensions, 16 bits."""
_CACHE_TOKENS = 17_600
_WORDS = 820
"""Of a document: about a thousand tokens."""
_LOAD_S = 400.0
_ANSWER_S = 300.0
_VOCABULARY = """
river rain stone mill bridge water field house road market winter summer evening morning old new
long short bright dark quiet open narrow deep slow quick green white people children farmer miller
teacher carries follows crosses builds keeps finds leaves opens closes remembers under over beside
between behind near after before while until because although the a of and to in for with from
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One set of questions through one router."""

    requests_per_s: float
    first_s: Sequence[float]
    cached_share: float
    """Of the prompt tokens, as the engines say."""


class _Mesh(Mesh):
    def spawn_round_robin(self, instance_id: str) -> subprocess.Popen[bytes]:
        """Start a second router, which deals requests out in turn."""
        with (self.directory / "round-robin.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.placement.baseline", "round_robin"],
                env={**self._environment, "FOREBAY_INSTANCE_ID": instance_id},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process


def main(report: Report) -> None:
    """See the module."""
    if not _ARTIFACT.exists():
        raise SystemExit(f"prepare it: python -m forebay_engine.prepare smollm2 --into {_ARTIFACT}")
    with tempfile.TemporaryDirectory() as directory:
        etcd = EtcdProcess(Path(directory) / "etcd")
        etcd.start()
        try:
            turns = asyncio.run(_measure(Path(directory), etcd.endpoint))
        finally:
            etcd.stop()
    rows = []
    for name, found in turns.items():
        rate = statistics.mean(turn.requests_per_s for turn in found)
        first_s = sorted(value for turn in found for value in turn.first_s)
        p50, p99 = (1000 * first_s[int(share * len(first_s))] for share in (0.5, 0.99))
        cached = statistics.mean(turn.cached_share for turn in found)
        rows.append((name, rate, p50, p99, cached))
        report.figure(
            name,
            {
                "requests_per_s": rate,
                "rounds_requests_per_s": [turn.requests_per_s for turn in found],
                "ttft_ms": {"p50": p50, "p99": p99},
                "cached_share_of_prompt_tokens": cached,
            },
        )
    report.table(("placement", "requests/s", "TTFT p50 ms", "p99 ms", "cached share"), rows)
    ratio = rows[0][1] / rows[1][1]
    report.goal("throughput against round robin", ratio, f">= {GOAL:g}", ok=ratio >= GOAL)


async def _measure(directory: Path, endpoint: str) -> dict[str, list[Turn]]:
    spec = engine.ModelSpec(
        model_version=_MODEL,
        backend=engine.BACKEND_VLLM,
        artifact_path=str(_ARTIFACT),
        context_tokens=2048,
        max_sequences=16,
        kv_cache_bytes=_CACHE_TOKENS * _TOKEN_BYTES,
    )
    mesh = _Mesh(directory, endpoint, "/prefix-reuse")
    try:
        await mesh.start(spec)
        mesh.spawn_round_robin("round-robin")
        for name in ("r1", "r2"):
            mesh.add_replica(name, spec)
            await mesh.placeable(*(f"r{n}" for n in range(1, int(name[1]) + 1)), timeout_s=_LOAD_S)
        routers = {"ours": mesh.http, "round robin": await _http_of(endpoint, "round-robin")}
        turns: dict[str, list[Turn]] = {name: [] for name in routers}
        await _ask_all(routers["round robin"], _questions("warm-up", documents=4, asked=2))
        for number in range(ROUNDS):
            for name, address in routers.items():
                questions = _questions(f"{number} {name}", documents=DOCUMENTS, asked=ASKED)
                turn = await _ask_all(address, questions)
                turns[name].append(turn)
                print(
                    f"round {number + 1} {name}: {turn.requests_per_s:.2f} requests/s, "
                    f"cached {turn.cached_share:.2f}",
                    flush=True,
                )
        return turns
    finally:
        await mesh.stop()


async def _http_of(endpoint: str, instance_id: str) -> str:
    key = Keys("/prefix-reuse").instance("router", instance_id)
    async with Store.open([endpoint]) as store:

        async def announced() -> bool:
            return await store.get(key) is not None

        await until(announced, 60)
        entry = await store.get(key)
    assert entry is not None, "it was there"
    return Instance.decode(key, entry.value).addresses["http"]


def _questions(name: str, *, documents: int, asked: int) -> list[str]:
    """Prompts: every document so many times, in a random order, each with a question of its own."""
    rng = random.Random(name)
    texts = [
        f"Document {name} {number}. " + " ".join(rng.choices(_VOCABULARY.split(), k=_WORDS))
        for number in range(documents)
    ]
    prompts = [
        f"{text}\n\nQuestion {number}: which word comes first?"
        for text in texts
        for number in range(asked)
    ]
    rng.shuffle(prompts)
    return prompts


async def _ask_all(address: str, prompts: Sequence[str]) -> Turn:
    waiting = list(reversed(prompts))
    first_s: list[float] = []
    usage = [0, 0]
    began_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask() -> None:
            while waiting:
                took_s, prompt_tokens, cached = await _ask(session, address, waiting.pop())
                first_s.append(took_s)
                usage[0] += prompt_tokens
                usage[1] += cached

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    took_s = time.perf_counter() - began_s
    return Turn(len(prompts) / took_s, first_s, usage[1] / max(1, usage[0]))


async def _ask(session: aiohttp.ClientSession, address: str, prompt: str) -> tuple[float, int, int]:
    """Seconds to the first token, prompt tokens, and how many of them were cached."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    first_s = 0.0
    last: dict[str, Any] = {}
    async with session.post(f"http://{address}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began_s
                last = json.loads(line[6:]) if b'"usage":{' in line else last
    details = last["usage"].get("prompt_tokens_details") or {}
    return first_s, last["usage"]["prompt_tokens"], details.get("cached_tokens") or 0
