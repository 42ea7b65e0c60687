"""Which replicas have which prefixes of prompts cached, by the names of `forebay_common.prefixes`.

Replicas are small numbers here, and the holders of a prefix the bits of one integer: whether any
of 1,000 replicas has a prefix is one look-up. Who has a prefix has the shorter ones, too, so the
deepest that anybody has is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

_ALL_UP_TO = 16
_GROWS_BY = 8


def _thinned(most: int) -> tuple[int, ...]:
    found: list[int] = []
    place = 0
    while place < most:
        found.append(place)
        place += 1 if place < _ALL_UP_TO else place // _GROWS_BY
    return tuple(found)


_PLACES = _thinned(1000)


def thin_out(names: Sequence[int]) -> Sequence[int]:
    """Some of a prompt's prefixes: all of the first, then ever fewer."""
    if len(names) <= _ALL_UP_TO:
        return names
    most = len(names)
    return [names[place] for place in _PLACES if place < most]


def gap_behind(thinned: int) -> tuple[int, int]:
    """Places of the prefixes that were left out behind so many that were not."""
    return (_PLACES[thinned - 1] + 1 if thinned else 0), _PLACES[thinned]


class PrefixIndex:
    """The prefixes of one model version."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._held: dict[int, dict[int, float]] = {}
        """Of each replica, when a name was last added: the one that is to go first stands first."""

    def __len__(self) -> int:
        """Names that anybody has."""
        return len(self._holders)

    def held(self, replica: int) -> int:
        """How many names are kept of a replica."""
        return len(self._held.get(replica, ()))

    def add(self, replica: int, names: Sequence[int], *, most: int, at_s: float = inf) -> None:
        """A replica has these, shortest first; of more than `most`, those added first go."""
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = {}
        holders = self._holders
        bit = 1 << replica
        # The shortest comes last, so that it goes last: without it, nothing longer is of use.
        for name in reversed(names):
            if held.pop(name, None) is None:
                others = holders.get(name)
                # Most have one holder, and all names that come together share its number.
                holders[name] = bit if others is None else others | bit
            held[name] = at_s
        while len(held) > most:
            name = next(iter(held))
            del held[name]
            self._forget(replica, name)

    def remove(self, replica: int, names: Iterable[int]) -> None:
        """A replica has these no longer."""
        held = self._held.get(replica)
        if held is not None:
            for name in names:
                if held.pop(name, None) is not None:
                    self._forget(replica, name)

    def clear(self, replica: int) -> None:
        """A replica has nothing any more."""
        for name in self._held.pop(replica, ()):
            self._forget(replica, name)

    def depth(self, replica: int, names: Sequence[int], *, since_s: float = 0.0) -> int:
        """How many of a prompt's prefixes a replica has, of those added since a time."""
        held = self._held.get(replica)
        if not held:
            return 0
        get = held.get
        if not names or get(names[0], -inf) < since_s:
            return 0
        low, high = 1, len(names)
        while low < high:
            middle = (low + high) // 2
            if get(names[middle], -inf) >= since_s:
                low = middle + 1
            else:
                high = middle
        return low

    def last(self, replica: int, names: Sequence[int], *, since_s: float) -> int:
        """The place, from 1 on, of the last of some names that a replica has, whichever of the
        others it has; 0 for none."""
        held = self._held.get(replica, {})
        for place in range(len(names), 0, -1):
            if held.get(names[place - 1], -inf) >= since_s:
                return place
        return 0

    def holders(
        self, names: Sequence[int], *, most: int, draw: Callable[[int], int]
    ) -> Sequence[int]:
        """Replicas that have the most of a prompt's prefixes, at most `most`, deepest first.

        Args:
            names: the prompt's prefixes, shortest first.
            most: how many are enough.
            draw: a number below another: of many that have as much, others come each time.
        """
        holders = self._holders
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in holders:
                low = middle + 1
            else:
                high = middle
        found: list[int] = []
        seen = 0
        depth = low
        # Who has half as much may still be worth more than who has nothing and is idle.
        while depth and len(found) < most:
            bits = holders.get(names[depth - 1], 0) & ~seen
            seen |= bits
            if bits:
                start = draw(bits.bit_length())
                upper = bits >> start << start
                _take(upper, found, most)
                _take(bits ^ upper, found, most)
            depth //= 2
        return found

    def _forget(self, replica: int, name: int) -> None:
        left = self._holders[name] & ~(1 << replica)
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]


def _take(bits: int, found: list[int], most: int) -> None:
    while bits and len(found) < most:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
