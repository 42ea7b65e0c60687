"""What copies of requests have shown, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_router.shadow_loop import Figures


class ShadowMetrics(Collector):
    """The metrics of one router's copies. `model` is the version that is tried."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Read everything now."""
        figures = self._figures
        copies = CounterMetricFamily(
            "forebay_router_shadow_copies",
            "Copies of requests, by result: `succeeded`, a reason, or `dropped` at a bound.",
            labels=("model", "result"),
        )
        for labels, count in list(figures.copies.items()):
            copies.add_metric(labels, count)
        compared = CounterMetricFamily(
            "forebay_router_shadow_compared",
            "Answers compared with the copy's, by what, and whether they were the same.",
            labels=("model", "what", "same"),
        )
        for (model, what, is_same), count in list(figures.compared.items()):
            compared.add_metric((model, what, "true" if is_same else "false"), count)
        yield from (copies, compared)
        for name, text, read in (
            (
                "forebay_router_shadow_first_message_seconds",
                "To the first message, of requests and of their copies.",
                figures.first_s,
            ),
            (
                "forebay_router_shadow_request_seconds",
                "To the end, of requests and of their copies.",
                figures.took_s,
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=("model", "answer"))
            for labels, buckets in list(read.items()):
                family.add_metric(labels, buckets.cumulative(), buckets.sum)
            yield family
