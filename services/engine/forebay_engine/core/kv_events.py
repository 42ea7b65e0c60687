"""vLLM's own events of its prefix cache, and what they mean for `PrefixCache`.

vLLM names blocks by a hash of its own and may hold several of the same content, each with events of
its own; so they are counted. Blocks that depend on more than tokens (an image, a salt) get names
that no prompt of tokens alone has. Layout: `vllm/distributed/kv_events.py`.
"""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from forebay_engine.core.block_tree import Block
from forebay_engine.core.prefix_cache import TOKEN_BYTES, PrefixCache, fold_block

BlockHash: TypeAlias = bytes | int
_DEVICE = (None, "GPU")
"""Where blocks are that the engine computes from; others it has to fetch first."""
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Layers that need all blocks of a prompt, and thus decide how much of it is cached."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks are cached, one behind the other."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks no longer are."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block is."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[KvEvent]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class KvEvents:
    """Takes in the events of one engine, into the cache of which they tell."""

    def __init__(self, cache: PrefixCache, *, block_tokens: int, blocks_max: int) -> None:
        """`block_tokens` is the engine's; more blocks than `blocks_max` are not followed."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._blocks: dict[BlockHash, Block] = {}
        self._more: dict[BlockHash, int] = {}
        """How many more there are of a block than one."""
        self._next = 0
        self._group: int | None = None
        """Of the layers that are followed: the first that need all blocks, or the first at all."""
        self._is_whole = False
        self.gaps = 0
        """Times that messages were lost, and all that was known with them."""

    @property
    def follows(self) -> bool:
        """Whether it has come to know of any block."""
        return self._group is not None

    def take_in(self, number: int, payload: bytes) -> None:
        """Take in a message.

        Args:
            number: grows by one with each; where it does not, messages were lost, and what is
                cached is no longer known.
            payload: the message.

        Raises:
            msgspec.DecodeError: this is not how vLLM writes its events.
        """
        if number != self._next:
            # Before the first message, nothing is known that could be wrong.
            self.gaps += bool(self._blocks)
            self.clear()
        self._next = number + 1
        for event in _decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """Nothing is cached."""
        self._blocks.clear()
        self._more.clear()
        self._cache.cleared()

    def _store(self, event: BlockStored) -> None:
        hashes, tokens = event.block_hashes, event.token_ids
        size = self._block_tokens
        if (
            event.medium not in _DEVICE
            or event.block_size != size
            # Layers that keep only some blocks leave the others out.
            or len(tokens) != len(hashes) * size
        ):
            return
        group = event.group_idx or 0
        is_whole = event.kv_cache_spec_kind in _WHOLE
        if self._group is None or (is_whole and not self._is_whole):
            self.clear()
            self._group, self._is_whole = group, is_whole
        if group != self._group:
            return
        parent: Block | None = None
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            if parent is None:
                return
        extras: Sequence[tuple[Any, ...] | None] = event.extra_keys or ()
        view = memoryview(array("I", tokens).tobytes())
        for index, hash_ in enumerate(hashes):
            known = self._blocks.get(hash_)
            if known is not None:
                self._more[hash_] = self._more.get(hash_, 0) + 1
                parent = known
                continue
            if len(self._blocks) >= self._blocks_max:
                return
            start = index * size * TOKEN_BYTES
            block = fold_block(parent, view[start : start + size * TOKEN_BYTES])
            extra = extras[index] if index < len(extras) else None
            if extra:
                block = fold_block(block, repr(extra).encode())
            self._blocks[hash_] = block
            self._cache.stored(block, parent)
            parent = block

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _DEVICE or (event.group_idx or 0) != self._group:
            return
        for hash_ in event.block_hashes:
            more = self._more.get(hash_)
            if more:
                if more == 1:
                    del self._more[hash_]
                else:
                    self._more[hash_] = more - 1
                continue
            block = self._blocks.pop(hash_, None)
            if block is not None:
                self._cache.removed(block)
