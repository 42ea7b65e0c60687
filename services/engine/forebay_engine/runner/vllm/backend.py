"""The vLLM back end: one AsyncLLM, called directly and through vLLM's own OpenAI app in-process.

vLLM is imported when a model is loaded, not with this module: that takes seconds, and is a phase.
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason

from forebay_engine.config import Config
from forebay_engine.core import link
from forebay_engine.runner.backend import Call, Delta, Loaded, Phase, SendFrame
from forebay_engine.runner.cache_report import CacheReport
from forebay_engine.runner.vllm.arguments import CPU_ENVIRONMENT, ENVIRONMENT, vllm_arguments
from forebay_engine.runner.vllm.cores import give_way
from forebay_engine.runner.vllm.openai_app import OpenAIApp
from forebay_engine.runner.vllm.phases import hear_phases

_log = logging.getLogger(__name__)
_HEALTH_INTERVAL_S = 1.0


class VllmBackend:
    """One vLLM engine."""

    def __init__(self, spec: engine_pb.ModelSpec, config: Config) -> None:
        self._spec = spec
        self._config = config
        self._engine: Any = None
        self._stats: Any = None
        self._app: OpenAIApp | None = None
        self._direct: Any = None
        self._report: CacheReport | None = None
        self._cache: Any = None
        self._embeds = spec.task == engine_pb.TASK_EMBED

    def report_cache(self, report: CacheReport) -> None:
        """Tell of what vLLM's core tells of its cache."""
        self._report = report

    async def load(self, report: Callable[[Phase], None]) -> Loaded:
        """Import vLLM, start its processes, read the weights, and build its OpenAI app."""
        _set_defaults(ENVIRONMENT)
        # On threads, so that the loop goes on answering health checks and hears of phases.
        engine_module = await asyncio.to_thread(
            importlib.import_module, "forebay_engine.runner.vllm.engine"
        )
        cache_module = importlib.import_module("forebay_engine.runner.vllm.cache_events")
        direct_module = importlib.import_module("forebay_engine.runner.vllm.direct")
        on_cpu = engine_module.is_on_cpu()
        if on_cpu:
            _set_defaults(CPU_ENVIRONMENT)
        report(Phase.ENGINE_INIT)
        assert self._report is not None, "report_cache comes first"
        is_reported = self._report.is_wanted and not self._embeds
        with tempfile.TemporaryDirectory(prefix="forebay-") as folder:
            endpoint = f"ipc://{folder}/cache" if is_reported else ""
            arguments = vllm_arguments(
                self._spec,
                on_cpu=on_cpu,
                kv_cache_bytes=self._config.kv_cache_bytes,
                cache_endpoint=endpoint,
            )
            with hear_phases(report):
                built = await asyncio.to_thread(engine_module.build_engine, arguments)
            self._engine, self._stats = built.engine, built.stats
            if on_cpu:
                give_way([process.pid for process in self._core_processes()])
            self._cache = cache_module.EngineCache(self._report, block_tokens=built.block_tokens)
            if is_reported:
                await self._cache.follow(endpoint)
        self._app = OpenAIApp(
            await engine_module.build_openai_app(built, self._cache),
            model=self._spec.model_version,
        )
        self._direct = direct_module.DirectCalls(built.engine, self._cache)
        # What is loaded now stays: otherwise a full collection looks through all of it, and every
        # stream pauses for half a second.
        gc.collect()
        gc.freeze()
        loaded: Loaded = built.loaded(can_sleep=not on_cpu)
        return loaded

    def generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[Delta, None]:
        """Answer a prompt."""
        self._require(embeds=False)
        deltas: AsyncGenerator[Delta, None] = self._direct.generate(request, call)
        return deltas

    async def embed(self, request: pb.EmbedRequest, call: Call) -> list[Sequence[float]]:
        """Return one vector per input."""
        self._require(embeds=True)
        vectors: list[Sequence[float]] = await self._direct.embed(request, call)
        return vectors

    async def call_openai(self, path: str, body: bytes, call: Call, send: SendFrame) -> None:
        """Answer through vLLM's own app."""
        assert self._app is not None
        await self._app.call(path, body, call, send)

    def load_now(self) -> link.Load:
        """Return what the engine's last step told."""
        load: link.Load = self._stats.load
        return load

    async def sleep(self) -> None:
        """Move the weights to host memory and forget the KV cache."""
        await self._engine.sleep(level=1)
        self._cache.clear()

    async def wake(self) -> None:
        """Bring the weights back."""
        await self._engine.wake_up()

    async def failed(self) -> str:
        """Wait until one of the engine's processes is gone.

        Its core is heard at once. A worker's death makes the core end; the slow check is for what
        neither of them tells.
        """
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        sentinels = [process.sentinel for process in self._core_processes()]
        for sentinel in sentinels:
            loop.add_reader(sentinel, gone.set)
        try:
            while not gone.is_set() and not self._engine.errored:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_HEALTH_INTERVAL_S):
                        await gone.wait()
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        return "vLLM's engine died."

    async def close(self) -> None:
        """End nothing here: the engine's processes end with this one, at once.

        vLLM's own shutdown waits for its processes for seconds, and a drained engine has nothing to
        put in order.
        """

    def _core_processes(self) -> list[Any]:
        return list(self._engine.engine_core.resources.engine_manager.processes)

    def _require(self, *, embeds: bool) -> None:
        if self._embeds is not embeds:
            offered = "embeddings" if self._embeds else "text"
            raise ForebayError(Reason.UNSUPPORTED, f"This model only answers with {offered}.")


def _set_defaults(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
