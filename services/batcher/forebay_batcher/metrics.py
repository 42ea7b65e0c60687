"""What a batcher counts, by one table of names."""

from __future__ import annotations

from forebay_common.telemetry import children
from prometheus_client import Counter, Gauge, Histogram

QUEUE_DEPTH = Gauge("forebay_batcher_queue_depth", "Requests that wait.", ("class",))
QUEUED_BYTES = Gauge("forebay_batcher_queued_bytes", "Size of the messages that wait, in bytes.")
QUEUE_WAIT = children(
    Histogram(
        "forebay_batcher_queue_wait_seconds",
        "Wait of each request that started.",
        ("class",),
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600),
    )
)
IN_FLIGHT = Gauge(
    "forebay_batcher_in_flight", "Requests that hold a slot of the runner.", ("model_version",)
)
SLOTS = Gauge("forebay_batcher_slots", "Sequence slots of the runner.", ("model_version",))
REFUSALS = children(
    Counter("forebay_batcher_refusals", "Requests that never started.", ("reason",))
)
DISPATCHES = children(
    Counter("forebay_batcher_dispatches", "Requests given to a runner.", ("class", "overdue"))
)
ENGINE_CONNECTED = Gauge(
    "forebay_batcher_engine_connected", "1 while the engine host is heard, otherwise 0."
)
