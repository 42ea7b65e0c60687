"""A reversible tokenizer that needs no vocabulary file.

A token is a byte, or one to four lower-case letters with or without the space before them. Ids are
computed, not looked up: bytes first, then letters by length, then the same letters with a space.
English comes to about 1.5 tokens a word, close to a trained tokenizer. Text that is cut at any
token boundary and encoded again gives the same tokens, as long as no word is split.

A few characters beyond ASCII are two tokens that each hold a part of their bytes, as in trained
byte-level vocabularies: whoever decodes token by token must not decode half a character.
"""

import functools
import re
from collections.abc import Iterable, Sequence

_ASCII = 128
_BYTES = 256
_ALPHABET = 26
_LONGEST = 4
_FIRST = ord("a")
# First id of each length, without a space: 1, 2, 3 and 4 letters.
_STARTS: tuple[int, ...] = tuple(
    _BYTES + sum(_ALPHABET**shorter for shorter in range(1, length))
    for length in range(1, _LONGEST + 1)
)
_LETTERS: int = sum(_ALPHABET**length for length in range(1, _LONGEST + 1))

END_OF_SEQUENCE: int = _BYTES + 2 * _LETTERS

SPLIT_CHARACTERS = ("é", "ñ", "水", "河", "你", "好", "🌊", "🦆")
_FIRST_PART = END_OF_SEQUENCE + 1
_PARTS: tuple[bytes, ...] = tuple(
    part
    for data in (character.encode() for character in SPLIT_CHARACTERS)
    for part in (data[: len(data) // 2], data[len(data) // 2 :])
)
_SPLIT: dict[str, tuple[int, int]] = {
    character: (_FIRST_PART + 2 * index, _FIRST_PART + 2 * index + 1)
    for index, character in enumerate(SPLIT_CHARACTERS)
}
SECOND_PARTS: dict[int, int] = dict(_SPLIT.values())
"""The token that completes a character, by the token that begins it."""

VOCABULARY_SIZE = _FIRST_PART + len(_PARTS)
_REMEMBERED = 1 << 14

_PIECES = re.compile(r" ?[a-z]{1,4}|[^a-z]", re.DOTALL)


def encode(text: str) -> list[int]:
    """Return the tokens of a text; `decode` gives the same bytes back."""
    return [token for piece in _PIECES.findall(text) for token in _piece_ids(piece)]


@functools.lru_cache(maxsize=_REMEMBERED)
def decode_token(token: int) -> bytes:
    """Return the bytes of one token; the end of a sequence has none."""
    if token < _BYTES:
        return bytes((token,))
    if token >= END_OF_SEQUENCE:
        return b"" if token == END_OF_SEQUENCE else _PARTS[token - _FIRST_PART]
    rest = token - _BYTES
    prefix = b""
    if rest >= _LETTERS:
        rest -= _LETTERS
        prefix = b" "
    length = 1
    while rest >= _ALPHABET**length:
        rest -= _ALPHABET**length
        length += 1
    letters = bytearray(length)
    for position in range(length - 1, -1, -1):
        rest, letter = divmod(rest, _ALPHABET)
        letters[position] = _FIRST + letter
    return prefix + bytes(letters)


def decode(tokens: Iterable[int]) -> str:
    """Return the text of some tokens; bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(decode_token, tokens)).decode("utf-8", "replace")


def is_beyond_ascii(tokens: Iterable[int]) -> bool:
    """Say whether a token holds a character beyond ASCII, or a part of one."""
    return any(_ASCII <= token < _BYTES or token >= _FIRST_PART for token in tokens)


def is_vocabulary(tokens: Sequence[int]) -> bool:
    """Say whether every id is one of the vocabulary's."""
    return all(0 <= token < VOCABULARY_SIZE for token in tokens)


@functools.lru_cache(maxsize=_REMEMBERED)
def _piece_ids(piece: str) -> tuple[int, ...]:
    if "a" <= piece[-1] <= "z":
        return (_letters_id(piece.lstrip(" "), spaced=piece[0] == " "),)
    return _SPLIT.get(piece) or tuple(piece.encode("utf-8", "surrogatepass"))


def _letters_id(letters: str, *, spaced: bool) -> int:
    value = 0
    for letter in letters:
        value = value * _ALPHABET + ord(letter) - _FIRST
    return _STARTS[len(letters) - 1] + value + (_LETTERS if spaced else 0)
