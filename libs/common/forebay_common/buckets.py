"""A histogram that costs little to fill: plain numbers, Prometheus's form when somebody looks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Buckets:
    """Counts by upper bound. Filled from one thread, read from any."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last is counted, too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """As `HistogramMetricFamily.add_metric` takes it."""
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(bounds, accumulate(self._counts), strict=True))
