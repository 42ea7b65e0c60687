"""What a router counts. Labels hold only names of the catalogue, methods and reasons.

The figures are plain numbers that become Prometheus families when somebody looks: a dozen counters
with locks of their own would take as long per request as everything that is decided about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from forebay_common.buckets import Buckets
from forebay_common.metadata import Usage
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_router.core.tiers import Choice

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300, 600)
UNKNOWN_MODEL = "unknown"


class _Ended:
    """Requests of one model and method that ended."""

    __slots__ = ("cached", "completion", "first_message_s", "outcomes", "prompt", "request_s")

    def __init__(self) -> None:
        self.outcomes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By outcome and reason."""
        self.request_s = Buckets(_SECONDS)
        self.first_message_s = Buckets(_SECONDS)
        self.prompt = 0
        self.cached = 0
        self.completion = 0


class Metrics(Collector):
    """The router's metrics, on a registry of their own or the process's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._ended: defaultdict[tuple[str, str], _Ended] = defaultdict(_Ended)
        """By model and method."""
        self._attempts: defaultdict[str, int] = defaultdict(int)
        self._retries: defaultdict[str, int] = defaultdict(int)
        self._resumes: defaultdict[str, int] = defaultdict(int)
        self._breakers: defaultdict[str, int] = defaultdict(int)
        self._tiers: defaultdict[tuple[str, str, bool], int] = defaultdict(int)
        self._hedges = 0
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
        registry.register(self)

    def count_attempt(self, outcome: str) -> None:
        """Count an attempt that ended, by outcome or reason."""
        self._attempts[outcome] += 1

    def count_retry(self, reason: str) -> None:
        """Count an attempt that another follows, by the reason of its failure."""
        self._retries[reason] += 1

    def count_resume(self, result: str) -> None:
        """Count a stream whose replica failed: `resumed`, or why it was not."""
        self._resumes[result] += 1

    def count_hedge(self) -> None:
        """Count a second attempt beside the first."""
        self._hedges += 1

    def count_breaker(self, state: str) -> None:
        """Count a breaker's change to a state."""
        self._breakers[state] += 1

    def count_tier(self, classifier: str, choice: Choice) -> None:
        """Count a choice between tiers, and whether the classifier made it."""
        self._tiers[classifier, choice.tier, choice.is_default] += 1

    def count_request(
        self,
        *,
        model: str,
        method: str,
        outcome: str,
        reason: str,
        request_s: float,
        first_message_s: float | None,
        usage: Usage | None,
    ) -> None:
        """Count a request that ended. Times are from its arrival."""
        ended = self._ended[model, method]
        ended.outcomes[outcome, reason] += 1
        ended.request_s.observe(request_s)
        if first_message_s is not None:
            ended.first_message_s.observe(first_message_s)
        if usage is not None:
            ended.prompt += usage.prompt_tokens
            ended.cached += usage.cached_tokens
            ended.completion += usage.completion_tokens

    def watch_requests(self, in_flight: Callable[[], int]) -> None:
        """Read this figure whenever the metrics are."""
        self._in_flight.set_function(in_flight)

    def watch_cold(self, *, held: Callable[[], int], loads: Callable[[], int]) -> None:
        """Read these figures whenever the metrics are."""
        gauge = Gauge(
            "forebay_router_held",
            "Requests that wait for a model to be loaded.",
            registry=self.registry,
        )
        gauge.set_function(held)
        gauge = Gauge(
            "forebay_router_loads",
            "Models this router has loaded, or waits for, now.",
            registry=self.registry,
        )
        gauge.set_function(loads)

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

    def describe(self) -> Iterator[Metric]:
        """The families' names, for the registry to guard and to select by."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Read everything now. Another thread may ask, so dictionaries are copied first."""
        attempts = CounterMetricFamily(
            "forebay_router_attempts",
            "Attempts that ended, by outcome or reason.",
            labels=("outcome",),
        )
        for outcome, count in list(self._attempts.items()):
            attempts.add_metric((outcome,), count)
        retries = CounterMetricFamily(
            "forebay_router_retries",
            "Attempts that were followed by another, by the reason of their failure.",
            labels=("reason",),
        )
        for reason, count in list(self._retries.items()):
            retries.add_metric((reason,), count)
        resumes = CounterMetricFamily(
            "forebay_router_resumes",
            "Streams whose replica failed, by result: resumed, or why not.",
            labels=("result",),
        )
        for result, count in list(self._resumes.items()):
            resumes.add_metric((result,), count)
        breakers = CounterMetricFamily(
            "forebay_router_breaker_changes",
            "Changes of replicas' breakers, by the state they came to.",
            labels=("state",),
        )
        for state, count in list(self._breakers.items()):
            breakers.add_metric((state,), count)
        tiers = CounterMetricFamily(
            "forebay_router_tier_choices",
            "Choices between a small and a large model, by classifier; by `default` where it gave "
            "nothing.",
            labels=("classifier", "tier", "by"),
        )
        for (classifier, tier, is_default), count in list(self._tiers.items()):
            tiers.add_metric((classifier, tier, "default" if is_default else "classifier"), count)
        hedges = CounterMetricFamily(
            "forebay_router_hedges", "Second attempts beside a first that was slow to answer."
        )
        hedges.add_metric((), self._hedges)
        yield from (attempts, retries, resumes, breakers, tiers, hedges)
        yield from self._collect_ended()

    def _collect_ended(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "forebay_router_requests",
            "Requests that ended, by how.",
            labels=("model", "method", "outcome", "reason"),
        )
        request_s = HistogramMetricFamily(
            "forebay_router_request_seconds",
            "From a request's arrival to the end of its answer.",
            labels=("model", "method"),
        )
        first_message_s = HistogramMetricFamily(
            "forebay_router_first_message_seconds",
            "From a request's arrival to the first message of its answer.",
            labels=("model", "method"),
        )
        tokens = CounterMetricFamily(
            "forebay_router_tokens",
            "Tokens of answered requests, by kind: prompt, cached, completion.",
            labels=("model", "kind"),
        )
        by_kind: defaultdict[tuple[str, str], int] = defaultdict(int)
        for (model, method), ended in list(self._ended.items()):
            for (outcome, reason), count in list(ended.outcomes.items()):
                requests.add_metric((model, method, outcome, reason), count)
            for family, buckets in (
                (request_s, ended.request_s),
                (first_message_s, ended.first_message_s),
            ):
                family.add_metric((model, method), buckets.cumulative(), buckets.sum)
            by_kind[model, "prompt"] += ended.prompt
            by_kind[model, "cached"] += ended.cached
            by_kind[model, "completion"] += ended.completion
        for labels, count in by_kind.items():
            tokens.add_metric(labels, count)
        yield from (requests, request_s, first_message_s, tokens)
