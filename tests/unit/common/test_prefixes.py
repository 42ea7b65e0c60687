from __future__ import annotations

from forebay_common.prefixes import LENGTHS, chat_bytes, prefix_hashes, text_bytes, token_bytes
from hypothesis import given
from hypothesis import strategies as st

_LONG = bytes(range(256)) * 1024


def test_a_short_prompt_has_no_names() -> None:
    assert prefix_hashes(b"x" * (LENGTHS[0] - 1)) == []
    assert len(prefix_hashes(b"x" * LENGTHS[0])) == 1


def test_names_grow_with_the_prompt_and_are_bounded() -> None:
    assert len(prefix_hashes(b"x" * (4 << 20))) == len(LENGTHS)
    assert prefix_hashes(_LONG)[:10] == prefix_hashes(_LONG[: LENGTHS[9]])


@given(shared=st.integers(0, 40_000), salt=st.binary(min_size=1, max_size=8))
def test_two_prompts_share_names_exactly_as_far_as_text(shared: int, salt: bytes) -> None:
    one = _LONG[:shared] + b"\x00" + salt * 4096
    other = _LONG[:shared] + b"\x01" + salt * 4096
    common = sum(a == b for a, b in zip(prefix_hashes(one), prefix_hashes(other), strict=True))
    assert common == sum(length <= shared for length in LENGTHS)


def test_a_longer_conversation_begins_as_the_shorter_one() -> None:
    turns = [("system", ["s" * 700]), ("user", ["u" * 300]), ("assistant", ["a" * 900])]
    assert chat_bytes(turns).startswith(chat_bytes(turns[:2]))
    assert not chat_bytes(turns, tools=b"[]").startswith(chat_bytes(turns[:1]))


def test_texts_and_tokens_are_written_out() -> None:
    assert text_bytes("é\ud800") == b"\xc3\xa9\xed\xa0\x80"
    assert token_bytes([1, 2]) == b"\x01\0\0\0\x02\0\0\0"
