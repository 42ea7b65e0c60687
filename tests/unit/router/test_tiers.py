"""Which tier of a tiered alias answers."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay_router.adapters.tier_models import load_classifiers
from forebay_router.core.generate import check_generate
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
ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""Lone surrogates and control characters among it."""


class Scripted:
    """Gives one score, or fails."""

    threshold = 0.9

    def __init__(self, score: Any) -> None:
        self._score = score
        self.seen: list[str] = []

    def score(self, text: str) -> float:
        self.seen.append(text)
        if isinstance(self._score, Exception):
            raise self._score
        score: float = self._score
        return score


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
    [
        Scripted(math.nan),
        Scripted(2.0),
        Scripted(-0.1),
        Scripted("0.5"),
        Scripted(None),
        Scripted(RecursionError()),
        None,
    ],
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
    [
        "",
        "  \n ",
        None,
        [],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
    ],
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
@given(text=ANY_TEXT)
def test_every_text_has_a_score(name: str, text: str) -> None:
    assert 0.0 <= CLASSIFIERS[name].score(text) <= 1.0


class Texts:
    """A prompt of these texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def prefix_bytes(self) -> bytes:
        return b""

    def texts(self) -> list[str]:
        return self._texts


@given(texts=st.lists(ANY_TEXT), name=st.sampled_from(["rules", "light", "unknown"]))
def test_every_prompt_is_answered_by_some_tier(texts: list[str], name: str) -> None:
    wanted = Wanted(model="auto", operation="chat", prompt_tokens=1, prompt=Texts(texts))
    choice = choose(Tiers("tiny", "big", name), wanted, CLASSIFIERS)
    assert choice.target in ("tiny", "big")
    assert choice.reason


def test_messages_over_grpc_are_judged_as_those_over_http() -> None:
    scripted = Scripted(0.0)
    messages = [
        inference.ChatMessage(role="system", content="You are terse."),
        inference.ChatMessage(role="user", content="Prove it."),
        inference.ChatMessage(role="assistant", content="No."),
    ]
    request = inference.GenerateRequest(
        model="auto", messages=inference.ChatMessages(messages=messages)
    )
    choose(TIERS, check_generate(request), {"scripted": scripted})
    spoken = [{"role": each.role, "content": each.content} for each in messages]
    body = json.dumps({"model": "auto", "messages": spoken}).encode()
    choose(TIERS, check_openai("/v1/chat/completions", body), {"scripted": scripted})
    assert scripted.seen == ["Prove it.", "Prove it."]


@pytest.mark.parametrize("name", ["rules", "light"])
@pytest.mark.parametrize("hostile", [".", "?", "1,", "; ", "\n(a", "prove ", "```", "河", "not "])
def test_no_text_takes_much_longer_than_any_other(name: str, hostile: str) -> None:
    """What takes the square of its length takes a hundred times as long."""

    def least_s(text: str) -> float:
        took = []
        for _ in range(5):
            began_s = time.perf_counter()
            CLASSIFIERS[name].score(text)
            took.append(time.perf_counter() - began_s)
        return min(took)

    plain = ("The river runs under an old bridge of stone. " * 99)[:CHARACTERS]
    text = (hostile * CHARACTERS)[: CHARACTERS - 1] + "x"
    assert least_s(text) < 40 * least_s(plain)


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


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ("你好，请翻译这个词。", "请逐步推导这个算法的复杂度，并证明它是最优的。"),
        ("写一首关于春天的短诗", "比较这两份合同的条款，并分析各方的法律责任。"),
    ],
)
def test_light_which_knows_english_alone_leaves_chinese_to_the_rules(easy: str, hard: str) -> None:
    rules, light = CLASSIFIERS["rules"], CLASSIFIERS["light"]
    assert light.score(easy) < light.threshold <= light.score(hard)
    for text in (easy, hard):
        assert (light.score(text) < light.threshold) is (rules.score(text) < rules.threshold)


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
