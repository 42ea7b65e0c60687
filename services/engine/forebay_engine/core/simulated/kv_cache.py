"""KV-cache blocks as counts and names: who holds them, which are reusable, which goes next.

Invariant: held + private + idle <= total. A full block has a name, the fold of all tokens up to its
end, and may be held by several sequences. A block nobody holds stays idle, findable, until its room
is needed: least recently released first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from forebay_engine.core.simulated.language import Context

BLOCK_TOKENS = 16


class Listener(Protocol):
    """Hears of each block that becomes findable, and of each that no longer is."""

    def stored(self, block: Context, parent: Context | None) -> None:
        """A block can be found behind another one, or as the first."""

    def removed(self, block: Context) -> None:
        """A block cannot be found any more."""


class BlockPool:
    """The blocks of one engine."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a pool needs at least one block")
        self.total = total
        self._holders: dict[Context, int] = {}
        self._idle: OrderedDict[Context, None] = OrderedDict()
        self._private = 0
        self.listener: Listener | None = None

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return len(self._holders) + self._private

    def count_known(self, names: Sequence[Context]) -> int:
        """Count the leading blocks that are held or idle."""
        for count, name in enumerate(names):
            if name not in self._holders and name not in self._idle:
                return count
        return len(names)

    def hold(self, names: Sequence[Context]) -> None:
        """Hold known blocks."""
        for name in names:
            self._idle.pop(name, None)
            self._holders[name] = self._holders.get(name, 0) + 1

    def take(self, count: int) -> bool:
        """Take unnamed blocks for one sequence, or none at all when they do not fit."""
        if self.used + count > self.total:
            return False
        self._private += count
        while self.used + len(self._idle) > self.total:
            name, _ = self._idle.popitem(last=False)
            if self.listener is not None:
                self.listener.removed(name)
        return True

    def publish(self, name: Context, parent: Context | None = None) -> None:
        """Name a block that its sequence took and filled, and hold it by that name.

        A block of the same name that exists already is held instead, and the taken one is free.
        `parent` is the block before it in its sequence.
        """
        self._private -= 1
        if self.listener is not None and name not in self._holders and name not in self._idle:
            self.listener.stored(name, parent)
        self.hold((name,))

    def forget_idle(self) -> None:
        """Make every idle block unfindable."""
        if self.listener is not None:
            for name in self._idle:
                self.listener.removed(name)
        self._idle.clear()

    def release(self, names: Sequence[Context], *, private: int) -> None:
        """Give up a sequence's blocks. Prefixes live longest: its last block goes first."""
        self._private -= private
        for name in reversed(names):
            holders = self._holders[name] - 1
            if holders:
                self._holders[name] = holders
            else:
                del self._holders[name]
                self._idle[name] = None
