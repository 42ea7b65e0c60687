"""Token buckets, and what callers are told of them."""

from __future__ import annotations

import math
import random

import pytest
from forebay_common.metadata import Usage
from forebay_router.core.access import Limits
from forebay_router.core.meter import Limit, Meter, duration, headers, reserve
from forebay_router.core.output_guess import OutputGuess, estimate, used_tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def a_meter(name: str = "", now: float = 0.0, **limits: int) -> Meter:
    return Meter(name, Limits(**limits), 1, now)


def test_ten_a_minute_lets_exactly_ten_through_at_once() -> None:
    meter = a_meter(requests_per_min=10)
    assert [reserve([meter], 0, 0.0) is None for _ in range(100)].count(True) == 10
    assert reserve([meter], 0, 5.9) is not None
    assert reserve([meter], 0, 6.0) is None


@pytest.mark.parametrize("jitter_s", [0.0, 0.4])
def test_steady_traffic_just_under_the_limit_is_never_refused(jitter_s: float) -> None:
    rng = random.Random(7)
    meter = a_meter(requests_per_min=60, tokens_per_min=6000)
    for index in range(300):
        now = index * 1.01 + rng.uniform(0, jitter_s)
        assert reserve([meter], 100, now) is None


def test_all_meters_let_it_pass_or_none_is_charged() -> None:
    tenant, model = a_meter(requests_per_min=10), a_meter("chat", tokens_per_min=100)
    assert reserve([tenant, model], 60, 0.0) is None
    refusal = reserve([tenant, model], 60, 0.0)
    assert refusal is not None
    assert (refusal.limit, refusal.scope) == (Limit.TOKENS, 1)
    assert tenant.requests == 9
    assert model.tokens == 40


def test_the_longest_wait_is_named() -> None:
    meter = a_meter(requests_per_min=60, tokens_per_min=60, request_burst=1)
    assert reserve([meter], 60, 0.0) is None
    refusal = reserve([meter], 30, 0.0)
    assert refusal is not None
    assert (refusal.limit, refusal.wait_s) == (Limit.TOKENS, pytest.approx(30))


def test_streams_are_counted_over_sessions() -> None:
    meter = a_meter(concurrent=3)
    meter.begin()
    meter.note_streams("a", 2)
    refusal = reserve([meter], 0, 0.0)
    assert refusal is not None
    assert refusal.limit is Limit.CONCURRENT
    meter.note_streams("a", 1)
    assert reserve([meter], 0, 0.0) is None


def test_what_was_used_beyond_its_reservation_is_owed() -> None:
    meter = a_meter(tokens_per_min=600)
    assert reserve([meter], 600, 0.0) is None
    meter.give_back(0, -60, 0.0)
    refusal = reserve([meter], 1, 0.0)
    assert refusal is not None
    assert refusal.wait_s == pytest.approx(6.1)


def test_changed_limits_keep_what_is_used() -> None:
    meter = a_meter(requests_per_min=10)
    for _ in range(4):
        assert reserve([meter], 0, 0.0) is None
    meter.follow(Limits(requests_per_min=6), 2, 0.0)
    assert meter.requests == 2
    meter.follow(Limits(requests_per_min=100), 1, 0.0)
    assert meter.requests == 2, "an older record changes nothing"
    meter.follow(Limits(), 3, 0.0)
    assert reserve([meter], 10**9, 0.0) is None


def test_parts_of_all_routers_are_the_whole() -> None:
    meter = a_meter(requests_per_min=12, tokens_per_min=900, concurrent=9)
    meter.give_back(-3, -300, 0.0)
    parts = [meter.part(3, 0.0) for _ in range(3)]
    assert sum(part.requests for part in parts) == pytest.approx(9)
    assert sum(part.tokens for part in parts) == pytest.approx(600)
    assert sum(part.request_rate for part in parts) == pytest.approx(12 / 60)
    assert [part.concurrent for part in parts] == [3, 3, 3]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.02, "20ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9996, "1m0s"),
        (360, "6m0s"),
        (3661.5, "1h1m1.5s"),
    ],
)
def test_durations_read_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_of_the_tightest_meter() -> None:
    tenant = a_meter(requests_per_min=60, tokens_per_min=1000)
    model = a_meter("chat", requests_per_min=6)
    assert reserve([tenant, model], 100, 0.0) is None
    assert dict(headers([tenant, model], 0.0)) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert headers([a_meter(concurrent=1)], 0.0) == ()


@settings(max_examples=50)
@given(
    rpm=st.integers(1, 50),
    tpm=st.integers(10, 2000),
    steps=st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 400), st.integers(0, 600)), max_size=150
    ),
)
def test_a_meter_lets_no_more_through_than_it_may_and_no_less(
    rpm: int, tpm: int, steps: list[tuple[float, int, int]]
) -> None:
    """Over every stretch of time: at most the burst and what came since, but for what one request
    used beyond its reservation; and a refused one passes after the wait that it was told."""
    meter = a_meter(requests_per_min=rpm, tokens_per_min=tpm)
    now, passed = 0.0, []
    for pause_s, tokens, used in steps:
        now += pause_s
        wanted = min(tokens, tpm)
        refusal = reserve([meter], wanted, now)
        if refusal is not None:
            assert refusal.wait_s > 0
            assert not math.isinf(refusal.wait_s)
            now += refusal.wait_s
            assert reserve([meter], wanted, now) is None, "it was told to come now"
        meter.give_back(0, wanted - used, now)
        passed.append((now, used))
    overrun = max((used for _, used in passed), default=0)
    for first in range(len(passed)):
        used = 0
        for count, (at_s, tokens) in enumerate(passed[first:], 1):
            used += tokens
            stretch_s = at_s - passed[first][0]
            assert count <= rpm + stretch_s * rpm / 60 + 1e-3
            assert used <= tpm + stretch_s * tpm / 60 + overrun + 1e-3


def test_a_guess_never_outgrows_a_bucket() -> None:
    meter = a_meter(tokens_per_min=500)
    assert estimate(100, 2, 50, 1000, [meter]) == 200
    assert estimate(100, 2, None, 1000, [meter]) == 500
    assert estimate(100, 2, None, 20, [meter]) == 140
    assert estimate(600, 1, None, 20, [meter]) == 600


def test_guesses_follow_what_answers_were() -> None:
    guess = OutputGuess(default=512, most=2)
    assert guess.expected("a") == 512
    for _ in range(200):
        guess.learn("a", 50)
    assert guess.expected("a") == pytest.approx(101, abs=1)
    guess.learn("b", 10)
    guess.learn("c", 10)
    assert guess.expected("a") == 512, "the oldest is forgotten"


def test_an_aborted_answer_costs_what_came_of_it() -> None:
    assert used_tokens(Usage(10, 20, 5), 99, 99) == 30
    assert used_tokens(None, 12, 7) == 19
