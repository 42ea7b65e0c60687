"""A bare `AsyncLLM` in a process of its own: reads rounds from standard input, answers as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_engine.runner.vllm.arguments import CPU_ENVIRONMENT, ENVIRONMENT, vllm_arguments
from google.protobuf import json_format


async def main() -> None:
    """Load the model that the first argument specifies, then serve rounds until end of file."""
    for name, value in {**ENVIRONMENT, **CPU_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    spec = json_format.Parse(sys.argv[1], engine.ModelSpec())
    arguments = vllm_arguments(spec, on_cpu=True, kv_cache_bytes=spec.kv_cache_bytes)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed))
    tokenizer = AutoTokenizer.from_pretrained(spec.artifact_path)

    async def chat(number: int, text: str, max_tokens: int) -> tuple[int, float]:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        started_s, first_s, tokens = time.monotonic(), 0.0, 0
        async for output in llm.generate(prompt, sampling, f"{time.monotonic_ns()}-{number}"):
            tokens += len(output.outputs[0].token_ids)
            first_s = first_s or time.monotonic() - started_s
        return tokens, first_s

    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        started_s = time.monotonic()
        done = await asyncio.gather(
            *(chat(n, text, asked["max_tokens"]) for n, text in enumerate(asked["prompts"]))
        )
        elapsed_s = time.monotonic() - started_s
        firsts = sorted(first for _, first in done)
        answer = {
            "seconds": elapsed_s,
            "tokens": sum(tokens for tokens, _ in done),
            "ttft_p50_s": firsts[len(firsts) // 2],
        }
        print(json.dumps(answer), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
