"""Builds vLLM's AsyncLLM and its OpenAI app. Importing this module imports vLLM."""

from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.fingerprint import get_system_fingerprint
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from forebay_engine.runner.backend import Loaded
from forebay_engine.runner.vllm.cache_events import EngineCache
from forebay_engine.runner.vllm.observed import ObservedEngine, announce_end
from forebay_engine.runner.vllm.stats import StepStats


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is up."""

    engine: Any
    stats: StepStats
    arguments: Namespace

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the KV cache."""
        return int(self.engine.vllm_config.cache_config.block_size)

    def loaded(self, *, can_sleep: bool) -> Loaded:
        """Return what the engine turned out to be."""
        config = self.engine.vllm_config
        cache = config.cache_config
        return Loaded(
            max_sequences=config.scheduler_config.max_num_seqs,
            kv_cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            context_tokens=config.model_config.max_model_len,
            system_fingerprint=get_system_fingerprint(config) or "vllm",
            can_sleep=can_sleep,
        )


class _Engine(AsyncLLM):  # type: ignore[misc]  # vLLM has no type information
    """vLLM's engine, which also says when it has ended a request.

    Its generator gives a result when it is asked, and merges what came since. While a stream waits
    before it asks again, only the one who puts results there knows that the last one has come.
    """

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        collector = await super().add_request(*args, **kwargs)
        announce_end(collector)
        return collector


def is_on_cpu() -> bool:
    """Say whether vLLM runs on the CPU here."""
    return bool(current_platform.is_cpu())


def build_engine(command_line: list[str]) -> Built:
    """Start the engine's processes and return when it is loaded. Blocks for seconds."""
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(command_line)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(
        UsageContext.ENGINE_CONTEXT
    )
    engine = _Engine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        # Ours alone: vLLM's loggers would cost time at each step, and nobody reads them here.
        log_stats=False,
        stat_loggers=[StepStats],
        log_requests=False,
    )
    loggers = engine.logger_manager.stat_loggers
    (stats,) = (logger for logger in loggers if isinstance(logger, StepStats))
    return Built(engine, stats, arguments)


async def build_openai_app(built: Built, cache: EngineCache) -> Any:
    """Return vLLM's OpenAI app over the engine, which it reaches through `ObservedEngine`."""
    tasks = await built.engine.get_supported_tasks()
    app = build_app(built.arguments, tasks, built.engine.model_config)
    engine = ObservedEngine(built.engine, cache)
    await init_app_state(engine, app.state, built.arguments, tasks)
    # vLLM asks its HTTP server to stop when the engine is dead; the runner sees that by itself.
    app.state.server = SimpleNamespace(should_exit=False)
    return app
