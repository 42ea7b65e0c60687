"""Generate and Embed: straight to the engine, without the OpenAI app.

A prompt takes the same way as through the app, by the model's own renderer, so that both give the
same tokens.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason
from vllm import PoolingParams, SamplingParams
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind

from forebay_engine.runner.backend import Call, Delta, Logprob
from forebay_engine.runner.vllm.cache_events import EngineCache
from forebay_engine.runner.vllm.engine_errors import translate
from forebay_engine.runner.vllm.observed import CALL, note_output
from forebay_engine.runner.vllm.taken_up import Asked, take_up

_INPUTS_MAX = 2048
_STOPS_MAX = 16
_LOGPROBS_MAX = 20
# Options whose name and meaning are the same in the contract and in vLLM.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "logprobs",
)


class DirectCalls:
    """Calls of the contract's own methods on one engine."""

    def __init__(self, engine: Any, cache: EngineCache) -> None:
        self._engine = engine
        self._cache = cache
        self._renderer = engine.renderer
        self._context_tokens = engine.model_config.max_model_len
        self._defaults = engine.model_config.get_diff_sampling_param()

    async def generate(
        self, request: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[Delta, None]:
        """Answer a prompt."""
        # The caller's task is this call's own: nothing else in it reaches the engine.
        CALL.set(call)
        try:
            prompt = await self._render(request)
            self._cache.note(call, prompt)
            params = self._sampling(request.sampling, len(prompt["prompt_token_ids"]))
            asked = Asked(prompt, params, call.request_id)
            outputs = (
                asked.results(self._engine)
                if call.resumption is None
                else take_up(self._engine, call.resumption, asked, first=0)
            )
            started = False
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    note_output(call, output, started=started)
                    started = True
                    (completion,) = output.outputs
                    yield Delta(
                        completion.text,
                        completion.token_ids,
                        _logprobs(completion, params.logprobs),
                        completion.finish_reason,
                    )
        except Exception as error:
            raise translate(error, request.SerializeToString()) from error

    async def embed(self, request: pb.EmbedRequest, call: Call) -> list[Sequence[float]]:
        """Embed all inputs at once: the engine batches them."""
        if not 1 <= len(request.inputs) <= _INPUTS_MAX:
            raise _invalid("inputs", f"must have 1 to {_INPUTS_MAX} entries")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._embed_one(entry, f"{call.request_id}-{index}", call))
                    for index, entry in enumerate(request.inputs)
                ]
        except* Exception as failures:
            raise translate(failures.exceptions[0]) from failures.exceptions[0]
        return [task.result() for task in tasks]

    async def _embed_one(
        self, entry: pb.EmbedInput, request_id: str, call: Call
    ) -> Sequence[float]:
        kind = entry.WhichOneof("input")
        if kind == "text":
            prompt = await self._render_text(entry.text)
        elif kind == "token_ids":
            prompt = await self._render_tokens(entry.token_ids)
        else:
            raise _invalid("inputs", "has an entry without text or token ids")
        outputs = self._engine.encode(prompt, PoolingParams(task="embed"), request_id)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                note_output(call, output, started=False)
                vector: Sequence[float] = output.outputs.data.float().tolist()
        return vector

    async def _render(self, request: pb.GenerateRequest) -> Any:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._render_text(request.text)
            case "token_ids":
                return await self._render_tokens(request.token_ids)
            case "messages" if request.messages.messages:
                conversation = [
                    {"role": turn.role, "content": turn.content}
                    for turn in request.messages.messages
                ]
                template = {"add_generation_prompt": True, "continue_final_message": False}
                _, (prompt,) = await self._renderer.render_chat_async(
                    [conversation],
                    ChatParams(chat_template_kwargs={**template, "tokenize": False}),
                )
                return prompt
        raise _invalid("prompt", "is required")

    async def _render_text(self, text: str) -> Any:
        (prompt,) = await self._renderer.render_cmpl_async([{"prompt": text}])
        return prompt

    async def _render_tokens(self, tokens: pb.TokenIds) -> Any:
        if not tokens.ids:
            raise _invalid("token_ids", "must not be empty")
        (prompt,) = await self._renderer.render_cmpl_async([{"prompt_token_ids": list(tokens.ids)}])
        return prompt

    def _sampling(self, options: pb.SamplingOptions, prompt_tokens: int) -> SamplingParams:
        if len(options.stop) > _STOPS_MAX:
            raise _invalid("sampling.stop", f"may have at most {_STOPS_MAX} entries")
        if options.HasField("logprobs") and options.logprobs > _LOGPROBS_MAX:
            raise _invalid("sampling.logprobs", f"must be at most {_LOGPROBS_MAX}")
        if options.HasField("max_tokens") and options.max_tokens < 1:
            raise _invalid("sampling.max_tokens", "must be 1 or more")
        left = max(1, self._context_tokens - prompt_tokens)
        values = dict(self._defaults)
        values.update((f.name, value) for f, value in options.ListFields() if f.name in _SAME)
        if options.HasField("max_tokens"):
            values["max_tokens"] = options.max_tokens
        values["max_tokens"] = min(left, values.get("max_tokens") or left)
        return SamplingParams(
            **values, stop=list(options.stop) or None, output_kind=RequestOutputKind.DELTA
        )


def _logprobs(completion: Any, wanted: int | None) -> list[Logprob]:
    if wanted is None or not completion.logprobs:
        return []
    entries: list[Logprob] = []
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        top = tuple(
            (candidate, found.decoded_token or "", found.logprob)
            for candidate, found in ranked[:wanted]
        )
        entries.append(Logprob(candidates[token].logprob, top))
    return entries


def _invalid(name: str, problem: str) -> ForebayError:
    return ForebayError(Reason.INVALID_ARGUMENT, f"'{name}' {problem}.", param=name)
