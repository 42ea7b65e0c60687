"""The autoscaler's metrics, as its README lists them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LEADS = Gauge("forebay_autoscaler_leads", "1 while this instance is the leader.")
REPLICAS = Gauge("forebay_autoscaler_replicas", "Replicas by what they do.", ["pool", "phase"])
DESIRED = Gauge("forebay_autoscaler_desired_replicas", "Active replicas wanted.", ["pool"])
DEMANDED = Gauge(
    "forebay_autoscaler_demanded_replicas", "Active replicas demand alone would want.", ["pool"]
)
REQUESTS = Gauge("forebay_autoscaler_requests", "Requests queued and running.", ["pool"])
AGE = Gauge(
    "forebay_autoscaler_observation_age_seconds", "Age of the oldest figure used.", ["pool"]
)
TICKS = Counter("forebay_autoscaler_ticks_total", "Decisions by reason.", ["pool", "reason"])
ORDERS = Counter(
    "forebay_autoscaler_orders_total", "Orders by kind and outcome.", ["pool", "kind", "outcome"]
)
ORDER_SECONDS = Histogram(
    "forebay_autoscaler_order_seconds",
    "How long orders took.",
    ["kind"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
