"""Which tier of a tiered alias answers a prompt: the small model, where it is good enough, or the
large one.

A classifier scores what was asked, from 0 (easy) to 1 (hard). It looks at the first and the last
`CHARACTERS` halves of the text alone, so that its time does not grow with the prompt. Whatever goes
wrong with it, the alias's default tier answers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from forebay_router.core.wanted import Wanted

CHARACTERS = 2000
"""Most of a text that a classifier looks at."""


class Tier(StrEnum):
    """A size of model."""

    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """How a tiered alias chooses."""

    small: str
    """A model's name, or `name@version`."""
    large: str
    classifier: str
    default: Tier = Tier.LARGE
    threshold: float | None = None
    """Scores from it on go to the large tier; None is the classifier's own."""
    small_tokens_most: int = 0
    """Longer prompts go to the large tier, whatever they ask; 0 is no limit."""

    def target(self, tier: Tier) -> str:
        """What a tier is."""
        return self.small if tier is Tier.SMALL else self.large


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A tier, and why, in words for whoever asks later."""

    tier: Tier
    target: str
    reason: str
    is_default: bool = False
    """The classifier gave nothing."""


class Classifier(Protocol):
    """Scores prompts."""

    threshold: float
    """What suits its scores."""

    def score(self, text: str) -> float:
        """From 0, which the small tier answers as well as the large, to 1."""
        ...


def choose_by_length(tiers: Tiers, prompt_tokens: int) -> Choice | None:
    """The large tier for what the small one may have no room for; None for the rest."""
    most = tiers.small_tokens_most
    if not most or prompt_tokens <= most:
        return None
    reason = f"prompt of about {prompt_tokens} tokens is over {most}"
    return Choice(Tier.LARGE, tiers.large, reason)


def choose_default(tiers: Tiers, reason: str) -> Choice:
    """The default tier, because the classifier gave nothing."""
    return Choice(tiers.default, tiers.target(tiers.default), f"default, {reason}", True)


def choose(tiers: Tiers, wanted: Wanted, classifiers: Mapping[str, Classifier]) -> Choice:
    """Choose the tier of a request."""
    by_length = choose_by_length(tiers, wanted.prompt_tokens)
    if by_length is not None:
        return by_length
    classifier = classifiers.get(tiers.classifier)
    if classifier is None:
        return choose_default(tiers, f"no classifier is called {tiers.classifier}")
    try:
        text = wanted.question(CHARACTERS)
        if not text or text.isspace():
            return choose_default(tiers, "there is no text to judge")
        score = classifier.score(text)
        # A score that is no number raises here, so this belongs to what may fail.
        if not 0.0 <= score <= 1.0:
            return choose_default(tiers, f"{tiers.classifier} gave no score")
        threshold = classifier.threshold if tiers.threshold is None else tiers.threshold
    except Exception as failure:
        return choose_default(tiers, f"{tiers.classifier} failed with {type(failure).__name__}")
    tier = Tier.LARGE if score >= threshold else Tier.SMALL
    sign = "reaches" if tier is Tier.LARGE else "is below"
    reason = f"{tiers.classifier} {score:.3f} {sign} {threshold:.3f}"
    return Choice(tier, tiers.target(tier), reason)


class TimeBox:
    """Leaves a classifier alone for a while that takes too long again and again.

    It runs where all requests wait for it, so it cannot be interrupted, only not be asked.
    """

    def __init__(self, *, limit_s: float, overruns: int, pause_s: float) -> None:
        """
        Args:
            limit_s: longest time one score may take.
            overruns: how many in a row are too many.
            pause_s: how long it is left alone then.
        """
        self._limit_s = limit_s
        self._overruns = overruns
        self._pause_s = pause_s
        self._in_a_row: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def is_open(self, classifier: str, now: float) -> bool:
        """Whether it may be asked."""
        return not self._until_s or self._until_s.get(classifier, 0.0) <= now

    def took(self, classifier: str, elapsed_s: float, now: float) -> bool:
        """Note the time of one score. Returns whether it was too long."""
        if elapsed_s <= self._limit_s:
            if self._in_a_row:
                self._in_a_row.pop(classifier, None)
            return False
        count = self._in_a_row.get(classifier, 0) + 1
        if count >= self._overruns:
            self._until_s[classifier] = now + self._pause_s
            count = 0
        self._in_a_row[classifier] = count
        return True


# --- By rules ----------------------------------------------------------------------------------

_HARD = re.compile(
    r"\b(?:prove|proof|theorem|lemma|deriv(?:e|ation)|integral|equation|step by step|analy[sz]e|"
    r"analysis|compare|contrast|evaluate|critique|trade-?offs?|architect(?:ure)?|design|refactor|"
    r"debug|optimi[sz]e|algorithm|complexity|implement|concurren\w+|deadlock|regex|sql|explain why|"
    r"why does|reason(?:ing)?|hypothes[ie]s|diagnos\w+|contract|clause|statute|liabilit\w+|"
    r"strategy|in detail|comprehensive|rigorous\w*|multi-?step|root cause|independent analyses|"
    r"synthesi[sz]e|workflow|verif\w+)\b|"
    "证明|推导|定理|引理|积分|方程|逐步|一步一步|分析|比较|对比|评估|权衡|架构|设计|重构|调试|"
    "优化|算法|复杂度|实现|并发|死锁|为什么|原因|推理|论证|论述|假设|诊断|合同|条款|法律|责任|"
    "策略|详细|全面|严格|综合|验证",
    re.IGNORECASE,
)
_EASY = re.compile(
    r"\b(?:hi|hello|hey|thanks|thank you|translate|define|definition|spell|synonym|what is|"
    r"what's|who is|when was|where is|capital of|brief(?:ly)?|short|one sentence|one word|list|"
    r"rephrase|yes or no|tl;?dr)\b|"
    "你好|您好|谢谢|翻译|定义|是什么|什么是|是谁|在哪|哪里|首都|简短|简要|一句话|列出|是或否|改写",
    re.IGNORECASE,
)
_CODE = re.compile(r"```|\bdef \w+\(|\bclass \w+[:({]|#include|\bfunction \w*\(|;\s*\n")
_NUMBERS = re.compile(r"\d[\d,]*(?:\.\d+)?")
_LONG_CHARACTERS = 3000.0
_CJK_WEIGHT = 3.0


class Rules:
    """Scores by keywords and length, in English and Chinese. Needs no training; says so little
    that it is best for telling chats from work."""

    threshold = 0.38

    def score(self, text: str) -> float:
        """See `Classifier`."""
        hard = len({found.lower() for found in _HARD.findall(text)})
        easy = len({found.lower() for found in _EASY.findall(text)})
        # A Chinese character says about as much as three letters.
        length = len(text) + (_CJK_WEIGHT - 1.0) * _count_cjk(text)
        score = (
            0.25
            + 0.14 * min(hard, 4)
            - 0.15 * min(easy, 2)
            + 0.35 * min(1.0, length / _LONG_CHARACTERS)
            + 0.02 * min(8, len(_NUMBERS.findall(text)))
            + (0.15 if _CODE.search(text) else 0.0)
        )
        return min(1.0, max(0.0, score))


# --- By a trained model ------------------------------------------------------------------------

_WORDS = re.compile(r"[^\W\d_]+")
# The last mark of a run alone: to match the run takes the square of its length where no space
# follows, tens of milliseconds that every request would wait for.
_SENTENCES = re.compile(r"[.!?\u3002\uff01\uff1f](?:\s|$)")
_CHOICES = re.compile(r"\n\(?a[.)] ")
_MONEY = frozenset("$\u20ac\u00a3%")
_SIGNS = frozenset("=+*/^<>|{}[]\\")
_GROUPS: tuple[frozenset[str], ...] = tuple(
    frozenset(words.split())
    for words in (
        "each every per",
        "times twice half third double percent",
        "more less than fewer",
        "total altogether left remaining",
        "not except never false incorrect",
        "if then therefore because suppose assume",
        "statement prove explain why derive",
        "he she his her they",
    )
)
FEATURES = (
    "log_characters",
    "log_words",
    "word_length",
    "words_per_sentence",
    "log_sentences",
    "log_numbers",
    "log_distinct_numbers",
    "digits_of_longest_number",
    "log_lines",
    "log_questions",
    "log_money",
    "log_signs",
    "upper_share",
    "each",
    "times",
    "more",
    "total",
    "not",
    "if",
    "prove",
    "he",
    "choices",
    "following",
    "distinct_words",
    "cjk_share",
    "digit_share",
    "numbers",
    "periods",
    "negations",
)
"""What the trained model knows of a text, in the order of its weights."""


def features(text: str) -> list[float]:
    """A text by `FEATURES`. The same in training and in use."""
    log = math.log1p
    low = text.lower()
    words = _WORDS.findall(low)
    count = max(1, len(words))
    size = max(1, len(text))
    numbers = [number.replace(",", "") for number in _NUMBERS.findall(text)]
    sentences = max(1, len(_SENTENCES.findall(text)))
    distinct = set(words)
    return [
        log(size),
        log(count),
        sum(map(len, words)) / count,
        count / sentences,
        log(sentences),
        log(len(numbers)),
        log(len(set(numbers))),
        float(max((min(12, len(each.partition(".")[0])) for each in numbers), default=0)),
        log(text.count("\n")),
        log(text.count("?")),
        log(sum(text.count(sign) for sign in _MONEY)),
        log(sum(text.count(sign) for sign in _SIGNS)),
        10.0 * sum(map(str.isupper, text)) / size,
        *(log(sum(map(words.count, distinct & group))) for group in _GROUPS),
        float(_CHOICES.search(low) is not None),
        float("following" in low),
        len(distinct) / count,
        _count_cjk(text) / size,
        10.0 * sum(map(str.isdigit, text)) / size,
        min(5.0, len(numbers) / 10),
        min(5.0, text.count(".") / 10),
        min(5.0, low.count("not ") / 2),
    ]


_CHINESE_SHARE = 0.2


class Light:
    """A logistic regression over `FEATURES`.

    It was trained on English alone. What is written in Chinese it leaves to `Rules`, whose scores
    it moves so that their threshold falls on its own.
    """

    def __init__(
        self,
        *,
        means: Sequence[float],
        deviations: Sequence[float],
        weights: Sequence[float],
        bias: float,
        threshold: float,
    ) -> None:
        """
        Args:
            means: of each feature where it was trained.
            deviations: likewise, above 0.
            weights: of each feature, less its mean and over its deviation.
            bias: what is added.
            threshold: see `Classifier`.

        Raises:
            ValueError: they do not fit the features.
        """
        if not len(means) == len(deviations) == len(weights) == len(FEATURES):
            raise ValueError(f"the model must have {len(FEATURES)} features")
        self.threshold = threshold
        self._rules = Rules()
        self._scaled = [w / d for w, d in zip(weights, deviations, strict=True)]
        self._bias = bias - sum(s * mean for s, mean in zip(self._scaled, means, strict=True))

    def score(self, text: str) -> float:
        """See `Classifier`."""
        if _count_cjk(text) > _CHINESE_SHARE * len(text):
            return _moved(self._rules.score(text), self._rules.threshold, self.threshold)
        total = self._bias
        for weight, value in zip(self._scaled, features(text), strict=True):
            total += weight * value
        # Beyond it the score is 0 or 1 to all digits that anybody reads.
        total = min(50.0, max(-50.0, total))
        return 1.0 / (1.0 + math.exp(-total))


def _moved(score: float, threshold: float, to: float) -> float:
    """A score of one scale on another: 0, the threshold and 1 fall on 0, the other's and 1."""
    if score < threshold:
        return score * to / threshold
    return 1.0 - (1.0 - score) * (1.0 - to) / (1.0 - threshold)


def _count_cjk(text: str) -> int:
    if text.isascii():
        return 0
    return sum("\u3400" <= character <= "\u9fff" for character in text)
