"""How long first tokens take, as learned."""

from __future__ import annotations

import math
import random

import pytest
from forebay_router.core.rates import Factor, Line


def test_a_line_finds_base_and_rate() -> None:
    line, factor = Line(base_ms=30, rate_ms=0.05), Factor(0.0)
    draw = random.Random(1)
    for _ in range(400):
        tokens = draw.randrange(4000)
        line.observe(tokens, (80 + 0.4 * tokens) * draw.uniform(0.9, 1.1), factor)
    assert line.base_ms == pytest.approx(80, rel=0.15)
    assert line.rate_ms == pytest.approx(0.4, rel=0.1)


def test_a_line_of_equal_prompts_stays_sane() -> None:
    line, factor = Line(base_ms=30, rate_ms=0.05), Factor(0.0)
    for _ in range(2000):
        line.observe(100, 50, factor)
    assert line.expected_ms(100) == pytest.approx(50, rel=0.1)
    assert line.rate_ms > 0
    assert line.expected_ms(10_000) < 10_000


def test_one_outlier_hardly_bends_a_line() -> None:
    line, factor = Line(base_ms=30, rate_ms=0.05), Factor(0.0)
    draw = random.Random(1)
    for _ in range(200):
        tokens = draw.randrange(4000)
        line.observe(tokens, 30 + 0.05 * tokens, factor)
    line.observe(100, 60_000, factor)
    assert line.expected_ms(1000) < 120


def test_a_fleet_that_is_slower_than_assumed_has_factors_of_one() -> None:
    line = Line(base_ms=30, rate_ms=0.05)
    factors = [Factor(0.0) for _ in range(4)]
    draw = random.Random(1)
    for n in range(2000):
        tokens, factor = draw.randrange(1000), factors[n % 4]
        took_ms = 2000 + 3 * tokens
        factor.observe(took_ms, line.expected_ms(tokens), n / 10)
        line.observe(tokens, took_ms, factor)
    assert [factor.at(200.0) for factor in factors] == [1.0] * 4
    assert line.expected_ms(500) == pytest.approx(3500, rel=0.2)


def test_a_factor_is_learned_and_forgotten() -> None:
    factor = Factor(0.0)
    for n in range(20):
        factor.observe(1000, 100, float(n))
    assert 6 < factor.at(20.0) < 11
    assert factor.at(20.0 + 600) == 1.0
    for _ in range(100):
        factor.observe(1e9, 1, 700.0)
    assert factor.at(700.0) <= 50


def test_small_differences_are_noise() -> None:
    factor = Factor(0.0)
    draw = random.Random(3)
    for n in range(500):
        factor.observe(100 * draw.uniform(0.6, 1.5), 100, n / 10)
        assert 0.8 < factor.at(n / 10) < 1.3


def test_after_silence_one_observation_counts_for_much() -> None:
    factor = Factor(0.0)
    for n in range(20):
        factor.observe(1000, 100, float(n))
    factor.observe(100, 100, 60.0)
    assert math.log(factor.at(60.0)) < 0.2 * math.log(10)
