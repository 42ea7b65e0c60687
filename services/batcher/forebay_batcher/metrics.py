"""What a batcher counts, by one table of names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from forebay_common.buckets import Buckets
from forebay_common.telemetry import children
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)


class Starts(Collector):
    """Requests that started: plain numbers, since each of them is counted."""

    def __init__(self) -> None:
        self._waits: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(_WAIT_S))
        """By class."""
        self._dispatches: defaultdict[tuple[str, bool], int] = defaultdict(int)
        """By class, and whether it was overdue."""

    def count(self, priority: str, *, wait_s: float, overdue: bool) -> None:
        """Count one of a class, after its wait."""
        self._waits[priority].observe(wait_s)
        self._dispatches[priority, overdue] += 1

    def describe(self) -> Iterator[Metric]:
        """The families' names, for the registry to guard and to select by."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Read everything now. Another thread may ask, so dictionaries are copied first."""
        waits = HistogramMetricFamily(
            "forebay_batcher_queue_wait_seconds",
            "Wait of each request that started.",
            labels=("class",),
        )
        for priority, buckets in list(self._waits.items()):
            waits.add_metric((priority,), buckets.cumulative(), buckets.sum)
        dispatches = CounterMetricFamily(
            "forebay_batcher_dispatches",
            "Requests given to a runner.",
            labels=("class", "overdue"),
        )
        for (priority, overdue), count in list(self._dispatches.items()):
            dispatches.add_metric((priority, "true" if overdue else "false"), count)
        yield from (waits, dispatches)


QUEUE_DEPTH = Gauge("forebay_batcher_queue_depth", "Requests that wait.", ("class",))
QUEUED_BYTES = Gauge("forebay_batcher_queued_bytes", "Size of the messages that wait, in bytes.")
STARTS = Starts()
REGISTRY.register(STARTS)
IN_FLIGHT = Gauge(
    "forebay_batcher_in_flight", "Requests that hold a slot of the runner.", ("model_version",)
)
CACHED_PREFIXES = Gauge(
    "forebay_batcher_cached_prefixes",
    "Prefixes of prompts that the runner reports as cached.",
    ("model_version",),
)
SLOTS = Gauge("forebay_batcher_slots", "Sequence slots of the runner.", ("model_version",))
REFUSALS = children(
    Counter("forebay_batcher_refusals", "Requests that never started.", ("reason",))
)
ENGINE_CONNECTED = Gauge(
    "forebay_batcher_engine_connected", "1 while the engine host is heard, otherwise 0."
)
