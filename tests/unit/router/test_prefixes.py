"""Which replicas have which prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from forebay_router.core.prefixes import PrefixIndex, gap_behind, thin_out
from hypothesis import given
from hypothesis import strategies as st

MANY = 10**6


def holders(index: PrefixIndex, names: Sequence[int], most: int = 8) -> list[int]:
    return list(index.holders(names, most=most, draw=random.Random(0).randrange))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 12), max_size=6)),
        max_size=40,
    )
)
def test_the_index_agrees_with_sets(steps: list[tuple[bool, int, list[int]]]) -> None:
    index = PrefixIndex()
    model: dict[int, set[int]] = {n: set() for n in range(4)}
    for adds, replica, names in steps:
        if adds:
            index.add(replica, names, most=MANY)
            model[replica].update(names)
        else:
            index.remove(replica, names)
            model[replica].difference_update(names)
    assert len(index) == len(set().union(*model.values()))
    for replica, held in model.items():
        chain = sorted(held)
        assert index.held(replica) == len(chain)
        assert index.depth(replica, chain) == len(chain)
        assert not chain or replica in holders(index, chain)
    index.clear(0)
    assert index.depth(0, sorted(model[0])) == 0
    for replica in range(1, 4):
        index.clear(replica)
    assert len(index) == 0


def test_the_deepest_holders_come_first_and_then_those_of_half_as_much() -> None:
    index = PrefixIndex()
    names = list(range(100, 140))
    index.add(3, names[:40], most=MANY)
    index.add(900, names[:20], most=MANY)
    index.add(5, names[:4], most=MANY)
    assert holders(index, names) == [3, 900, 5]
    assert holders(index, names, most=1) == [3]
    assert holders(index, [*names[:20], 7, 8]) != []
    assert holders(index, [1, 2, 3]) == []


def test_of_many_that_have_as_much_others_come_each_time() -> None:
    index = PrefixIndex()
    for replica in range(500):
        index.add(replica, [1, 2, 3], most=MANY)
    draw = random.Random(1)
    seen = {n for _ in range(100) for n in index.holders([1, 2, 3], most=4, draw=draw.randrange)}
    assert len(seen) > 200


def test_of_too_many_those_go_that_came_first_the_longest_before_the_shorter() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2, 3], most=5)
    index.add(0, [1, 7, 8, 9], most=5)
    assert index.held(0) == 5
    assert index.depth(0, [1, 7, 8, 9]) == 4
    assert index.depth(0, [1, 2, 3]) == 2


def test_what_was_added_before_a_time_does_not_count() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2, 3], most=MANY, at_s=10.0)
    index.add(0, [1, 2], most=MANY, at_s=20.0)
    assert index.depth(0, [1, 2, 3], since_s=9.0) == 3
    assert index.depth(0, [1, 2, 3], since_s=15.0) == 2
    assert index.depth(0, [1, 2, 3], since_s=25.0) == 0


@given(st.integers(0, 700), st.integers(0, 700))
def test_thinned_out_names_reach_at_most_an_eighth_less(length: int, shared: int) -> None:
    shared = min(length, shared)
    names = list(range(length))
    other = [*range(shared), *range(10_000, 10_000 + length - shared)]
    index = PrefixIndex()
    index.add(0, thin_out(other), most=MANY)
    found, end = gap_behind(index.depth(0, thin_out(names)))
    assert found <= shared <= max(end, length)
    assert found >= shared - 1 - shared / 8


def test_the_last_of_some_names_is_found_whichever_others_are_there() -> None:
    index = PrefixIndex()
    index.add(0, [7], most=MANY, at_s=5.0)
    assert index.last(0, [5, 6, 7, 8], since_s=5.0) == 3
    assert index.last(0, [5, 6, 7, 8], since_s=6.0) == 0
    assert index.last(1, [7], since_s=0.0) == 0
