"""Chats over gRPC, all at once, from a process of its own: rounds in, figures out, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect


async def main() -> None:
    """Ask the address and model of the arguments until end of file."""
    address, model = sys.argv[1:3]
    async with connect(address) as channel:
        stub = rpc.InferenceServiceStub(channel)

        async def chat(text: str, max_tokens: int) -> tuple[int, float]:
            request = pb.GenerateRequest(
                model=model,
                messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)]),
                sampling=pb.SamplingOptions(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            )
            started_s, first_s, tokens = time.monotonic(), 0.0, 0
            async for part in stub.Generate(request, timeout=600):
                tokens += len(part.token_ids)
                first_s = first_s or time.monotonic() - started_s
            return tokens, first_s

        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            started_s = time.monotonic()
            done = await asyncio.gather(
                *(chat(text, asked["max_tokens"]) for text in asked["prompts"])
            )
            elapsed_s = time.monotonic() - started_s
            firsts = sorted(first for _, first in done)
            answer = {
                "seconds": elapsed_s,
                "tokens": sum(tokens for tokens, _ in done),
                "ttft_p50_s": firsts[len(firsts) // 2],
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
