"""What an engine's cache covers of the prompts that ran, against a plain account of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from forebay_common.prefixes import LENGTHS, prefix_hashes, token_bytes
from forebay_engine.core.kv_events import KvEvents
from forebay_engine.core.prefix_cache import PrefixCache, Prompt, fold_block, fold_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 16


def a_cache(names_max: int = 10_000, blocks_max: int = 10_000) -> PrefixCache:
    return PrefixCache(names_max=names_max, blocks_max=blocks_max)


def some_tokens(count: int, *, start: int = 0) -> list[int]:
    return [(start * 7919 + index) % 50_000 for index in range(count)]


def a_prompt(tokens: Sequence[int], *, text: bytes | None = None) -> Prompt:
    """A prompt of token ids, or of a text that became these tokens."""
    written = token_bytes(tokens) if text is None else text
    blocks = fold_blocks(token_bytes(tokens), SIZE)
    return Prompt(prefix_hashes(written), len(written), len(tokens), blocks, SIZE)


def store(cache: PrefixCache, blocks: Sequence[int], *, first: int = 0) -> None:
    for index in range(first, len(blocks)):
        cache.stored(blocks[index], blocks[index - 1] if index else None)


class Told:
    """What somebody knows who was told every change."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._names: set[int] = set()

    def names(self) -> set[int]:
        stored, removed = self._cache.take_changes()
        assert not self._names & set(stored)
        assert set(removed) <= self._names
        assert len(set(stored)) == len(stored)
        self._names |= set(stored)
        self._names -= set(removed)
        return self._names


def test_the_names_of_a_cached_prompt_are_told_once() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    cache.note(prompt)
    assert cache.take_changes() == ([], [])
    store(cache, prompt.blocks)
    stored, removed = cache.take_changes()
    # Four bytes a token: 4096 bytes, of which each 256 have a name.
    assert set(stored) == set(prompt.names)
    assert len(stored) == 16
    assert not removed
    cache.note(prompt)
    store(cache, prompt.blocks)
    assert cache.take_changes() == ([], [])


def test_it_does_not_matter_whether_the_prompt_or_its_blocks_are_told_first() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    store(cache, prompt.blocks)
    cache.note(prompt)
    assert set(cache.take_changes()[0]) == set(prompt.names)


def test_a_name_ends_in_the_block_with_its_last_token() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    cache.note(prompt)
    told = Told(cache)
    for count, block in enumerate(prompt.blocks, start=1):
        cache.stored(block, prompt.blocks[count - 2] if count > 1 else None)
        # 64 tokens are 256 bytes and 4 blocks.
        assert len(told.names()) == count // 4


def test_without_a_block_in_between_nothing_behind_it_is_cached() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    cache.note(prompt)
    store(cache, prompt.blocks)
    told = Told(cache)
    assert len(told.names()) == 16
    cache.removed(prompt.blocks[20])
    assert told.names() == set(prompt.names[:5])
    cache.removed(prompt.blocks[60])
    cache.stored(prompt.blocks[20], prompt.blocks[19])
    assert told.names() == set(prompt.names[:15])


def test_what_changes_and_changes_back_is_not_told() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    cache.note(prompt)
    store(cache, prompt.blocks)
    cache.take_changes()
    cache.removed(prompt.blocks[0])
    store(cache, prompt.blocks)
    assert cache.take_changes() == ([], [])


def test_all_is_forgotten_at_once() -> None:
    cache, prompt = a_cache(), a_prompt(some_tokens(1024))
    cache.note(prompt)
    store(cache, prompt.blocks)
    told = Told(cache)
    assert told.names()
    cache.cleared()
    assert (told.names(), cache.blocks) == (set(), 0)
    store(cache, prompt.blocks)
    assert told.names() == set(prompt.names)


def test_the_answer_is_cached_behind_its_prompt_for_the_next_turn() -> None:
    cache = a_cache()
    first, turn = some_tokens(256), some_tokens(1024)
    cache.note(a_prompt(first))
    # The engine went on from the prompt's own blocks, with what it generated.
    store(cache, fold_blocks(token_bytes(turn), SIZE))
    told = Told(cache)
    assert len(told.names()) == 4
    cache.note(a_prompt(turn))
    assert told.names() == set(a_prompt(turn).names)


def test_prompts_that_begin_alike_share_names() -> None:
    cache = a_cache()
    system = some_tokens(512)
    one, other = (a_prompt([*system, *some_tokens(512, start=n)]) for n in (1, 2))
    for prompt in (one, other):
        cache.note(prompt)
        store(cache, prompt.blocks)
    told = Told(cache)
    assert told.names() == set(one.names) | set(other.names)
    assert one.names[:8] == other.names[:8]
    for block in reversed(one.blocks[32:]):
        cache.removed(block)
    assert told.names() == set(other.names)


def test_a_rest_with_other_characters_does_not_move_where_a_name_ends() -> None:
    cache = a_cache()
    # 2048 bytes in 512 tokens, then as many tokens of one byte each, which halve the estimate.
    system, rest = some_tokens(512), some_tokens(2048, start=3)
    short = a_prompt(system, text=b"s" * 2048)
    long = a_prompt([*system, *rest], text=b"s" * 2048 + b"r" * 2048)
    cache.note(short)
    cache.note(long)
    store(cache, short.blocks)
    told = Told(cache)
    assert told.names() == set(short.names)
    cache.note(long)
    assert told.names() == set(short.names)


def test_the_names_that_come_first_are_forgotten_first_and_long_before_short() -> None:
    cache = a_cache(names_max=24)
    prompts = [a_prompt(some_tokens(1024, start=n)) for n in range(2)]
    for prompt in prompts:
        cache.note(prompt)
        store(cache, prompt.blocks)
    told = Told(cache)
    assert told.names() == {*prompts[0].names[:8], *prompts[1].names}
    cache.note(prompts[0])
    assert told.names() == {*prompts[0].names, *prompts[1].names[:8]}
    assert cache.names == 24


def test_more_blocks_than_may_be_are_not_followed() -> None:
    cache, prompt = a_cache(blocks_max=10), a_prompt(some_tokens(1024))
    cache.note(prompt)
    store(cache, prompt.blocks)
    told = Told(cache)
    assert told.names() == set(prompt.names[:2])
    assert cache.blocks == 10
    for block in reversed(prompt.blocks):
        cache.removed(block)
    assert (told.names(), cache.blocks) == (set(), 0)


def test_a_prompt_shorter_than_its_first_name_has_none() -> None:
    cache = a_cache()
    cache.note(a_prompt(some_tokens(63)))
    assert cache.names == 0


@given(seed=st.integers(0, 1 << 32), names_max=st.sampled_from([20, 10_000]))
@settings(max_examples=150)
def test_what_is_told_is_what_a_look_from_the_beginning_finds(seed: int, names_max: int) -> None:
    rng = random.Random(seed)
    cache = a_cache(names_max=names_max)
    told = Told(cache)
    # Branches of one conversation, whose names are exact.
    trunk = some_tokens(192)
    prompts = [
        a_prompt([*trunk[: rng.randrange(0, 193)], *some_tokens(rng.randrange(0, 200), start=n)])
        for n in range(6)
    ]
    parents: dict[int, int | None] = {}
    for prompt in prompts:
        for index, block in enumerate(prompt.blocks):
            parents[block] = prompt.blocks[index - 1] if index else None
    cached: set[int] = set()
    noted: set[int] = set()

    def reaches(blocks: Iterable[int]) -> bool:
        return all(block in cached for block in blocks)

    for _ in range(60):
        prompt = rng.choice(prompts)
        action = rng.randrange(4)
        if action == 0:
            cache.note(prompt)
            noted |= set(prompt.names)
        elif action == 1 and prompt.blocks:
            # Engines cache a block only behind one that is cached.
            block = rng.choice(prompt.blocks)
            parent = parents[block]
            if parent is None or parent in cached:
                cache.stored(block, parent)
                cached.add(block)
        elif action == 2 and cached:
            block = rng.choice(sorted(cached))
            cache.removed(block)
            cached.discard(block)
        elif rng.randrange(20) == 0:
            cache.cleared()
            cached.clear()
        # 256 bytes are 64 tokens and 4 blocks.
        truth = {
            name
            for each in prompts
            for index, name in enumerate(each.names)
            if len(each.blocks) >= 4 * (index + 1) and reaches(each.blocks[: 4 * (index + 1)])
        }
        if names_max < 100:
            assert told.names() <= truth & noted
            assert cache.names <= names_max
        else:
            assert told.names() == truth & noted


def event(kind: str, **fields: object) -> dict[str, object]:
    return {"type": kind, **fields}


def stored(
    hashes: Sequence[bytes], tokens: Sequence[int], parent: bytes | None = None, **fields: object
) -> dict[str, object]:
    return event(
        "BlockStored",
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=list(tokens),
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(hashes),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        **fields,
    )


def removed(*hashes: bytes) -> dict[str, object]:
    return event("BlockRemoved", block_hashes=list(hashes), medium="GPU", group_idx=0)


class Published:
    """Messages as vLLM publishes them."""

    def __init__(self, cache: PrefixCache, *, blocks_max: int = 1000) -> None:
        self.events = KvEvents(cache, block_tokens=SIZE, blocks_max=blocks_max)
        self.number = 0

    def publish(self, *events: dict[str, object]) -> None:
        payload = msgspec.msgpack.encode([1.5, list(events), 0])
        self.events.take_in(self.number, payload)
        self.number += 1


def hashes(count: int, *, start: int = 0) -> list[bytes]:
    return [b"%032d" % (start + index) for index in range(count)]


def test_events_of_an_engine_are_followed() -> None:
    cache, tokens = a_cache(), some_tokens(256)
    told, vllm = Told(cache), Published(cache)
    prompt = a_prompt(tokens)
    cache.note(prompt)
    assert not vllm.events.follows
    names = hashes(16)
    vllm.publish(stored(names[:10], tokens[:160]))
    assert vllm.events.follows
    assert told.names() == set(prompt.names[:2])
    vllm.publish(stored(names[10:], tokens[160:], names[9]))
    assert told.names() == set(prompt.names)
    vllm.publish(removed(names[15]), removed(names[14]))
    assert told.names() == set(prompt.names[:3])
    vllm.publish(event("AllBlocksCleared"))
    assert told.names() == set()


def test_of_blocks_that_are_the_same_the_last_counts() -> None:
    cache, tokens = a_cache(), some_tokens(64)
    told, vllm = Told(cache), Published(cache)
    cache.note(a_prompt(tokens))
    twice = stored(hashes(4), tokens)
    vllm.publish(twice, twice)
    vllm.publish(*(removed(name) for name in reversed(hashes(4))))
    assert len(told.names()) == 1
    vllm.publish(removed(hashes(4)[0]))
    assert told.names() == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"block_size": SIZE * 2},
        {"extra_keys": [["a salt"], None, None, None]},
        {"extra_keys": [None, [["image", 3]], None, None]},
        {"token_ids": some_tokens(128)},
        {"parent_block_hash": b"unknown"},
    ],
)
def test_blocks_of_another_kind_are_no_prompts(fields: dict[str, object]) -> None:
    cache, tokens = a_cache(), some_tokens(64)
    vllm = Published(cache)
    cache.note(a_prompt(tokens))
    vllm.publish({**stored(hashes(4), tokens), **fields})
    assert cache.take_changes() == ([], [])


def test_layers_that_need_all_blocks_decide() -> None:
    cache, tokens = a_cache(), some_tokens(64)
    told, vllm = Told(cache), Published(cache)
    prompt = a_prompt(tokens)
    cache.note(prompt)
    window = {**stored(hashes(4), tokens), "kv_cache_spec_kind": "sliding_window"}
    vllm.publish(window)
    assert told.names() == set(prompt.names)
    vllm.publish({**stored(hashes(4), tokens), "group_idx": 1})
    assert told.names() == set(prompt.names)
    vllm.publish(removed(*hashes(4)), window)
    assert told.names() == set(prompt.names)
    vllm.publish({**removed(hashes(4)[0]), "group_idx": 1})
    assert told.names() == set()


def test_after_lost_messages_nothing_is_known() -> None:
    cache, tokens = a_cache(), some_tokens(64)
    told, vllm = Told(cache), Published(cache)
    cache.note(a_prompt(tokens))
    vllm.number = 5
    vllm.publish(stored(hashes(4), tokens))
    assert len(told.names()) == 1
    assert vllm.events.gaps == 0
    vllm.number += 1
    vllm.publish(stored(hashes(1, start=4), some_tokens(16, start=1), hashes(4)[3]))
    assert told.names() == set()
    assert vllm.events.gaps == 1


def test_only_so_many_blocks_are_followed() -> None:
    cache, tokens = a_cache(), some_tokens(256)
    told, vllm = Told(cache), Published(cache, blocks_max=8)
    cache.note(a_prompt(tokens))
    vllm.publish(stored(hashes(16), tokens))
    assert len(told.names()) == 2
    vllm.publish(removed(*hashes(16)))
    assert told.names() == set()
    vllm.publish(stored(hashes(16), tokens))
    assert len(told.names()) == 2


def test_events_of_another_shape_are_refused() -> None:
    vllm = Published(a_cache())
    with pytest.raises(msgspec.DecodeError):
        vllm.publish(event("BlockStored", block_hashes=3))
    with pytest.raises(msgspec.DecodeError):
        vllm.publish(event("BlockMoved"))


def test_hashes_may_be_numbers() -> None:
    cache, tokens = a_cache(), some_tokens(64)
    vllm = Published(cache)
    cache.note(a_prompt(tokens))
    vllm.publish({**stored([], tokens), "block_hashes": [1, 2, 3, 4], "extra_keys": None})
    assert len(cache.take_changes()[0]) == 1


def test_a_block_is_named_by_all_before_it() -> None:
    tokens = token_bytes(some_tokens(SIZE))
    first, second = fold_blocks(tokens * 2, SIZE)
    assert first == fold_block(None, tokens)
    assert second == fold_block(first, tokens) != first
    assert fold_blocks(tokens[:-4], SIZE) == []
    assert array("I").itemsize == 4


def test_lengths_are_those_that_the_tests_count_with() -> None:
    assert list(LENGTHS[:3]) == [256, 512, 768]
