"""Counts on the token path: plain integers there, Prometheus families when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

GAP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 3.0, 10.0,
)  # fmt: skip
"""Upper bounds of the histogram of gaps between the parts of an answer, in seconds."""


class WireMetrics(Collector):
    """What the token path of one process counts."""

    def __init__(self) -> None:
        self.gaps = [0] * (len(GAP_BOUNDS_S) + 1)
        """Gaps by bucket; the last holds what is longer than every bound."""
        self.calls = 0
        """Calls that were started."""
        self.answers = 0
        """Calls whose first message came."""
        self.messages = 0
        """Messages that were passed on, counted when their call ends."""
        self.message_bytes = 0
        """Their bytes, with their length prefixes."""
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """Name without prefix → description and how to read it."""
        self.counters: dict[str, tuple[str, Callable[[], float]]] = {}

    def register(self, registry: CollectorRegistry) -> None:
        """Show these in a registry."""
        registry.register(self)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Names alone; `prometheus_client` asks when a collector is registered."""
        yield HistogramMetricFamily("forebay_wire_message_gap_seconds", _GAP_TEXT)

    def collect(
        self,
    ) -> Iterator[HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily]:
        """Read everything now."""
        buckets: list[tuple[str, float]] = []
        total = 0
        sum_s = 0.0
        lower_s = 0.0
        for bound_s, count in zip((*GAP_BOUNDS_S, float("inf")), self.gaps, strict=True):
            total += count
            upper_s = bound_s if bound_s != float("inf") else GAP_BOUNDS_S[-1]
            # The path keeps no sum: half-way between its bounds stands for a bucket.
            sum_s += count * (lower_s + upper_s) / 2
            lower_s = upper_s
            buckets.append(("+Inf" if bound_s == float("inf") else str(bound_s), total))
        yield HistogramMetricFamily(
            "forebay_wire_message_gap_seconds", _GAP_TEXT, buckets=buckets, sum_value=sum_s
        )
        yield CounterMetricFamily(
            "forebay_wire_calls", "Calls that were relayed.", value=self.calls
        )
        yield CounterMetricFamily(
            "forebay_wire_answers", "Calls whose first message came.", value=self.answers
        )
        yield CounterMetricFamily(
            "forebay_wire_messages", "Messages passed on, of calls that ended.", value=self.messages
        )
        yield CounterMetricFamily(
            "forebay_wire_message_bytes",
            "Bytes of messages passed on, of calls that ended.",
            value=self.message_bytes,
        )
        for name, (text, read) in self.counters.items():
            yield CounterMetricFamily(f"forebay_wire_{name}", text, value=read())
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(f"forebay_wire_{name}", text, value=read())


_GAP_TEXT = "Between the parts of an answer as they arrive from the next hop."
