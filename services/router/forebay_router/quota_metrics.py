"""What a router's limits count, read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_router.adapters.quota import Figures, Quota

_COUNTERS: tuple[
    tuple[str, str, tuple[str, ...], Callable[[Figures], Iterable[tuple[tuple[str, ...], int]]]],
    ...,
] = (
    (
        "forebay_router_quota_reservations",
        "Requests of tenants with limits, by where it was decided (here, elsewhere, alone) and "
        "how (granted, the limit that was used up, too_large, away).",
        ("where", "result"),
        lambda figures: list(figures.reservations.items()),
    ),
    (
        "forebay_router_quota_calls",
        "Calls to other routers, by method and result.",
        ("method", "result"),
        lambda figures: list(figures.calls.items()),
    ),
    (
        "forebay_router_quota_takeovers",
        "Accounts of tenants that came to this router.",
        (),
        lambda figures: [((), figures.takeovers)],
    ),
    (
        "forebay_router_quota_streams_expired",
        "Requests that stopped counting because their router fell silent.",
        (),
        lambda figures: [((), figures.streams_expired)],
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[Quota], float]], ...] = (
    (
        "forebay_router_quota_accounts_held",
        "Accounts of tenants that this router holds.",
        lambda quota: quota.held,
    ),
    (
        "forebay_router_quota_accounts",
        "Accounts of which this router knows something.",
        lambda quota: quota.accounts,
    ),
    (
        "forebay_router_quota_routers",
        "Routers in view, this one with them.",
        lambda quota: quota.routers,
    ),
    (
        "forebay_router_quota_unreachable",
        "Routers in view that this one cannot ask.",
        lambda quota: quota.unreachable,
    ),
    (
        "forebay_router_quota_exact",
        "1 while more than half of the routers can be reached, else 0: limits are then kept by "
        "this router's part alone.",
        lambda quota: float(quota.is_quorate),
    ),
)


class QuotaMetrics(Collector):
    """The metrics of one router's limits."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    def collect(self) -> Iterator[Metric]:
        """Read everything now."""
        for name, text, labels, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, count in read(self._quota.figures):
                counter.add_metric(values, count)
            yield counter
        for name, text, figure in _GAUGES:
            yield GaugeMetricFamily(name, text, value=figure(self._quota))
