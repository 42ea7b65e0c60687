"""Asks the back end the canary prompt, through the same port as every caller."""

import contextlib
import time

from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb

from forebay_engine.core import canary
from forebay_engine.runner.backend import Backend, Call


async def ask_canary(backend: Backend, task: engine_pb.Task.ValueType) -> canary.Canary:
    """Return the model's answer to the fixed prompt: greedy tokens, or a vector."""
    call = Call("canary", time.time_ns())
    if task == engine_pb.TASK_EMBED:
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text=canary.PROMPT)])
        (vector,) = await backend.embed(request, call)
        return canary.Canary(vector=tuple(vector))
    tokens: list[int] = []
    deltas = backend.generate(
        pb.GenerateRequest(
            text=canary.PROMPT,
            sampling=pb.SamplingOptions(
                temperature=0, max_tokens=canary.TOKENS, ignore_eos=True, seed=0
            ),
        ),
        call,
    )
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            tokens.extend(delta.tokens)
    return canary.Canary(tokens=tuple(tokens))
