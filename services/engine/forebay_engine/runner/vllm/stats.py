"""What the engine tells of itself after each of its steps."""

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from forebay_engine.core import link


class StepStats(PrometheusStatLogger):  # type: ignore[misc]  # vLLM has no type information
    """Keeps the load from vLLM's own hook, called once per engine step.

    It takes the place of vLLM's Prometheus logger, which would cost time at each step and which
    nobody scrapes inside a runner: vLLM leaves its own out when one of this class is given.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.load = link.Load()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in one step."""
        before = self.load
        generated = before.generated_tokens
        if iteration_stats is not None:
            generated += iteration_stats.num_generation_tokens
        if scheduler_stats is None:
            self.load = link.Load(
                running=before.running,
                waiting=before.waiting,
                kv_cache_usage=before.kv_cache_usage,
                prefix_queries_tokens=before.prefix_queries_tokens,
                prefix_hits_tokens=before.prefix_hits_tokens,
                generated_tokens=generated,
            )
            return
        prefix = scheduler_stats.prefix_cache_stats
        self.load = link.Load(
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_cache_usage=scheduler_stats.kv_cache_usage,
            prefix_queries_tokens=before.prefix_queries_tokens + prefix.queries,
            prefix_hits_tokens=before.prefix_hits_tokens + prefix.hits,
            generated_tokens=generated,
        )

    def log(self) -> None:
        """Log nothing: the host reports the load."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Keep nothing: the host knows who sleeps."""

    def record_admission_rejection(self, reason: str) -> None:
        """Keep nothing: the caller is told."""
