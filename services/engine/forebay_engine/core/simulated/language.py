"""What the simulated engine says: the next token is a pure function of all tokens before it.

The context is folded into one number, `h' = (h * BASE + token + 1) mod P`, so that a prompt with
some of its answer appended is continued by exactly the rest of that answer, on any replica. The
same number, taken at a block's last token, names the block in the prefix cache. Sentences are short
words of a fixed list; an answer can end after a full stop, and has 60 tokens on average. A prompt
with characters beyond ASCII is answered with some of them, whose tokens hold half a character each.
"""

import functools
from collections.abc import Iterable, Sequence

from forebay_engine.core.simulated.tokenizer import (
    END_OF_SEQUENCE,
    SECOND_PARTS,
    encode,
)

_PRIME = (1 << 61) - 1
_BASE = 1_103_515_245_912_739
_MASK = (1 << 64) - 1

_WORDS = """
the a and of in on by for with from as at its one two all any each more most new old big
few long low high cold warm deep wide slow fast calm dry wet red blue gray gold dark pale
rain snow wind mist fog sun moon star sky sea lake pool pond rill dam weir gate mill pump
tap pipe duct sand silt clay rock reed moss fern tree leaf root seed oak elm ash pine bird
swan duck fish carp eel frog boat raft oar net hook rope knot sail mast hull deck dock pier
town road lane yard barn roof wall door room lamp fire coal wood iron tin bell book page
line word note song tale name map sign step turn rise fall flow fill hold keep lift pull
push draw pour drip run walk go come stay wait look see hear feel know find make take give
    "send bear turn wash mend ease meet open shut rest wake
""".split()  # noqa: SIM905
_WORD_TOKENS = tuple(encode(f" {word}")[0] for word in dict.fromkeys(_WORDS))
_FULL_STOP = ord(".")
_FIRST_PARTS = tuple(SECOND_PARTS)
_BEYOND_ONE_IN = 3
_REMEMBERED_SEEDS = 1024
_STOPS_ONE_IN = 10
_ENDS_ONE_IN = 6

Context = int
"""The fold of all tokens so far."""

EMPTY: Context = 0


def extend(context: Context, token: int) -> Context:
    """Fold one more token in."""
    return (context * _BASE + token + 1) % _PRIME


def fold(tokens: Iterable[int], context: Context = EMPTY) -> Context:
    """Fold tokens in, in order."""
    for token in tokens:
        context = (context * _BASE + token + 1) % _PRIME
    return context


def next_token(
    context: Context, last: int | None, *, seed: int, may_end: bool, beyond_ascii: bool = False
) -> int:
    """Return the token that follows a context whose last token is `last`.

    `beyond_ascii` says whether the context has characters beyond ASCII.
    """
    if last in SECOND_PARTS:
        return SECOND_PARTS[last]
    draw = _mix(context ^ _mix_seed(seed))
    if last == _FULL_STOP and may_end and draw % _ENDS_ONE_IN == 0:
        return END_OF_SEQUENCE
    draw >>= 8
    if last in _WORD_SET and draw % _STOPS_ONE_IN == 0:
        return _FULL_STOP
    if beyond_ascii and (draw >> 32) % _BEYOND_ONE_IN == 0:
        return _FIRST_PARTS[(draw >> 8) % len(_FIRST_PARTS)]
    return _WORD_TOKENS[(draw >> 8) % len(_WORD_TOKENS)]


def candidates(context: Context, chosen: int, *, seed: int, count: int) -> list[tuple[int, float]]:
    """Return the chosen token and rivals with falling log-probabilities, best first."""
    ranked = [(chosen, -0.1)]
    draw = _mix(context ^ seed)
    while len(ranked) < count:
        draw = _mix(draw)
        token = _WORD_TOKENS[draw % len(_WORD_TOKENS)]
        if all(token != taken for taken, _ in ranked):
            ranked.append((token, -2.5 - 0.5 * len(ranked)))
    return ranked


def embed(tokens: Sequence[int], *, dimensions: int) -> list[float]:
    """Return a unit vector: the sum of a fixed pseudo-random vector per token.

    Texts that share words are close, and the order of the words does not matter.
    """
    total = [0.0] * dimensions
    for token in tokens:
        draw = _mix(token + 1)
        for position in range(dimensions):
            draw = (draw * 6364136223846793005 + 1442695040888963407) & _MASK
            total[position] += (draw >> 40) / (1 << 23) - 1.0
    norm = sum(value * value for value in total) ** 0.5 or 1.0
    return [value / norm for value in total]


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=_REMEMBERED_SEEDS)
def _mix_seed(seed: int) -> int:
    return _mix(seed)


_WORD_SET = frozenset(_WORD_TOKENS)
