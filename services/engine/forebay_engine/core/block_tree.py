"""The cached blocks of an engine as a tree, each behind the block before it in its prompts.

A block can be reached while it and all before it are cached; an engine finds no others. Blocks that
are not cached stay while others that are stand behind them.

Kept in arrays, by place: there may be hundreds of thousands, which as objects the garbage collector
would walk through while every stream waits.
"""

from array import array
from collections.abc import Callable

Block = int
"""A block by its content and all before it."""
_NONE = -1
_CACHED, _REACHABLE = 1, 2


class BlockTree:
    """The blocks of one engine."""

    def __init__(self, *, blocks_max: int, on_change: Callable[[Block, bool], None]) -> None:
        """Of more blocks than `blocks_max`, those that come last are not followed.

        `on_change` is called with each block that can be reached from now on, or no longer.
        """
        self._blocks_max = blocks_max
        self._on_change = on_change
        self._places: dict[Block, int] = {}
        self._free: list[int] = []
        self._blocks = array("Q")
        self._flags = bytearray()
        self._parents = array("i")
        # What stands behind one block is a list: its first, and of each the next and the previous.
        self._firsts = array("i")
        self._nexts = array("i")
        self._previous = array("i")

    def __len__(self) -> int:
        """Blocks that are kept."""
        return len(self._places)

    def reaches(self, block: Block) -> bool:
        """Whether a block and all before it are cached."""
        place = self._places.get(block)
        return place is not None and bool(self._flags[place] & _REACHABLE)

    def store(self, block: Block, parent: Block | None) -> None:
        """A block is cached behind another one, or as the first of a prompt.

        What stands behind a block that is not known is not known either.
        """
        place = self._places.get(block)
        if place is None:
            before = _NONE if parent is None else self._places.get(parent)
            if before is None or len(self._places) >= self._blocks_max:
                return
            place = self._add(block, before)
        if self._flags[place] & _CACHED:
            return
        self._flags[place] |= _CACHED
        before = self._parents[place]
        if before == _NONE or self._flags[before] & _REACHABLE:
            self._spread(place, reachable=True)

    def remove(self, block: Block) -> None:
        """A block is no longer cached."""
        place = self._places.get(block)
        if place is None or not self._flags[place] & _CACHED:
            return
        self._flags[place] &= ~_CACHED
        if self._flags[place] & _REACHABLE:
            self._spread(place, reachable=False)
        while place != _NONE and not self._flags[place] & _CACHED and self._firsts[place] == _NONE:
            place = self._drop(place)

    def clear(self) -> None:
        """No block is cached."""
        for block, place in self._places.items():
            if self._flags[place] & _REACHABLE:
                self._on_change(block, False)
        self._places.clear()
        self._free.clear()
        self._flags.clear()
        for column in (self._blocks, self._parents, self._firsts, self._nexts, self._previous):
            del column[:]

    def _add(self, block: Block, before: int) -> int:
        if self._free:
            place = self._free.pop()
            self._blocks[place] = block
            self._flags[place] = 0
            self._parents[place] = before
        else:
            place = len(self._blocks)
            self._blocks.append(block)
            self._flags.append(0)
            self._parents.append(before)
            self._firsts.append(_NONE)
            self._nexts.append(_NONE)
            self._previous.append(_NONE)
        self._places[block] = place
        if before != _NONE:
            first = self._firsts[before]
            self._nexts[place] = first
            if first != _NONE:
                self._previous[first] = place
            self._firsts[before] = place
        return place

    def _drop(self, place: int) -> int:
        """Forget a block that nothing stands behind; return the place of the one before it."""
        before, following = self._parents[place], self._nexts[place]
        previous = self._previous[place]
        if following != _NONE:
            self._previous[following] = previous
        if previous != _NONE:
            self._nexts[previous] = following
        elif before != _NONE:
            self._firsts[before] = following
        self._nexts[place] = self._previous[place] = _NONE
        del self._places[self._blocks[place]]
        self._free.append(place)
        return before

    def _spread(self, place: int, *, reachable: bool) -> None:
        """A block can be reached, or no longer; so can what is cached behind it."""
        flags, firsts, nexts = self._flags, self._firsts, self._nexts
        found = [place]
        while found:
            place = found.pop()
            if reachable:
                flags[place] |= _REACHABLE
            else:
                flags[place] &= ~_REACHABLE
            self._on_change(self._blocks[place], reachable)
            child = firsts[place]
            while child != _NONE:
                if flags[child] & _CACHED:
                    found.append(child)
                child = nexts[child]
