"""What a router counts. Labels hold only names of the catalogue, methods and reasons."""

from __future__ import annotations

from collections.abc import Callable

from forebay_common.telemetry import children
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300, 600)
UNKNOWN_MODEL = "unknown"


class Metrics:
    """The router's metrics, on a registry of their own or the process's. Those with labels are
    called with the labels' values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = children(
            Counter(
                "forebay_router_requests",
                "Requests that ended, by how.",
                ("model", "method", "outcome", "reason"),
                registry=registry,
            )
        )
        self.attempts = children(
            Counter(
                "forebay_router_attempts",
                "Attempts that ended, by outcome or reason.",
                ("outcome",),
                registry=registry,
            )
        )
        self.retries = children(
            Counter(
                "forebay_router_retries",
                "Attempts that were followed by another, by the reason of their failure.",
                ("reason",),
                registry=registry,
            )
        )
        self.first_message_seconds = children(
            Histogram(
                "forebay_router_first_message_seconds",
                "From a request's arrival to the first message of its answer.",
                ("model", "method"),
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self.request_seconds = children(
            Histogram(
                "forebay_router_request_seconds",
                "From a request's arrival to the end of its answer.",
                ("model", "method"),
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self.tokens = children(
            Counter(
                "forebay_router_tokens",
                "Tokens of answered requests, by kind: prompt, cached, completion.",
                ("model", "kind"),
                registry=registry,
            )
        )
        self._in_flight = Gauge(
            "forebay_router_in_flight", "Requests that are not ended.", registry=registry
        )
        self._replicas = Gauge(
            "forebay_router_replicas",
            "Replicas in view, by whether a request can be placed there.",
            ("placeable",),
            registry=registry,
        )
        self._view_age = Gauge(
            "forebay_router_view_age_seconds",
            "Since etcd last showed that a view is current.",
            ("view",),
            registry=registry,
        )

    def watch_requests(self, in_flight: Callable[[], int]) -> None:
        """Read this figure whenever the metrics are."""
        self._in_flight.set_function(in_flight)

    def watch_views(
        self,
        *,
        replicas_age_s: Callable[[], float],
        catalogue_age_s: Callable[[], float],
        placeable: Callable[[], int],
        excluded: Callable[[], int],
    ) -> None:
        """Read these figures whenever the metrics are."""
        self._view_age.labels("replicas").set_function(replicas_age_s)
        self._view_age.labels("catalogue").set_function(catalogue_age_s)
        self._replicas.labels("yes").set_function(placeable)
        self._replicas.labels("no").set_function(excluded)
