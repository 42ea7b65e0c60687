"""The simulated model's tokens and what it says."""

import random
from collections import Counter

import pytest
from forebay_engine.core.simulated import language, tokenizer
from forebay_engine.core.simulated.text import TextStream

TEXTS = [
    "",
    " ",
    "the quick brown fox",
    "The Quick  brown\n\tfox! 123 naïve 日本語 🎉",
    "abcdefghijklmnopqrstuvwxyz",
    " leading and trailing ",
    "a" * 50,
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_its_tokens(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.is_vocabulary(tokens)


def test_random_text_survives_its_tokens() -> None:
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(rng.choice("abz  .A1é日\n") for _ in range(rng.randrange(40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_kind_of_token_is_its_own() -> None:
    pieces = ["a", "z", "aa", "zz", "aaa", "zzz", "aaaa", "zzzz"]
    tokens = [tokenizer.encode(piece)[0] for piece in (*pieces, *(f" {p}" for p in pieces))]
    assert len(set(tokens)) == 16
    assert max(tokens) == tokenizer.END_OF_SEQUENCE - 1
    assert tokenizer.decode_token(tokenizer.END_OF_SEQUENCE) == b""
    assert not tokenizer.is_vocabulary([tokenizer.VOCABULARY_SIZE])


@pytest.mark.parametrize("character", tokenizer.SPLIT_CHARACTERS)
def test_some_characters_are_two_tokens(character: str) -> None:
    first, second = tokenizer.encode(character)
    assert tokenizer.SECOND_PARTS[first] == second
    assert tokenizer.decode((first,)) == "\ufffd"
    assert tokenizer.decode((first, second)) == character
    assert tokenizer.is_beyond_ascii((first,))
    assert tokenizer.is_vocabulary((first, second))


def test_beyond_ascii_is_said_of_bytes_and_parts_alone() -> None:
    assert not tokenizer.is_beyond_ascii(tokenizer.encode("plain zzzz zzzz.\x7f"))
    assert not tokenizer.is_beyond_ascii((tokenizer.END_OF_SEQUENCE,))
    assert tokenizer.is_beyond_ascii(tokenizer.encode("plain ж"))


def continue_(prompt: list[int], count: int, *, seed: int = 0) -> list[int]:
    context, last = language.fold(prompt), prompt[-1]
    beyond_ascii = tokenizer.is_beyond_ascii(prompt)
    answer = []
    for _ in range(count):
        last = language.next_token(
            context, last, seed=seed, may_end=False, beyond_ascii=beyond_ascii
        )
        context = language.extend(context, last)
        answer.append(last)
    return answer


def test_answer_goes_on_the_same_when_part_of_it_becomes_the_prompt() -> None:
    prompt = tokenizer.encode("Tell me of the river.")
    whole = continue_(prompt, 40)
    for cut in (1, 7, 39):
        assert continue_(prompt + whole[:cut], 40 - cut) == whole[cut:]


@pytest.mark.parametrize("prompt", ["hello", "hello 🎉"])
def test_answer_as_text_gives_its_tokens_again(prompt: str) -> None:
    answer = continue_(tokenizer.encode(prompt), 61)
    if answer[-1] in tokenizer.SECOND_PARTS:
        answer.pop()
    assert tokenizer.encode(tokenizer.decode(answer)) == answer


def test_prompt_beyond_ascii_is_answered_with_whole_characters_beyond_it() -> None:
    prompt = tokenizer.encode("Sag es mit 水 und ж.")
    answer = continue_(prompt, 200)
    for cut in range(1, 20):
        assert continue_(prompt + answer[:cut], 200 - cut) == answer[cut:]
    text = tokenizer.decode(answer[:-1])
    assert "\ufffd" not in text.rstrip("\ufffd")
    assert set(tokenizer.SPLIT_CHARACTERS) <= set(text)
    assert tokenizer.decode(continue_(tokenizer.encode("hello"), 200)).isascii()


def test_prompt_and_seed_both_decide() -> None:
    hello = continue_(tokenizer.encode("hello"), 20)
    assert continue_(tokenizer.encode("hellp"), 20) != hello
    assert continue_(tokenizer.encode("hello"), 20, seed=1) != hello
    assert continue_(tokenizer.encode("hello"), 20) == hello


def test_answers_end_by_themselves_after_about_sixty_tokens() -> None:
    lengths = []
    for number in range(300):
        prompt = tokenizer.encode(f"question {number}")
        context, last, length = language.fold(prompt), prompt[-1], 0
        while last != tokenizer.END_OF_SEQUENCE:
            last = language.next_token(context, last, seed=0, may_end=True)
            context = language.extend(context, last)
            length += 1
        lengths.append(length)
    assert 45 < sum(lengths) / len(lengths) < 85


def test_words_are_drawn_evenly() -> None:
    counts = Counter(continue_(tokenizer.encode("hello"), 5000))
    del counts[ord(".")]
    assert max(counts.values()) < 5 * sum(counts.values()) / len(counts)


def test_texts_that_share_words_embed_close() -> None:
    def embed(text: str) -> list[float]:
        return language.embed(tokenizer.encode(text), dimensions=64)

    def cosine(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    river = embed(" the river runs deep")
    assert cosine(river, river) == pytest.approx(1)
    assert cosine(river, embed(" the river runs slow")) > cosine(river, embed(" my dog eats fish"))


def test_characters_are_never_split_between_deltas() -> None:
    stream = TextStream()
    deltas = [stream.push(bytes((byte,)))[0] for byte in "é🎉".encode()]
    assert deltas == ["", "é", "", "", "", "🎉"]
    assert stream.finish() == ""


def test_stop_text_ends_the_answer_and_is_no_part_of_it() -> None:
    stream = TextStream(["END", "EXIT"])
    assert stream.push(b"one E") == ("one ", None)
    assert stream.push(b"N") == ("", None)
    assert stream.push(b"D two") == ("", "END")


def test_text_that_only_looked_like_a_stop_is_given_later() -> None:
    stream = TextStream(["stop"])
    assert stream.push(b"a st") == ("a ", None)
    assert stream.push(b"one") == ("stone", None)
    assert stream.push(b" sto") == (" ", None)
    assert stream.finish() == "sto"


def test_earliest_of_several_stops_counts() -> None:
    assert TextStream(["cd", "b"]).push(b"abcd") == ("a", "b")


def test_stop_before_min_tokens_is_text() -> None:
    stream = TextStream(["x"])
    assert stream.push(b"x", honour=False) == ("x", None)
    assert stream.push(b"x") == ("", "x")
