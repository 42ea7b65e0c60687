"""Messages come out whole and in order, wherever they are cut, and nothing outgrows its limit."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib

import pytest
from forebay_wire.core.messages import (
    Boundary,
    CorruptError,
    Message,
    MessageReader,
    TooLargeError,
    UnsupportedError,
    decompress,
    frame,
    prefix,
)
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 64

messages = st.lists(st.tuples(st.booleans(), st.binary(max_size=LIMIT)), max_size=8)
cuts = st.lists(st.integers(0, 600), max_size=12)


def joined(items: list[Message]) -> bytes:
    return b"".join(frame(message, compressed=compressed) for compressed, message in items)


def slices(payload: bytes, at: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(min(cut, len(payload)) for cut in at), len(payload)]
    return list(itertools.pairwise(edges))


def squeeze(message: bytes, encoding: str) -> bytes:
    match encoding:
        case "gzip":
            return gzip.compress(message)
        case "deflate":
            return zlib.compress(message)
        case _:
            return message


def read(reader: MessageReader, payload: bytes) -> list[Message]:
    return reader.feed(payload, 0, len(payload))


@given(messages, cuts)
def test_messages_cut_anywhere_come_out_whole_and_in_order(
    items: list[Message], at: list[int]
) -> None:
    payload = joined(items)
    reader = MessageReader(LIMIT)
    got: list[Message] = []
    for start, end in slices(payload, at):
        got += reader.feed(payload, start, end)
        assert reader.buffered <= LIMIT + 5
    assert got == items
    assert reader.at_boundary


@given(messages, cuts, st.integers(0, 600))
def test_a_boundary_agrees_with_a_reader_at_every_cut(
    items: list[Message], at: list[int], stop: int
) -> None:
    payload = joined(items)[:stop]
    reader, boundary = MessageReader(LIMIT), Boundary()
    for start, end in slices(payload, at):
        assert boundary.advance(payload, start, end) == len(reader.feed(payload, start, end))
        assert boundary.at_boundary == reader.at_boundary
    assert boundary.messages == len(items) or len(payload) < len(joined(items))


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_arbitrary_octets_raise_nothing_else(parts: list[bytes]) -> None:
    reader, boundary = MessageReader(LIMIT), Boundary()
    for part in parts:
        boundary.advance(part, 0, len(part))
        try:
            read(reader, part)
        except TooLargeError:
            skip(reader)
        except CorruptError:
            break
        assert reader.buffered <= LIMIT + 5


def skip(reader: MessageReader) -> None:
    while True:
        try:
            reader.skip()
        except TooLargeError:
            continue
        except CorruptError:
            pass
        return


@given(messages, messages, st.integers(LIMIT + 1, 200), cuts)
def test_a_message_over_the_limit_is_refused_by_its_prefix_and_skipped(
    before: list[Message], after: list[Message], size: int, at: list[int]
) -> None:
    payload = joined([*before, (False, bytes(size)), *after])
    refused_at = len(joined(before)) + 5
    reader = MessageReader(LIMIT)
    got: list[Message] = []
    refusals = 0
    for start, end in slices(payload, at):
        try:
            got += reader.feed(payload, start, end)
        except TooLargeError as error:
            assert start < refused_at <= end
            refusals += 1
            got += error.before
            assert not reader.at_boundary
            got += reader.skip()
        else:
            assert refusals or end < refused_at
    assert refusals == 1
    assert got == before + after
    assert reader.at_boundary


def test_a_refused_reader_keeps_refusing_until_told_to_skip() -> None:
    reader = MessageReader(LIMIT)
    with pytest.raises(TooLargeError) as first:
        read(reader, frame(b"one") + prefix(LIMIT + 1))
    assert first.value.before == [(False, b"one")]
    with pytest.raises(TooLargeError) as second:
        read(reader, b"")
    assert second.value.before == []
    assert reader.skip() == []
    assert read(reader, bytes(LIMIT + 1) + frame(b"next")) == [(False, b"next")]


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_flag_that_is_neither_0_nor_1_ends_the_reader(cut: int) -> None:
    payload = b"\x02\0\0\0\x01x"
    reader = MessageReader(LIMIT)
    with pytest.raises(CorruptError):
        for start, end in ((0, cut), (cut, 6)):
            reader.feed(payload, start, end)
    with pytest.raises(CorruptError):
        read(reader, frame(b"good"))


def test_messages_ahead_of_a_fault_are_not_lost() -> None:
    with pytest.raises(CorruptError) as caught:
        read(MessageReader(LIMIT), frame(b"one") + frame(b"two", compressed=True) + b"\xff" * 5)
    assert caught.value.before == [(False, b"one"), (True, b"two")]


def test_a_large_message_in_single_octets_costs_no_more_than_itself() -> None:
    size = 200_000
    payload = frame(bytes(size))
    reader = MessageReader(size)
    tracemalloc.start()
    for at in range(len(payload) - 1):
        reader.feed(payload, at, at + 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5 * size


def test_an_announced_length_reserves_nothing() -> None:
    reader = MessageReader(1 << 30)
    tracemalloc.start()
    read(reader, prefix(1 << 30))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10_000


@given(st.binary(max_size=2000), st.sampled_from(["gzip", "deflate", "identity", ""]))
def test_what_was_compressed_comes_back(message: bytes, encoding: str) -> None:
    squeezed = squeeze(message, encoding)
    assert decompress(squeezed, encoding, len(message)) == message
    if message:
        with pytest.raises(TooLargeError):
            decompress(squeezed, encoding, len(message) - 1)


@given(st.binary(max_size=100), st.sampled_from(["gzip", "deflate"]))
def test_octets_that_are_not_compressed_are_corrupt(message: bytes, encoding: str) -> None:
    with pytest.raises((CorruptError, TooLargeError)):
        decompress(b"\x01" + message, encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_cut_or_continued_stream_is_corrupt(encoding: str) -> None:
    squeezed = squeeze(b"a message", encoding)
    for message in (squeezed[:-1], squeezed + b"x", b""):
        with pytest.raises(CorruptError):
            decompress(message, encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_decompression_bomb_is_bounded(encoding: str) -> None:
    bomb = squeeze(bytes(32 << 20), encoding)
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        decompress(bomb, encoding, 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_an_unknown_encoding_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        decompress(b"", "br", LIMIT)
