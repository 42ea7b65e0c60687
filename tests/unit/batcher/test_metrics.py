"""What the batcher shows of the requests that started."""

from forebay_batcher.metrics import Starts
from prometheus_client import CollectorRegistry


def test_starts_are_counted_by_class_with_their_waits() -> None:
    registry = CollectorRegistry()
    starts = Starts()
    registry.register(starts)
    starts.count("REALTIME", wait_s=0.002, overdue=False)
    starts.count("REALTIME", wait_s=0.5, overdue=True)
    starts.count("BATCH", wait_s=0.0, overdue=False)
    for sample, labels, value in (
        ("dispatches_total", {"class": "REALTIME", "overdue": "false"}, 1),
        ("dispatches_total", {"class": "REALTIME", "overdue": "true"}, 1),
        ("dispatches_total", {"class": "BATCH", "overdue": "false"}, 1),
        ("queue_wait_seconds_bucket", {"class": "REALTIME", "le": "0.003"}, 1),
        ("queue_wait_seconds_bucket", {"class": "REALTIME", "le": "1.0"}, 2),
        ("queue_wait_seconds_sum", {"class": "REALTIME"}, 0.502),
    ):
        assert registry.get_sample_value(f"forebay_batcher_{sample}", labels) == value
