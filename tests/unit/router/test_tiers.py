"""Which tier of a tiered alias answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from forebay_router.adapters.tier_models import load_classifiers
from forebay_router.core.openai import check_openai
from forebay_router.core.tiers import (
    CHARACTERS,
    FEATURES,
    Light,
    Rules,
    Tier,
    Tiers,
    TimeBox,
    choose,
    features,
)
from forebay_router.core.wanted import Wanted
from hypothesis import given
from hypothesis import strategies as st

TIERS = Tiers("tiny", "big@2", "scripted", threshold=0.5)
CLASSIFIERS = load_classifiers()


class Scripted:
    """Gives one score, or fails."""

    threshold = 0.9

    def __init__(self, score: float | Exception) -> None:
        self._score = score
        self.seen: list[str] = []

    def score(self, text: str) -> float:
        self.seen.append(text)
        if isinstance(self._score, Exception):
            raise self._score
        return self._score


def asked(*contents: object, **more: Any) -> Wanted:
    messages = [{"role": "user", "content": each} for each in contents]
    body = {"model": "auto", "messages": messages, **more}
    return check_openai("/v1/chat/completions", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("score", "tier", "target"),
    [(0.0, "small", "tiny"), (0.5, "large", "big@2"), (1, "large", "big@2")],
)
def test_a_score_from_the_threshold_on_takes_the_large_model(
    score: float, tier: str, target: str
) -> None:
    choice = choose(TIERS, asked("Hello"), {"scripted": Scripted(score)})
    assert (choice.tier, choice.target, choice.is_default) == (tier, target, False)
    assert choice.reason.startswith(f"scripted {score:.3f}")


def test_the_classifiers_own_threshold_counts_where_the_alias_names_none() -> None:
    tiers = Tiers("tiny", "big", "scripted")
    assert choose(tiers, asked("Hello"), {"scripted": Scripted(0.8)}).tier is Tier.SMALL


@pytest.mark.parametrize("default", list(Tier))
@pytest.mark.parametrize(
    "classifier",
    [Scripted(math.nan), Scripted(2.0), Scripted(-0.1), Scripted(RecursionError()), None],
)
def test_whatever_goes_wrong_the_default_tier_answers(
    default: Tier, classifier: Scripted | None
) -> None:
    tiers = Tiers("tiny", "big", "scripted", default=default)
    known = {} if classifier is None else {"scripted": classifier}
    choice = choose(tiers, asked("Hello"), known)
    assert (choice.tier, choice.is_default) == (default, True)
    assert choice.target == tiers.target(default)
    assert choice.reason.startswith("default, ")


@pytest.mark.parametrize(
    "content",
    ["", "  \n ", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]],
)
def test_what_has_no_text_goes_to_the_default_tier(content: object) -> None:
    choice = choose(TIERS, asked(content), {"scripted": Scripted(0.0)})
    assert (choice.tier, choice.is_default) == (Tier.LARGE, True)


def test_a_long_prompt_takes_the_large_model_unasked() -> None:
    scripted = Scripted(0.0)
    tiers = Tiers("tiny", "big", "scripted", small_tokens_most=100)
    assert choose(tiers, asked("word " * 200), {"scripted": scripted}).tier is Tier.LARGE
    assert not scripted.seen
    assert choose(tiers, asked("word"), {"scripted": scripted}).tier is Tier.SMALL


def test_it_is_judged_by_what_the_user_asked_last_and_by_its_ends() -> None:
    scripted = Scripted(0.0)
    choose(TIERS, asked("Prove it.", "a" * 5000 + "b" * 5000), {"scripted": scripted})
    (text,) = scripted.seen
    assert text == "a" * (CHARACTERS // 2) + "b" * (CHARACTERS // 2)


@pytest.mark.parametrize("name", ["rules", "light"])
@given(text=st.text())
def test_every_text_has_a_score(name: str, text: str) -> None:
    assert 0.0 <= CLASSIFIERS[name].score(text) <= 1.0


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ("What is the capital of France?", "Prove that the sum of two even numbers is even."),
        ("Hello!", "Analyze the trade-offs of this architecture and design a better one."),
        ("你好，请翻译这个词。", "请逐步推导这个算法的复杂度，并证明它是最优的。"),
        ("什么是河流？", "比较这两份合同的条款，并分析各方的法律责任。"),
    ],
)
def test_rules_tell_chats_from_work_in_two_languages(easy: str, hard: str) -> None:
    rules = Rules()
    assert rules.score(easy) < rules.threshold <= rules.score(hard)


def test_features_are_as_many_as_named_and_finite() -> None:
    for text in ("", "7", "河" * 9, "a" * CHARACTERS, "1,2.3 $ =\n(a) x?"):
        values = features(text)
        assert len(values) == len(FEATURES)
        assert all(map(math.isfinite, values))


def test_a_model_for_other_features_is_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        Light(means=[0.0], deviations=[1.0], weights=[1.0], bias=0.0, threshold=0.5)


def test_a_classifier_that_is_slow_again_and_again_is_left_alone_for_a_while() -> None:
    box = TimeBox(limit_s=0.01, overruns=2, pause_s=30.0)
    assert box.took("light", 0.02, 1.0)
    assert not box.took("light", 0.001, 2.0)
    assert box.took("light", 0.02, 3.0)
    assert box.is_open("light", 3.5)
    assert box.took("light", 0.02, 4.0)
    assert not box.is_open("light", 33.9)
    assert box.is_open("rules", 5.0)
    assert box.is_open("light", 34.0)
