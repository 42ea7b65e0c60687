"""Counts on the token path: plain integers there, Prometheus families when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from forebay_wire.core.stream import Budget

GAP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 3.0, 10.0,
)  # fmt: skip
"""Upper bounds of the histogram of gaps between the parts of an answer, in seconds."""

TIMED_CALLS = 4
"""The gaps of one call in so many are measured: it costs a tenth of passing a message on."""


class Side(Protocol):
    """A server or a client pool, as far as metrics go."""

    @property
    def connections(self) -> int:
        """Open connections."""

    @property
    def streams(self) -> int:
        """Open streams."""

    @property
    def resets(self) -> int:
        """Streams that peers have reset."""


@runtime_checkable
class Buffers(Protocol):
    """A server's buffers."""

    held: Budget
    requested: Budget
    slow_readers_cut: int


class Front(Protocol):
    """An HTTP front, as far as metrics go."""

    @property
    def connections(self) -> Sized:
        """Open connections."""

    @property
    def in_flight(self) -> int:
        """Requests that a drain waits for."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of bodies whose requests are not answered."""


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
        self._sides: dict[str, Side] = {}
        self._front: Front | None = None

    def register(self, registry: CollectorRegistry) -> None:
        """Show these in a registry."""
        registry.register(self)

    def watch(
        self, *, server: Side | None = None, pool: Side | None = None, http: Front | None = None
    ) -> None:
        """Show the gauges of a server, a pool, and an HTTP front."""
        self._front = http or self._front
        for name, side in (("server", server), ("client", pool)):
            if side is not None:
                self._sides[name] = side

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """No names, so that a process may hold several relays one after the other."""
        return iter(())

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
        yield from self._gauges()

    def _gauges(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        connections = GaugeMetricFamily(
            "forebay_wire_connections", "Open HTTP/2 connections, by our side.", labels=("side",)
        )
        streams = GaugeMetricFamily(
            "forebay_wire_streams", "Open streams, by our side.", labels=("side",)
        )
        resets = CounterMetricFamily(
            "forebay_wire_resets", "Streams that peers have reset, by our side.", labels=("side",)
        )
        for name, side in self._sides.items():
            connections.add_metric((name,), side.connections)
            streams.add_metric((name,), side.streams)
            resets.add_metric((name,), side.resets)
        yield from (connections, streams, resets)
        if self._front is not None:
            yield GaugeMetricFamily(
                "forebay_wire_http_connections",
                "Open connections of the HTTP front.",
                value=len(self._front.connections),
            )
            yield GaugeMetricFamily(
                "forebay_wire_http_in_flight",
                "Requests of the HTTP front that are not answered.",
                value=self._front.in_flight,
            )
            yield GaugeMetricFamily(
                "forebay_wire_http_body_bytes",
                "Bytes of bodies whose requests are not answered.",
                value=self._front.kept_bytes,
            )
        server = self._sides.get("server")
        if isinstance(server, Buffers):
            yield GaugeMetricFamily(
                "forebay_wire_held_bytes",
                "Bytes of answers that wait for slow readers.",
                value=server.held.used_bytes,
            )
            yield GaugeMetricFamily(
                "forebay_wire_request_bytes",
                "Bytes of requests that are in flight.",
                value=server.requested.used_bytes,
            )
            yield CounterMetricFamily(
                "forebay_wire_slow_readers_cut",
                "Answers that were cut because nobody read them.",
                value=server.slow_readers_cut,
            )


_GAP_TEXT = (
    "Between the parts of an answer as they arrive from the next hop, of one call in "
    f"{TIMED_CALLS}."
)
