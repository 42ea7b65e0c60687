"""The host's Prometheus metrics, read from the keepers when they are scraped."""

from collections.abc import Iterator

from forebay.engine.v1 import engine_service_pb2 as pb
from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_engine.host import Host

_LABELS = ("model_version",)


class _HostCollector(Collector):
    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of every model version."""
        statuses = self._host.statuses()
        state = GaugeMetricFamily(
            "forebay_engine_model_state",
            "1 for the state a model version is in.",
            labels=(*_LABELS, "state"),
        )
        restarts = CounterMetricFamily(
            "forebay_engine_runner_restarts", "Runners started again after a death.", labels=_LABELS
        )
        phases = GaugeMetricFamily(
            "forebay_engine_load_phase_seconds",
            "How long each phase of the last load took.",
            labels=(*_LABELS, "phase"),
        )
        families = {
            name: GaugeMetricFamily(f"forebay_engine_{name}", text, labels=_LABELS)
            for name, text in (
                ("running", "Requests being prefilled or decoded."),
                ("waiting", "Requests waiting inside the engine."),
                ("kv_cache_usage", "Share of the KV cache in use, 0 to 1."),
            )
        }
        totals = {
            name: CounterMetricFamily(f"forebay_engine_{name}", text, labels=_LABELS)
            for name, text in (
                ("prefix_queries_tokens", "Prompt tokens looked up in the prefix cache."),
                ("prefix_hits_tokens", "Prompt tokens found in the prefix cache."),
                ("generated_tokens", "Tokens generated."),
            )
        }
        for status in statuses:
            model = status.spec.model_version
            state.add_metric((model, _word(pb.ModelState.Name(status.state), "MODEL_STATE_")), 1)
            restarts.add_metric((model,), status.restarts)
            for phase in status.phases:
                name = _word(pb.LoadPhase.Name(phase.phase), "LOAD_PHASE_")
                phases.add_metric((model, name), phase.duration_ms / 1000)
            for name, family in (families | totals).items():
                family.add_metric((model,), getattr(status.load, name))
        resumed = CounterMetricFamily(
            "forebay_engine_resumed",
            "Answers of other runners that were taken up, by mode.",
            labels=(*_LABELS, "mode"),
        )
        for model, mode, count in self._host.resumed():
            resumed.add_metric((model, mode), count)
        yield from (state, restarts, phases, resumed, *families.values(), *totals.values())


def expose(host: Host) -> None:
    """Expose a host's metrics in this process's registry."""
    REGISTRY.register(_HostCollector(host))


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)
