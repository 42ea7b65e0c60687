"""Sees what passes between vLLM's OpenAI app and its engine.

The app is given an engine client that forwards everything and notes, for the call that a context
variable names, the tokens, the times and the errors of each result. So nothing has to be read back
out of events.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from forebay_common.errors import ForebayError
from vllm.engine.protocol import EngineClient

from forebay_engine.runner.backend import Call
from forebay_engine.runner.vllm.cache_events import EngineCache
from forebay_engine.runner.vllm.taken_up import Asked, take_up, without_internals


class Observation:
    """One call through the app."""

    def __init__(self, call: Call, flush: Callable[[], Awaitable[None]]) -> None:
        self.call = call
        self.flush = flush
        self.error: BaseException | None = None
        self.tokens: dict[int, list[int]] = {}
        self._streams: list[AsyncGenerator[Any, None]] = []
        self._readers: dict[int, asyncio.Task[Any]] = {}
        self._choices = 0

    def cancel(self) -> set[asyncio.Task[Any]]:
        """Cancel whoever waits for a result, and return them.

        vLLM may wait in a task of its own, which outlives the one that it was called in.
        """
        readers = set(self._readers.values())
        for reader in readers:
            reader.cancel()
        return readers

    async def close(self) -> None:
        """End every stream that is still open, which makes the engine forget its requests."""
        for stream in self._streams:
            await stream.aclose()

    def generate(self, engine: Any, asked: Asked) -> AsyncGenerator[Any, None]:
        """Return the results of one engine request, which may have to take an answer up."""
        resumption = self.call.resumption
        if resumption is None:
            return asked.results(engine)
        try:
            return take_up(engine, resumption, asked, first=self._choices)
        except ForebayError as error:
            self.error = error
            raise

    def observe(
        self, outputs: AsyncGenerator[Any, None], choices: int
    ) -> AsyncGenerator[Any, None]:
        """Return the results of one engine request, noted on the way. Choices are numbered on."""
        first = self._choices
        self._choices += choices
        stream = self._observe(outputs, first)
        self._streams.append(stream)
        return stream

    async def _observe(
        self, outputs: AsyncGenerator[Any, None], first: int
    ) -> AsyncGenerator[Any, None]:
        started = False
        self._note_reader(first)
        try:
            async for output in outputs:
                note_output(self.call, output, started=started)
                started = True
                for completion in getattr(output, "outputs", ()) if not _is_pooling(output) else ():
                    self.tokens.setdefault(first + completion.index, []).extend(
                        completion.token_ids
                    )
                yield output
                # What was rendered from this result is on its way before the next one is awaited.
                if not output.finished:
                    self._note_reader(first)
                    await self.flush()
        except Exception as error:
            self.error = error
            raise
        finally:
            self._readers.pop(first, None)
            await outputs.aclose()

    def _note_reader(self, first: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers[first] = task


CURRENT: ContextVar[Observation | None] = ContextVar("forebay_observation", default=None)
CALL: ContextVar[Call | None] = ContextVar("forebay_call", default=None)
"""The call that a request is made for."""


class ObservedEngine:
    """An engine client that forwards everything to another one, and lets calls be observed."""

    def __init__(self, engine: Any, cache: EngineCache) -> None:
        self._engine = engine
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        """Generate, observed; or take up what was delivered before."""
        asked = Asked(prompt, without_internals(sampling_params), request_id, options)
        observation = CURRENT.get()
        if observation is None:
            return asked.results(self._engine)
        self._cache.note(observation.call, prompt)
        outputs = observation.generate(self._engine, asked)
        return observation.observe(outputs, asked.params.n)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Encode, observed."""
        outputs = self._engine.encode(*args, **kwargs)
        observation = CURRENT.get()
        return outputs if observation is None else observation.observe(outputs, 1)


EngineClient.register(ObservedEngine)


def announce_end(collector: Any) -> None:
    """Let the current call know when the engine has ended the request of a collector."""
    call = CALL.get()
    if call is None:
        return
    put = collector.put

    def put_and_tell(output: Any) -> None:
        put(output)
        if isinstance(output, Exception) or output.finished:
            # Only the first one counts, and the collector is free of this function again.
            collector.put = put
            call.end_sequence()

    call.begin_sequence()
    collector.put = put_and_tell


def note_output(call: Call, output: Any, *, started: bool) -> None:
    """Add one result of the engine to what is known of its call."""
    now_ns = time.time_ns()
    if not started:
        call.prompt_tokens += len(output.prompt_token_ids or ())
        call.cached_tokens += output.num_cached_tokens or 0
    if _is_pooling(output):
        call.first_token_ns = call.first_token_ns or now_ns
        call.last_token_ns = now_ns
        return
    for completion in output.outputs:
        call.completion_tokens += len(completion.token_ids)
        if completion.finish_reason is not None:
            call.finish_reasons.append(completion.finish_reason)
        if completion.token_ids:
            call.last_token_ns = now_ns
            if not call.first_token_ns:
                call.first_token_ns = _first_token_ns(output, now_ns)


def _is_pooling(output: Any) -> bool:
    return not isinstance(output.outputs, list)


def _first_token_ns(output: Any, now_ns: int) -> int:
    """Return when the first token came: an answer that is not streamed is seen only at its end."""
    first = getattr(output.metrics, "first_token_ts", 0.0) if output.metrics else 0.0
    if not first:
        return now_ns
    return min(now_ns, now_ns - round((time.monotonic() - first) * 1e9))
