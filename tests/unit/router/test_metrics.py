"""What the router shows of its counts."""

import pytest
from forebay_common.metadata import Usage
from forebay_router.metrics import Metrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def a_router_that_counted() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for method, first_message_s, usage in (
        ("Generate", 0.02, Usage(10, 3, 4)),
        ("Generate", None, None),
        ("CallOpenAI", 0.3, Usage(1, 2, 0)),
    ):
        metrics.count_request(
            model="chat@1",
            method=method,
            outcome="succeeded" if usage else "failed",
            reason="" if usage else "QUEUE_FULL",
            request_s=0.5,
            first_message_s=first_message_s,
            usage=usage,
        )
    metrics.count_attempt("succeeded")
    metrics.count_attempt("REPLICA_LOST")
    metrics.count_retry("REPLICA_LOST")
    return registry


@pytest.mark.parametrize(
    ("sample", "labels", "value"),
    [
        (
            "requests_total",
            {"method": "Generate", "outcome": "failed", "reason": "QUEUE_FULL"},
            1,
        ),
        ("requests_total", {"method": "CallOpenAI", "outcome": "succeeded", "reason": ""}, 1),
        ("request_seconds_count", {"method": "Generate"}, 2),
        ("request_seconds_sum", {"method": "Generate"}, 1.0),
        ("request_seconds_bucket", {"method": "Generate", "le": "0.4"}, 0),
        ("request_seconds_bucket", {"method": "Generate", "le": "0.8"}, 2),
        ("first_message_seconds_count", {"method": "Generate"}, 1),
        ("first_message_seconds_bucket", {"method": "CallOpenAI", "le": "0.4"}, 1),
        ("tokens_total", {"kind": "prompt"}, 11),
        ("tokens_total", {"kind": "cached"}, 4),
        ("tokens_total", {"kind": "completion"}, 5),
    ],
)
def test_a_request_that_ended_is_counted_by_model(
    sample: str, labels: dict[str, str], value: float
) -> None:
    registry = a_router_that_counted()
    labels = {"model": "chat@1", **labels}
    assert registry.get_sample_value(f"forebay_router_{sample}", labels) == value


def test_attempts_and_retries_are_counted_by_reason() -> None:
    registry = a_router_that_counted()
    for name, labels in (
        ("attempts", {"outcome": "succeeded"}),
        ("attempts", {"outcome": "REPLICA_LOST"}),
        ("retries", {"reason": "REPLICA_LOST"}),
    ):
        assert registry.get_sample_value(f"forebay_router_{name}_total", labels) == 1


def test_what_is_shown_can_be_parsed_and_has_a_type_before_anything_happened() -> None:
    for registry in (a_router_that_counted(), CollectorRegistry()):
        if not list(registry.collect()):
            Metrics(registry)
        text = generate_latest(registry).decode()
        types = {family.name: family.type for family in text_string_to_metric_families(text)}
        assert types["forebay_router_requests"] == "counter"
        assert types["forebay_router_request_seconds"] == "histogram"


def test_one_family_can_be_asked_for_by_name() -> None:
    chosen = a_router_that_counted().restricted_registry(["forebay_router_attempts_total"])
    assert "forebay_router_attempts_total" in generate_latest(chosen).decode()


def test_two_routers_cannot_share_a_registry_unnoticed() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(registry)
