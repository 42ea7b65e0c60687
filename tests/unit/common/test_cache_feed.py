"""What is told of caches to those who watch, however slowly they read."""

from __future__ import annotations

import asyncio
import random

import pytest
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay_common import cache_feed
from forebay_common.cache_feed import CacheFeed, CacheService, CacheWatch
from forebay_common.errors import ForebayError, Reason

MODEL = "m@1"


def a_feed(names_max: int = 1 << 20) -> CacheFeed:
    feed = CacheFeed(names_max=names_max)
    feed.begin(MODEL)
    return feed


class Known:
    """What a watcher knows by what it was told."""

    def __init__(self, watch: CacheWatch) -> None:
        self._watch = watch
        self.models: dict[str, set[int]] = {}
        self.sources: dict[str, int] = {}
        self.resets = 0

    def read(self, messages: int = 1) -> set[int]:
        for _ in range(messages):
            for entry in self._watch.take():
                if entry.reset:
                    self.resets += 1
                    self.models[entry.model_version] = set()
                names = self.models[entry.model_version]
                assert not names & set(entry.stored)
                assert set(entry.removed) <= names
                names |= set(entry.stored)
                names -= set(entry.removed)
                self.sources[entry.model_version] = entry.source
        return self.models.get(MODEL, set())


def test_a_watcher_gets_all_there_is_and_then_what_changes() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=[1, 2, 3], removed=[])
    watch = feed.watch()
    (all_,) = watch.take()
    assert (all_.reset, list(all_.stored), list(all_.removed)) == (True, [1, 2, 3], [])
    assert all_.source == pb.CACHE_SOURCE_EVENTS
    feed.tell(MODEL, stored=[4], removed=[1])
    (change,) = watch.take()
    assert (change.reset, list(change.stored), list(change.removed)) == (False, [4], [1])
    assert watch.take() == []


def test_changes_that_undo_each_other_are_not_told() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=[1], removed=[])
    watch = feed.watch()
    watch.take()
    feed.tell(MODEL, stored=[2], removed=[1])
    feed.tell(MODEL, stored=[1], removed=[2])
    assert watch.take() == []


def test_what_is_known_already_is_no_change() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=[1], removed=[])
    watch = feed.watch()
    watch.take()
    feed.tell(MODEL, stored=[1], removed=[2])
    assert watch.take() == []


def test_a_model_that_ends_is_forgotten_and_begins_anew() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=[1], removed=[])
    known = Known(feed.watch())
    assert known.read() == {1}
    feed.end(MODEL)
    feed.end(MODEL)
    assert known.read() == set()
    assert known.sources[MODEL] == pb.CACHE_SOURCE_UNSPECIFIED
    assert Known(feed.watch()).read() == set()
    feed.begin(MODEL)
    feed.tell(MODEL, stored=[2], removed=[])
    assert known.read() == {2}
    assert known.sources[MODEL] == pb.CACHE_SOURCE_EVENTS


def test_a_watcher_that_lags_gets_all_there_is_anew() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=[1], removed=[])
    watch = feed.watch()
    known = Known(watch)
    known.read()
    for start in range(10, 100_000, 1000):
        # Each of these is there for a moment.
        feed.tell(MODEL, stored=range(start, start + 1000), removed=[])
        feed.tell(MODEL, stored=[], removed=range(start, start + 999))
        assert sum(map(len, watch._pending.values())) <= max(1024, feed.names(MODEL))
    last = set(range(1009, 100_010, 1000)) | {1}
    assert known.read(2) == last


def test_more_changes_than_names_are_told_as_all_there_is() -> None:
    feed = a_feed()
    feed.tell(MODEL, stored=range(5000), removed=[])
    known = Known(feed.watch())
    known.read()
    feed.tell(MODEL, stored=[], removed=range(4000))
    assert known.read() == set(range(4000, 5000))
    assert known.resets == 2


def test_only_so_many_names_are_kept_of_a_model() -> None:
    feed = a_feed(names_max=10)
    known = Known(feed.watch())
    feed.tell(MODEL, stored=range(20), removed=[])
    assert known.read() == set(range(10))
    feed.tell(MODEL, stored=[20], removed=[0, 15])
    assert known.read() == {*range(1, 10), 20}
    assert feed.names(MODEL) == 10


def test_much_is_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "_NAMES_PER_MESSAGE", 100)
    feed = a_feed()
    feed.begin("other@1")
    feed.tell(MODEL, stored=range(250), removed=[])
    feed.tell("other@1", stored=[7], removed=[])
    known = Known(feed.watch())
    assert len(known.read()) <= 100
    feed.tell(MODEL, stored=[250], removed=[0, 249])
    assert known.read(3) == set(range(1, 249)) | {250}
    assert known.models["other@1"] == {7}
    assert known.resets == 2


@pytest.mark.parametrize("seed", range(20))
def test_whoever_reads_at_any_time_knows_what_is_there(seed: int) -> None:
    rng = random.Random(seed)
    feed = a_feed()
    watches = [Known(feed.watch()) for _ in range(3)]
    truth: set[int] = set()
    for _ in range(300):
        stored = {rng.randrange(3000) for _ in range(rng.randrange(100))}
        removed = {rng.randrange(3000) for _ in range(rng.randrange(100))} - stored
        if rng.randrange(40) == 0:
            feed.begin(MODEL)
            truth = set()
        feed.tell(MODEL, stored=stored, removed=removed)
        truth = (truth | stored) - removed
        reader = rng.choice(watches)
        if rng.randrange(3) == 0:
            assert reader.read() == truth
    for reader in watches:
        assert reader.read() == truth


async def test_the_first_message_comes_at_once_and_none_is_empty_after_it() -> None:
    feed = CacheFeed(names_max=10)
    answers = CacheService(feed).WatchCache(pb.WatchCacheRequest(interval_ms=10), None)  # type: ignore[arg-type]
    first = await anext(answers)
    assert (first.revision, list(first.models)) == (1, [])
    following = asyncio.ensure_future(anext(answers))
    feed.begin(MODEL)
    feed.tell(MODEL, stored=[1], removed=[])
    second = await asyncio.wait_for(following, 10)
    assert second.revision == 2
    assert [list(entry.stored) for entry in second.models] == [[1]]
    assert feed.watches == 1
    await answers.aclose()
    assert feed.watches == 0


def test_only_so_many_may_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "_WATCHERS_MAX", 2)
    feed = a_feed()
    watch = feed.watch()
    feed.watch()
    with pytest.raises(ForebayError) as refused:
        feed.watch()
    assert refused.value.reason is Reason.QUEUE_FULL
    watch.close()
    feed.watch()
