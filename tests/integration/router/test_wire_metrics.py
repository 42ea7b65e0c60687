"""What the token path counts is true, and nothing is left when all has ended."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from forebay.inference.v1 import inference_service_pb2 as inference

from .conftest import WAIT_S, RunningRouter, StartStandIn, eventually

pytestmark = pytest.mark.integration
REQUEST = inference.GenerateRequest(model="chat", text="hello")
BODY = json.dumps(
    {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
)


async def _figures(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("forebay_wire_"))
    return {name: float(value) for name, value in pairs}


async def test_calls_messages_and_gauges(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    await start_stand_in()
    async with aiohttp.ClientSession(f"http://{router.instance.addresses['http']}") as http:

        async def call() -> int:
            answer = router.inference.Generate(REQUEST, timeout=WAIT_S)
            return len([part async for part in answer])

        async def post() -> None:
            async with http.post("/v1/chat/completions", data=BODY) as answer:
                assert answer.status == 200
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")

        parts = await asyncio.gather(*(call() for _ in range(12)))
        await asyncio.gather(*(post() for _ in range(8)))

        async def ended() -> bool:
            figures = await _figures(http)
            return figures['forebay_wire_streams{side="client"}'] == 0

        await eventually(ended)
        figures = await _figures(http)
    assert figures["forebay_wire_calls_total"] == 20
    assert figures["forebay_wire_answers_total"] == 20
    assert figures["forebay_wire_messages_total"] > sum(parts)
    assert figures["forebay_wire_message_bytes_total"] > 0
    assert figures['forebay_wire_streams{side="server"}'] == 0
    assert figures['forebay_wire_connections{side="server"}'] >= 1
    assert figures['forebay_wire_connections{side="client"}'] >= 1
    assert figures['forebay_wire_resets_total{side="server"}'] == 0
    assert figures["forebay_wire_held_bytes"] == 0
    assert figures["forebay_wire_request_bytes"] == 0
    assert figures["forebay_wire_slow_readers_cut_total"] == 0
    assert figures["forebay_wire_http_connections"] >= 1
    assert figures["forebay_wire_http_in_flight"] == 0
    assert figures["forebay_wire_http_body_bytes"] == 0
    buckets = [value for name, value in figures.items() if name.startswith(_BUCKET)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == figures["forebay_wire_message_gap_seconds_count"]


_BUCKET = "forebay_wire_message_gap_seconds_bucket"
