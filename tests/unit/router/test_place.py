"""Which replica a request goes to."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from forebay_common.prefixes import LENGTHS, prefix_hashes
from forebay_router.core.place import (
    Ask,
    Exclusion,
    Exclusions,
    ModelLoad,
    Options,
    Placement,
    Placer,
    Replica,
    Ticket,
)
from hypothesis import given
from hypothesis import strategies as st

MODEL = "chat@v1"
WARM = 1000.0
"""Long after every replica joined."""


def a_replica(
    replica_id: str = "r1",
    *,
    takes_traffic: bool = True,
    draining: bool = False,
    pool: str = "",
    models: Mapping[str, ModelLoad] | None = None,
    **load: int,
) -> Replica:
    loads = {MODEL: ModelLoad(active=True, **{"slots": 4, **load})} if models is None else models
    return Replica(replica_id, f"{replica_id}:1", takes_traffic, draining, loads, pool)


def a_placer(*replicas: Replica, **options: object) -> Placer:
    placer = Placer(Options(**{"explore_share": 0.0, **options}))  # type: ignore[arg-type]
    for replica in replicas:
        placer.update(replica, 0.0)
    return placer


def an_ask(prompt: bytes = b"", tokens: int = 100, priority_class: str = "") -> Ask:
    return Ask(MODEL, tokens, lambda: prompt, priority_class)


def chosen(placement: Placement) -> str | None:
    return placement.chosen.replica_id if placement.chosen is not None else None


def send(placer: Placer, now: float = WARM, ask: Ask | None = None, seed: int = 0) -> Ticket:
    ask = ask or an_ask()
    return placer.begin(ask, placer.choose(ask, now, random.Random(seed)), now)


@pytest.mark.parametrize(
    ("replica", "exclusions", "exclusion"),
    [
        (a_replica(), {}, None),
        (a_replica(models={MODEL: ModelLoad(active=False)}), {}, Exclusion.MODEL_NOT_ACTIVE),
        (a_replica(takes_traffic=False), {}, Exclusion.STANDBY),
        (a_replica(draining=True), {}, Exclusion.DRAINING),
        (a_replica(pool="batch"), {}, Exclusion.WRONG_CLASS),
        (a_replica(), {"down": {"r1"}}, Exclusion.DOWN),
        (a_replica(), {"tried": {"r1"}}, Exclusion.TRIED),
        (a_replica(), {"ejected": {"r1"}}, Exclusion.EJECTED),
        (a_replica(), {"occupied": {"r1"}}, Exclusion.SUSPECT),
    ],
)
def test_the_filters(
    replica: Replica, exclusions: dict[str, set[str]], exclusion: Exclusion | None
) -> None:
    placer = a_placer(replica, pool_classes={"batch": frozenset({"BATCH"})})
    placement = placer.choose(
        an_ask(priority_class="REALTIME"), WARM, random.Random(0), Exclusions(**exclusions)
    )
    [candidate] = placement.candidates
    assert candidate.excluded is exclusion
    assert chosen(placement) == ("r1" if exclusion is None else None)


def test_nothing_is_chosen_of_what_nobody_has() -> None:
    placement = a_placer(a_replica(models={})).choose(an_ask(), WARM, random.Random(0))
    assert chosen(placement) is None


def test_the_idlest_is_chosen() -> None:
    placer = a_placer(
        a_replica("a", in_flight=4, queued=2), a_replica("b", in_flight=1), a_replica("c", queued=9)
    )
    assert chosen(placer.choose(an_ask(), WARM, random.Random(0))) == "b"


def test_equals_draw() -> None:
    placer = a_placer(*(a_replica(name) for name in "abcd"))
    draw = random.Random(5)
    counts = Counter(chosen(placer.choose(an_ask(), WARM, draw)) for _ in range(400))
    assert set(counts) == set("abcd")
    assert min(counts.values()) > 60


def test_a_burst_between_two_reports_is_spread() -> None:
    placer = a_placer(*(a_replica(name, slots=16) for name in "abcd"))
    counts = Counter(send(placer, seed=seed).site.replica.replica_id for seed in range(40))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_report_holds_what_was_sent_before_it() -> None:
    placer = a_placer(a_replica("a"), a_replica("b", in_flight=1, waiting_tokens=100))
    send(placer)
    placer.update(a_replica("a", in_flight=1, waiting_tokens=100), WARM)
    placement = placer.choose(an_ask(), WARM, random.Random(0))
    costs = {one.replica_id: one.queue_ms for one in placement.candidates}
    assert costs["a"] == costs["b"]
    assert placer.in_flight("a") == 1


def test_who_has_the_prefix_is_chosen_until_its_queue_is_longer() -> None:
    prompt = bytes(range(256)) * 64
    placer = a_placer(*(a_replica(name, slots=4) for name in "abcd"))
    placer.cached("c", MODEL, stored=prefix_hashes(prompt), removed=(), reset=True)
    ask = an_ask(prompt, tokens=4000)
    placement = placer.choose(ask, WARM, random.Random(0))
    assert chosen(placement) == "c"
    assert placement.cached_tokens == 4000
    names = [
        send(placer, ask=an_ask(prompt, tokens=4000), seed=n).site.replica.replica_id
        for n in range(12)
    ]
    assert Counter(names)["c"] >= 4
    assert len(set(names)) > 1


def test_what_is_evicted_is_not_counted_on() -> None:
    prompt = bytes(range(256)) * 64
    names = prefix_hashes(prompt)
    placer = a_placer(a_replica("a"), a_replica("b"))
    placer.cached("a", MODEL, stored=names, removed=(), reset=True)
    placer.cached("a", MODEL, stored=(), removed=names[8:], reset=False)
    placement = placer.choose(an_ask(prompt, tokens=4096), WARM, random.Random(0))
    assert placement.cached_tokens == 4096 * LENGTHS[7] // len(prompt)
    placer.cached("a", MODEL, stored=(), removed=(), reset=True)
    assert placer.choose(an_ask(prompt), WARM, random.Random(0)).cached_tokens == 0


def test_what_was_routed_counts_where_no_engine_tells() -> None:
    prompt = bytes(range(256)) * 64
    placer = a_placer(a_replica("a"), a_replica("b"))
    ticket = send(placer, ask=an_ask(prompt, tokens=4096))
    placer.first(ticket, WARM + 0.1)
    placer.end(ticket, WARM + 1, succeeded=True)
    placement = placer.choose(an_ask(prompt, tokens=4096), WARM + 2, random.Random(1))
    assert chosen(placement) == ticket.site.replica.replica_id
    assert placement.cached_tokens == 4096


def test_a_replica_that_just_joined_comes_slowly() -> None:
    placer = a_placer(a_replica("old", slots=20, in_flight=4))
    placer.update(a_replica("new", slots=20), WARM)
    counts = Counter(send(placer, WARM + 0.5, seed=n).site.replica.replica_id for n in range(12))
    assert counts["new"] <= 6
    assert chosen(placer.choose(an_ask(), WARM + 60, random.Random(0))) == "new"


def test_a_silent_replica_is_late_and_loses_its_place() -> None:
    placer = a_placer(a_replica("a"), a_replica("b"))
    ticket = send(placer)
    stuck = ticket.site.replica.replica_id
    later = placer.choose(an_ask(), WARM + 5, random.Random(0))
    assert chosen(later) != stuck
    costs = {one.replica_id: one.other_ms for one in later.candidates}
    assert costs[stuck] > 4000
    placer.first(ticket, WARM + 5.1)
    placer.end(ticket, WARM + 5.2, succeeded=True)
    recovered = placer.choose(an_ask(), WARM + 600, random.Random(0))
    assert {one.cost for one in recovered.candidates} == {recovered.candidates[0].cost} or (
        max(one.cost or 0 for one in recovered.candidates)
        < 2 * min(one.cost or 0 for one in recovered.candidates)
    )


def test_a_replica_that_left_is_forgotten_and_its_requests_still_end() -> None:
    placer = a_placer(a_replica("a"), a_replica("b"))
    ticket = send(placer)
    gone = ticket.site.replica.replica_id
    placer.remove(gone)
    assert placer.in_flight(gone) == 0
    placer.first(ticket, WARM)
    placer.end(ticket, WARM, succeeded=True)
    placer.end(ticket, WARM, succeeded=True)
    placer.update(a_replica(gone), WARM)
    assert placer.in_flight(gone) == 0


def test_a_runner_that_is_another_one_has_nothing_cached() -> None:
    prompt = bytes(range(256)) * 64
    placer = a_placer(a_replica("a"), a_replica("b"))
    ticket = send(placer, ask=an_ask(prompt))
    placer.end(ticket, WARM, succeeded=True)
    name = ticket.site.replica.replica_id
    assert placer.choose(an_ask(prompt), WARM, random.Random(0)).cached_tokens == 100
    placer.update(a_replica(name, models={MODEL: ModelLoad(active=False)}), WARM)
    placer.update(a_replica(name), WARM)
    assert placer.choose(an_ask(prompt), WARM + 60, random.Random(0)).cached_tokens == 0


def simulate(
    speeds: Mapping[str, float], *, rate: float, seconds: float, slots: int = 8
) -> tuple[Counter[str], list[float]]:
    """Requests at a steady rate on replicas of these speeds; where they went in the second half,
    and their seconds to the first token."""
    placer = a_placer(*(a_replica(name, slots=slots) for name in speeds), explore_share=0.005)
    draw = random.Random(3)
    went: Counter[str] = Counter()
    took: list[float] = []
    events: list[tuple[float, int, Callable[[float], None]]] = []
    number = 0

    def push(at: float, what: Callable[[float], None]) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, what))

    def arrive(now: float) -> None:
        ask = an_ask(tokens=200)
        ticket = placer.begin(ask, placer.choose(ask, now, draw), now)
        name = ticket.site.replica.replica_id
        first_s = 0.05 * speeds[name]
        if now > WARM + seconds / 2:
            went[name] += 1
            took.append(first_s)
        push(now + first_s, lambda at: placer.first(ticket, at))
        push(now + first_s * 4, lambda at: placer.end(ticket, at, succeeded=True))

    for n in range(int(rate * seconds)):
        push(WARM + n / rate, arrive)
    while events:
        at, _, what = heapq.heappop(events)
        what(at)
    return went, took


def test_equal_replicas_share_equally() -> None:
    went, _ = simulate({"a": 1, "b": 1, "c": 1}, rate=20, seconds=40)
    assert max(went.values()) < 1.5 * min(went.values())


def test_a_replica_ten_times_slower_gets_little() -> None:
    went, took = simulate({"a": 1, "b": 10, "c": 1}, rate=20, seconds=20)
    assert went["b"] <= 0.1 * went.total()
    assert sum(first_s > 0.1 for first_s in took) <= 0.02 * len(took)


@given(
    st.lists(
        st.tuples(st.sampled_from("uefrdx"), st.integers(0, 5), st.integers(0, 9)), max_size=80
    )
)
def test_counts_are_those_of_a_slow_and_simple_model(
    steps: list[tuple[str, int, int]],
) -> None:
    placer = a_placer(*(a_replica(f"r{n}") for n in range(20)))
    running: list[Ticket] = []
    now = WARM
    for kind, pick, amount in steps:
        now += 0.1
        if kind == "u":
            placer.update(a_replica(f"r{pick}", in_flight=amount), now)
        elif kind == "x":
            placer.remove(f"r{pick}")
        elif kind in "er":
            ask = an_ask(b"x" * 300 * amount)
            placement = placer.choose(ask, now, random.Random(amount))
            if placement.chosen is not None:
                running.append(placer.begin(ask, placement, now))
        elif running:
            ticket = running[pick % len(running)]
            if kind == "f":
                placer.first(ticket, now)
            else:
                placer.end(ticket, now, succeeded=True)
                running.remove(ticket)
    for name in {ticket.site.replica.replica_id for ticket in running}:
        own = [ticket for ticket in running if ticket.site.replica.replica_id == name]
        for site in {ticket.site for ticket in own}:
            mine = [ticket for ticket in own if ticket.site is site]
            assert site.own == len(mine)
            assert site.own_tokens == sum(
                ticket.tokens for ticket in mine if ticket.first_s is None
            )
    for ticket in running:
        placer.end(ticket, now, succeeded=False)
    assert all(placer.in_flight(f"r{n}") == 0 for n in range(20))


def test_of_a_thousand_the_idlest_and_the_holders_are_found() -> None:
    placer = a_placer(*(a_replica(f"r{n}", in_flight=3) for n in range(1000)))
    placer.update(a_replica("r500"), WARM)
    assert chosen(placer.choose(an_ask(), WARM + 60, random.Random(0))) == "r500"
    prompt = bytes(range(256)) * 64
    placer.cached("r7", MODEL, stored=prefix_hashes(prompt), removed=(), reset=True)
    placement = placer.choose(an_ask(prompt, tokens=16_000), WARM + 60, random.Random(0))
    assert chosen(placement) == "r7"
    assert len(placement.candidates) < 30


def test_of_a_thousand_a_free_one_is_found_though_all_but_one_are_excluded() -> None:
    placer = a_placer(*(a_replica(f"r{n}") for n in range(1000)))
    down = {f"r{n}" for n in range(1000)} - {"r333"}
    placement = placer.choose(an_ask(), WARM, random.Random(0), Exclusions(down=down))
    assert chosen(placement) == "r333"


def test_an_outage_of_many_idle_ones_leaves_the_idlest_of_the_others() -> None:
    placer = a_placer(*(a_replica(f"r{n}", in_flight=3 * (n >= 300)) for n in range(1000)))
    placer.update(a_replica("r777", in_flight=1), WARM)
    down = {f"r{n}" for n in range(300)}
    draw = random.Random(0)
    for _ in range(3):
        placement = placer.choose(an_ask(), WARM + 60, draw, Exclusions(down=down))
        assert chosen(placement) == "r777"
    assert len(placement.candidates) < 30
    down.remove("r12")
    placer.returned("r12", WARM + 60)
    assert chosen(placer.choose(an_ask(), WARM + 120, draw, Exclusions(down=down))) == "r12"


def test_who_is_no_longer_ejected_is_found_again_among_many() -> None:
    placer = a_placer(*(a_replica(f"r{n}", in_flight=3 * (n > 0)) for n in range(100)))
    draw = random.Random(0)
    ejected = {"r0"}
    assert chosen(placer.choose(an_ask(), WARM, draw, Exclusions(ejected=ejected))) != "r0"
    ejected.clear()
    placer.choose(an_ask(), WARM, draw, Exclusions(ejected=ejected))
    assert chosen(placer.choose(an_ask(), WARM, draw, Exclusions(ejected=ejected))) == "r0"


def test_idle_replicas_of_other_classes_do_not_hide_those_of_a_class() -> None:
    placer = a_placer(
        *(a_replica(f"b{n}", pool="batch") for n in range(500)),
        *(a_replica(f"r{n}", pool="chat", in_flight=3) for n in range(500)),
        pool_classes={"batch": frozenset({"BATCH"})},
    )
    draw = random.Random(0)
    names = [
        chosen(placer.choose(an_ask(priority_class="REALTIME"), WARM, draw)) for _ in range(50)
    ]
    assert len(set(names)) > 5
    assert all(name is not None and name.startswith("r") for name in names)
    assert (chosen(placer.choose(an_ask(priority_class="BATCH"), WARM, draw)) or "")[0] == "b"


def test_idle_replicas_that_are_slow_do_not_hide_the_others() -> None:
    placer = a_placer(*(a_replica(f"r{n}") for n in range(100)))
    slow = {f"r{n}" for n in range(30)}
    draw = random.Random(0)
    went: Counter[str] = Counter()
    now = WARM
    for n in range(4000):
        now += 0.005
        ask = an_ask()
        ticket = placer.begin(ask, placer.choose(ask, now, draw), now)
        name = ticket.site.replica.replica_id
        placer.first(ticket, now + (2.0 if name in slow else 0.03))
        placer.end(ticket, now + 2.0, succeeded=True)
        if n > 2000:
            went[name] += 1
    assert sum(went[name] for name in slow) < 0.05 * went.total()
    assert len(went) > 60


def test_the_pool_of_a_replica_may_change() -> None:
    placer = a_placer(*(a_replica(f"r{n}") for n in range(30)))
    placer.update(a_replica("r3", pool="other"), WARM)
    send(placer)
    placer.remove("r3")
    for n in range(29):
        placer.remove(f"r{n}")
    assert chosen(placer.choose(an_ask(), WARM, random.Random(0))) == "r29"


def test_a_saturated_replica_is_used_again_at_once_when_idle() -> None:
    placer = a_placer(a_replica("a", slots=2), a_replica("b", slots=2))
    tickets = [send(placer, seed=n) for n in range(20)]
    for n, ticket in enumerate(tickets):
        placer.first(ticket, WARM + (2.0 * (n // 4) if n >= 4 else 0.05))
        placer.end(ticket, WARM + 9, succeeded=True)
    draw = random.Random(0)
    names = {chosen(placer.choose(an_ask(), WARM + 9, draw)) for _ in range(20)}
    assert names == {"a", "b"}
    [first, second] = placer.choose(an_ask(), WARM + 9, draw).candidates
    assert first.cost == pytest.approx(second.cost, rel=0.05)
    assert (first.cost or 0) < 200


def test_full_slots_are_waited_for_as_long_as_answers_take() -> None:
    placer = a_placer(a_replica("a", slots=4, in_flight=4), a_replica("b", slots=4, in_flight=3))
    placement = placer.choose(an_ask(), WARM, random.Random(0))
    costs = {one.replica_id: one.queue_ms for one in placement.candidates}
    assert chosen(placement) == "b"
    assert costs["a"] > 400
    assert costs["b"] < 100


def test_a_full_kv_cache_counts_as_full_slots() -> None:
    full = ModelLoad(active=True, in_flight=10, slots=256, kv_usage=1.0)
    free = ModelLoad(active=True, in_flight=12, slots=256, kv_usage=0.3)
    placer = a_placer(a_replica("a", models={MODEL: full}), a_replica("b", models={MODEL: free}))
    assert chosen(placer.choose(an_ask(), WARM, random.Random(0))) == "b"


def test_an_answer_that_is_not_streamed_teaches_nothing_of_first_tokens() -> None:
    placer = a_placer(a_replica("a"), a_replica("b"))
    ask = Ask(MODEL, 100, lambda: b"", tells_first=False)
    ticket = send(placer, ask=ask)
    name = ticket.site.replica.replica_id
    while_it_runs = placer.choose(an_ask(), WARM + 20, random.Random(0))
    costs = {one.replica_id: one for one in while_it_runs.candidates}
    other = next(one for one in costs if one != name)
    # Its prompt is long computed, and it is not late: only its slot counts.
    assert costs[name].other_ms == costs[other].other_ms
    assert (costs[name].cost or 0) < (costs[other].cost or 0) + 10
    placer.first(ticket, WARM + 30)
    placer.end(ticket, WARM + 30, succeeded=True)
    after = placer.choose(an_ask(), WARM + 30, random.Random(0))
    assert {one.cost for one in after.candidates} == {after.candidates[0].cost}


def test_the_oldest_waiting_prompt_counts_for_what_is_left_of_it() -> None:
    placer = a_placer(a_replica("a"))
    send(placer, ask=an_ask(tokens=10_000))
    at_once = placer.choose(an_ask(), WARM, random.Random(0)).candidates[0].queue_ms
    later = placer.choose(an_ask(), WARM + 0.3, random.Random(0)).candidates[0].queue_ms
    assert at_once > 500
    assert later < 0.5 * at_once


def test_a_hot_prefix_is_spread_before_it_queues() -> None:
    prompt = b"The same long beginning. " * 800
    placer = a_placer(*(a_replica(name, slots=64) for name in "abcdefgh"))
    went: Counter[str] = Counter()
    longest_ms = 0.0
    for n in range(64):
        ask = an_ask(prompt, tokens=5000)
        placement = placer.choose(ask, WARM + n / 1000, random.Random(n))
        longest_ms = max(longest_ms, placement.predicted_ms)
        went[placer.begin(ask, placement, WARM + n / 1000).site.replica.replica_id] += 1
    # Whoever has it gets what it can take within the time that another needs to compute it.
    assert len(went) >= 2
    assert longest_ms < 600


def test_a_site_that_is_told_of_forgets_what_was_sent_there_once_it_must_have_been_told() -> None:
    prompt = bytes(range(256)) * 64
    placer = a_placer(a_replica("a"), a_replica("b"))
    for name in "ab":
        placer.cached(name, MODEL, stored=(), removed=(), reset=True)
    ticket = send(placer, ask=an_ask(prompt, tokens=4096))
    placer.first(ticket, WARM + 0.1)
    soon = placer.choose(an_ask(prompt, tokens=4096), WARM + 1, random.Random(0))
    assert max(one.cached_tokens for one in soon.candidates) == 4096
    later = placer.choose(an_ask(prompt, tokens=4096), WARM + 60, random.Random(0))
    assert max(one.cached_tokens for one in later.candidates) == 0
    placer.untold("a")
    placer.untold("b")
    again = placer.choose(an_ask(prompt, tokens=4096), WARM + 60, random.Random(0))
    assert max(one.cached_tokens for one in again.candidates) == 4096


def test_why_there_is_none_is_counted() -> None:
    placer = a_placer(a_replica("a", draining=True), a_replica("b"), a_replica("c"))
    census = placer.census(an_ask(), Exclusions(down={"b"}, ejected={"c"}))
    assert census == {"draining": 1, "down": 1, "ejected": 1}
    assert placer.census(Ask("nobody@1")) == {}


def test_the_same_seed_gives_the_same_choices() -> None:
    def play() -> list[str]:
        placer = a_placer(*(a_replica(f"r{n}", slots=8) for n in range(40)))
        draw = random.Random(9)
        names = []
        for n in range(200):
            ask = an_ask(bytes([n % 7]) * 4000, tokens=1000)
            now = WARM + n / 50
            ticket = placer.begin(ask, placer.choose(ask, now, draw), now)
            placer.first(ticket, now + 0.01)
            names.append(ticket.site.replica.replica_id)
        return names

    assert play() == play()
