"""Which names of prompts an engine's prefix cache covers: engines know tokens, routers know text.

A prompt's names end at fixed numbers of its bytes (`forebay_common.prefixes`), an engine's blocks
at fixed numbers of its tokens. Between the two stands an estimate: a name ends after as large a
share of the prompt's tokens as it is of its bytes, which is exact for prompts of token ids. The
block in which it ends covers the name. Where characters per token and what a template adds are
spread evenly, the error is below a block; else it is the difference that they make up to the name's
end. The shortest prompt that had a name decides, since the name is most of it.

A name is told as cached exactly while its block and all blocks before it are: an engine looks a
prompt up from its beginning. Names and blocks are bounded, and what is forgotten of what was told
is told as removed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import xxhash
from forebay_common.prefixes import LENGTHS

from forebay_engine.core.block_tree import Block, BlockTree

TOKEN_BYTES = 4


def fold_block(parent: Block | None, content: bytes | memoryview) -> Block:
    """Name a block by what is in it and the block before it; None for a prompt's first."""
    return xxhash.xxh3_64_intdigest(content, 0 if parent is None else parent)


def fold_blocks(tokens: bytes, block_tokens: int) -> list[Block]:
    """Name a prompt's full blocks, by its token ids of `TOKEN_BYTES` each."""
    view = memoryview(tokens)
    size = block_tokens * TOKEN_BYTES
    blocks: list[Block] = []
    block: Block | None = None
    for end in range(size, len(tokens) + 1, size):
        block = fold_block(block, view[end - size : end])
        blocks.append(block)
    return blocks


class Prompt(NamedTuple):
    """A prompt that an engine was given."""

    names: Sequence[int]
    """Of its prefixes, shortest first, as `forebay_common.prefixes` makes them."""
    size_bytes: int
    tokens: int
    blocks: Sequence[Block]
    """Its full blocks, first to last."""
    block_tokens: int


class PrefixCache:
    """One engine's cache."""

    def __init__(self, *, names_max: int, blocks_max: int) -> None:
        """Of more names than `names_max`, those whose prompts came first are forgotten, longest
        first; of more blocks than `blocks_max`, those that are stored last are not followed."""
        self._names_max = names_max
        self._tree = BlockTree(blocks_max=blocks_max, on_change=self._on_change)
        # Exact tuples of numbers, here and below: the garbage collector leaves them out.
        self._ends: dict[int, tuple[Block, int, int]] = {}
        """Where each name ends: its block, which one of its prompt that is, and the size of the
        prompt that says so. The one that is to be forgotten first stands first."""
        self._ending: dict[Block, tuple[int, ...]] = {}
        """The names that end in a block."""
        self._changes: dict[int, bool] = {}
        """Whether it is cached now, of each name for which that is not as it was told."""

    @property
    def names(self) -> int:
        """Names that are known, cached or not."""
        return len(self._ends)

    @property
    def blocks(self) -> int:
        """Blocks that are followed."""
        return len(self._tree)

    def note(self, prompt: Prompt) -> None:
        """A prompt has these names."""
        blocks, size_bytes = prompt.blocks, prompt.size_bytes
        ends = self._ends
        bytes_per_block = size_bytes * prompt.block_tokens
        found: list[tuple[int, tuple[Block, int, int]]] = []
        for name, length in zip(prompt.names, LENGTHS, strict=False):
            end = ends.get(name)
            if (
                end is None
                or end[2] > size_bytes
                or end[1] >= len(blocks)
                or blocks[end[1]] != end[0]
            ):
                # Rounded up: the block that holds the name's last token.
                index = -(-length * prompt.tokens // bytes_per_block) - 1
                if index >= len(blocks):
                    break
                end = (blocks[index], index, size_bytes)
            found.append((name, end))
        # The shortest comes last, so that it is forgotten last: longer ones are of no use without.
        for name, end in reversed(found):
            known = ends.pop(name, None)
            ends[name] = end
            if known is None or known[0] != end[0]:
                if known is not None:
                    self._detach(name, known[0])
                self._attach(name, end[0])
        while len(ends) > self._names_max:
            name = next(iter(ends))
            self._detach(name, ends.pop(name)[0])

    def stored(self, block: Block, parent: Block | None) -> None:
        """The engine has cached a block behind another one, or as the first of a prompt."""
        self._tree.store(block, parent)

    def removed(self, block: Block) -> None:
        """The engine has evicted a block."""
        self._tree.remove(block)

    def cleared(self) -> None:
        """The engine has evicted everything, or it is no longer known what it has."""
        self._tree.clear()

    def take_changes(self) -> tuple[list[int], list[int]]:
        """The names that are cached now, and those that no longer are, since this was asked last.

        No name is in both.
        """
        changes, self._changes = self._changes, {}
        stored = [name for name, cached in changes.items() if cached]
        removed = [name for name, cached in changes.items() if not cached]
        return stored, removed

    def _attach(self, name: int, block: Block) -> None:
        self._ending[block] = (*self._ending.get(block, ()), name)
        if self._tree.reaches(block):
            self._change(name, cached=True)

    def _detach(self, name: int, block: Block) -> None:
        left = tuple(each for each in self._ending[block] if each != name)
        if left:
            self._ending[block] = left
        else:
            del self._ending[block]
        if self._tree.reaches(block):
            self._change(name, cached=False)

    def _on_change(self, block: Block, reachable: bool) -> None:
        for name in self._ending.get(block, ()):
            self._change(name, cached=reachable)

    def _change(self, name: int, *, cached: bool) -> None:
        # What changed back is as it was told.
        if self._changes.get(name, cached) is not cached:
            del self._changes[name]
        else:
            self._changes[name] = cached
