"""A histogram as plain numbers."""

from forebay_common.buckets import Buckets
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

BOUNDS = (0.01, 0.1, 1, 30)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100)), max_size=30))
def test_it_counts_what_a_histogram_of_prometheus_counts(values: list[float]) -> None:
    buckets = Buckets(BOUNDS)
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", buckets=BOUNDS, registry=registry)
    for value in values:
        buckets.observe(value)
        histogram.observe(value)
    for bound, count in buckets.cumulative():
        assert registry.get_sample_value("h_bucket", {"le": bound}) == count
    assert registry.get_sample_value("h_sum") == buckets.sum
    assert len(buckets.cumulative()) == len(BOUNDS) + 1


def test_a_bound_belongs_to_its_own_bucket() -> None:
    buckets = Buckets(BOUNDS)
    buckets.observe(0.1)
    assert buckets.cumulative() == [("0.01", 0), ("0.1", 1), ("1.0", 1), ("30.0", 1), ("+Inf", 1)]
