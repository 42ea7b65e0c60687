"""Continuous batching of the simulated engine: who runs, how long a step takes, what is cached."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from forebay_engine.adapters.profiles import load_profile, profile_names
from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated.kv_cache import BLOCK_TOKENS, BlockPool
from forebay_engine.core.simulated.planner import (
    Emission,
    Engine,
    Finish,
    Limits,
    SequenceRequest,
    Step,
)
from forebay_engine.core.simulated.profile import Profile, parse_profile


def a_profile(**changes: Any) -> Profile:
    return dataclasses.replace(
        load_profile("instant"),
        base_ms=10,
        sequence_ms=1,
        prefill_token_ms=0.1,
        step_tokens=64,
        **changes,
    )


def an_engine(profile: Profile | None = None, **limits: int) -> Engine:
    fields = {
        "max_sequences": 4,
        "context_tokens": 1024,
        "kv_blocks": 64,
        "waiting_max": 100,
        **limits,
    }
    return Engine(profile or a_profile(), Limits(**fields))


def a_request(sequence_id: int = 1, prompt_tokens: int = 10, **changes: Any) -> SequenceRequest:
    fields: dict[str, Any] = {
        "sequence_id": sequence_id,
        "prompt": tuple(range(sequence_id * 1000, sequence_id * 1000 + prompt_tokens)),
        "max_tokens": 5,
        "ignore_end": True,
        **changes,
    }
    return SequenceRequest(**fields)


def step(engine: Engine, now: float = 0.0) -> tuple[Step, list[Emission]]:
    planned = engine.plan_step(now)
    assert planned is not None
    return planned, engine.apply_step()


def run(engine: Engine) -> dict[int, list[Emission]]:
    given: dict[int, list[Emission]] = {}
    for _ in range(10_000):
        if engine.plan_step(0.0) is None:
            return given
        for emission in engine.apply_step():
            given.setdefault(emission.sequence_id, []).append(emission)
    raise AssertionError("the engine does not come to an end")


def test_idle_engine_plans_nothing() -> None:
    assert an_engine().plan_step(0.0) is None


def test_prompt_then_one_token_per_step_until_the_limit() -> None:
    engine = an_engine()
    engine.add(a_request(max_tokens=3))
    first, emitted = step(engine, now=100.0)
    assert (first.prefilled, first.decoding) == (10, 0)
    assert first.ends_at == pytest.approx(100.0 + 0.011)
    assert len(emitted) == 1
    second, _ = step(engine)
    assert (second.prefilled, second.decoding) == (0, 1)
    assert second.ends_at == pytest.approx(0.011)
    _, emitted = step(engine)
    assert emitted[0].finish is Finish.LENGTH
    assert engine.plan_step(0.0) is None
    assert engine.figures().running == 0
    assert engine.figures().generated_tokens == 3


def test_long_prompt_is_computed_in_chunks() -> None:
    engine = an_engine()
    engine.add(a_request(prompt_tokens=150))
    assert [step(engine)[0].prefilled for _ in range(3)] == [64, 64, 22]
    assert step(engine)[0].decoding == 1


def test_decoding_goes_on_beside_a_prefill() -> None:
    engine = an_engine()
    engine.add(a_request(1, max_tokens=50))
    step(engine)
    engine.add(a_request(2, prompt_tokens=150))
    planned, emitted = step(engine)
    assert (planned.decoding, planned.prefilled) == (1, 63)
    assert [emission.sequence_id for emission in emitted] == [1]


def test_no_more_sequences_run_than_may() -> None:
    engine = an_engine(max_sequences=2)
    for number in range(1, 6):
        engine.add(a_request(number))
    step(engine)
    assert (engine.figures().running, engine.figures().waiting) == (2, 3)
    assert {number: len(given) for number, given in run(engine).items()}.keys() == {1, 2, 3, 4, 5}


def test_attended_context_makes_steps_longer() -> None:
    profile = dataclasses.replace(a_profile(), context_token_ms=0.01)
    engine = an_engine(profile)
    engine.add(a_request(prompt_tokens=60))
    step(engine)
    planned, _ = step(engine)
    assert planned.ends_at == pytest.approx((10 + 1 + 0.01 * 60) / 1000)


def test_shared_prefix_is_not_computed_again() -> None:
    engine = an_engine()
    prompt = tuple(range(40))
    engine.add(a_request(1, prompt=prompt))
    run(engine)
    engine.add(a_request(2, prompt=prompt))
    planned, emitted = step(engine)
    assert planned.prefilled == 40 - 2 * BLOCK_TOKENS
    assert emitted[0].cached_tokens == 2 * BLOCK_TOKENS
    figures = engine.figures()
    assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens) == (80, 32)


def test_last_prompt_token_is_always_computed() -> None:
    engine = an_engine()
    prompt = tuple(range(32))
    for number in (1, 2):
        engine.add(a_request(number, prompt=prompt))
        given = run(engine)
    assert given[2][0].cached_tokens == BLOCK_TOKENS


def test_answer_is_cached_for_the_next_turn() -> None:
    engine = an_engine()
    engine.add(a_request(1, prompt=tuple(range(10)), max_tokens=30))
    answer = [emission.token for emission in run(engine)[1]]
    engine.add(a_request(2, prompt=(*range(10), *answer, 7)))
    _, emitted = step(engine)
    assert emitted[0].cached_tokens == 2 * BLOCK_TOKENS


def test_least_recently_used_prefix_makes_room_tail_first() -> None:
    engine = an_engine(kv_blocks=6)
    for number in (1, 2, 3):
        engine.add(a_request(number, prompt_tokens=33, max_tokens=1))
        run(engine)
    engine.add(a_request(4, prompt=a_request(3, 33).prompt, max_tokens=1))
    assert run(engine)[4][0].cached_tokens == 32
    engine.add(a_request(5, prompt=a_request(1, 33).prompt, max_tokens=1))
    assert run(engine)[5][0].cached_tokens == 16


def test_forgotten_cache_is_not_found() -> None:
    engine = an_engine()
    engine.add(a_request(1, prompt_tokens=40))
    run(engine)
    engine.forget_cache()
    engine.add(a_request(2, prompt=a_request(1, 40).prompt))
    assert step(engine)[1][0].cached_tokens == 0


def test_same_answer_whatever_else_runs() -> None:
    alone = an_engine()
    alone.add(a_request(1, max_tokens=60))
    expected = [emission.token for emission in run(alone)[1]]
    crowded = an_engine(kv_blocks=12, max_sequences=8)
    for number in range(1, 9):
        crowded.add(a_request(number, prompt_tokens=10 * number, max_tokens=60))
    given = run(crowded)
    assert [emission.token for emission in given[1]] == expected
    assert all(len(emissions) == 60 for emissions in given.values())


def test_who_cannot_grow_preempts_the_latest_and_nothing_is_lost() -> None:
    engine = an_engine(kv_blocks=4)
    engine.add(a_request(1, prompt_tokens=16, max_tokens=40))
    engine.add(a_request(2, prompt_tokens=16, max_tokens=40))
    given: dict[int, int] = {1: 0, 2: 0}
    preempted = False
    while engine.plan_step(0.0) is not None:
        for emission in engine.apply_step():
            given[emission.sequence_id] += 1
        preempted = preempted or (engine.figures().waiting == 1)
    assert preempted
    assert given == {1: 40, 2: 40}


def test_sequence_that_outgrows_the_cache_alone_ends_by_length() -> None:
    engine = an_engine(kv_blocks=2)
    engine.add(a_request(prompt_tokens=20, max_tokens=500))
    given = run(engine)[1]
    assert len(given) == 12
    assert given[-1].finish is Finish.LENGTH


def test_abort_frees_slot_and_blocks_at_once() -> None:
    engine = an_engine()
    engine.add(a_request(1, prompt_tokens=100))
    engine.add(a_request(2))
    step(engine)
    assert engine.abort(1)
    assert engine.abort(2)
    assert not engine.abort(2)
    figures = engine.figures()
    assert (figures.running, figures.waiting, figures.kv_cache_usage) == (0, 0, 0)


def test_sequence_aborted_during_a_step_gets_nothing() -> None:
    engine = an_engine()
    engine.add(a_request(1))
    engine.add(a_request(2))
    assert engine.plan_step(0.0) is not None
    engine.abort(1)
    assert [emission.sequence_id for emission in engine.apply_step()] == [2]


def test_prompt_that_leaves_no_room_is_refused_with_the_figures() -> None:
    engine = an_engine(context_tokens=100)
    with pytest.raises(Refused) as refused:
        engine.add(a_request(prompt_tokens=100))
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "100 tokens" in refused.value.message
    engine.add(a_request(prompt_tokens=99))
    assert len(run(engine)[1]) == 1


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(Refused):
        an_engine().add(a_request(prompt=()))


def test_waiting_is_bounded() -> None:
    engine = an_engine(waiting_max=2)
    engine.add(a_request(1))
    engine.add(a_request(2))
    with pytest.raises(Refused) as refused:
        engine.add(a_request(3))
    assert refused.value.reason == "QUEUE_FULL"


def test_prompt_alone_ends_after_its_prefill() -> None:
    engine = an_engine()
    engine.add(a_request(prompt_tokens=100, max_tokens=0))
    (emission,) = run(engine)[1]
    assert (emission.token, emission.finish) == (None, Finish.STOP)
    assert engine.figures().generated_tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_nothing_leaks_under_random_load(seed: int) -> None:
    rng = random.Random(seed)
    engine = an_engine(kv_blocks=rng.randrange(4, 40), max_sequences=rng.randrange(1, 6))
    live: set[int] = set()
    for number in range(1, 300):
        if rng.random() < 0.5:
            tokens = rng.randrange(1, 50)
            shared = tuple(range(rng.randrange(0, 40)))
            prompt = (*shared, *(rng.randrange(9999) for _ in range(tokens)))[:60]
            engine.add(a_request(number, prompt=prompt, max_tokens=rng.randrange(0, 30)))
            live.add(number)
        if engine.plan_step(0.0) is not None:
            if live and rng.random() < 0.2:
                gone = rng.choice(sorted(live))
                engine.abort(gone)
                live.discard(gone)
            finished = [e.sequence_id for e in engine.apply_step() if e.finish is not None]
            live.difference_update(finished)
        assert 0 <= engine.figures().kv_cache_usage <= 1
        assert engine.figures().running + engine.figures().waiting == len(live)
    run(engine)
    assert engine.figures().kv_cache_usage == 0, f"seed {seed}"


class Heard:
    """The blocks that can be found, by what was heard."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def stored(self, block: int, parent: int | None) -> None:
        assert block not in self.blocks
        assert parent is None or parent in self.blocks
        self.blocks.add(block)

    def removed(self, block: int) -> None:
        self.blocks.remove(block)


@pytest.mark.parametrize("seed", range(5))
def test_who_listens_knows_which_blocks_can_be_found(seed: int) -> None:
    rng = random.Random(seed)
    engine = an_engine(kv_blocks=rng.randrange(8, 40), max_sequences=rng.randrange(1, 6))
    heard = Heard()
    engine.listen(heard)
    prompts: list[Sequence[int]] = []
    for number in range(1, 200):
        if rng.random() < 0.5:
            shared = tuple(range(rng.randrange(0, 60)))
            prompt = (*shared, *(rng.randrange(9999) for _ in range(rng.randrange(1, 60))))
            request = a_request(number, prompt=prompt, max_tokens=rng.randrange(0, 30))
            prompts.append(engine.add(request))
            assert len(prompts[-1]) == len(prompt) // BLOCK_TOKENS
        if engine.plan_step(0.0) is not None:
            engine.apply_step()
        for blocks in prompts[-20:]:
            found = engine._pool.count_known(blocks)
            assert heard.blocks.issuperset(blocks[:found])
            assert found == len(blocks) or blocks[found] not in heard.blocks
    run(engine)
    engine.forget_cache()
    assert not heard.blocks


def test_blocks_of_one_name_are_held_once() -> None:
    pool = BlockPool(4)
    assert pool.take(2)
    pool.publish(77)
    pool.publish(77)
    assert pool.used == 1
    pool.release((77,), private=0)
    assert pool.used == 1
    pool.release((77,), private=0)
    assert pool.used == 0
    assert pool.count_known([77, 78]) == 1


def test_blocks_are_taken_all_or_none() -> None:
    pool = BlockPool(3)
    assert not pool.take(4)
    assert pool.used == 0
    assert pool.take(3)
    assert not pool.take(1)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_names_its_source_and_licence(name: str) -> None:
    profile = load_profile(name)
    assert profile.source
    assert profile.licence
    assert profile.step_ms(decoding=1, prefilled=0, attended=100) >= 0


def test_measured_profile_gives_the_measured_rates() -> None:
    profile = load_profile("cpu-smollm2-135m")
    for streams, measured in ((1, 32), (4, 112), (16, 245), (32, 307)):
        step_ms = profile.step_ms(decoding=streams, prefilled=0, attended=streams * 100)
        assert streams / step_ms * 1000 == pytest.approx(measured, rel=0.08)


def test_derived_profile_follows_its_table() -> None:
    profile = load_profile("h200-llama-3.1-8b")
    for batch, context, measured in ((1, 1024, 4.569), (32, 1024, 6.046), (128, 1024, 9.461)):
        step_ms = profile.step_ms(decoding=batch, prefilled=0, attended=batch * context)
        assert step_ms == pytest.approx(measured, rel=0.08)


def test_unknown_profile_is_refused_with_the_names() -> None:
    with pytest.raises(Refused) as refused:
        load_profile("../secret")
    assert "instant" in refused.value.message


def test_malformed_profile_is_an_error() -> None:
    values = {"source": "x"}
    with pytest.raises(ValueError, match="missing"):
        parse_profile("p", values)
    whole = {field.name: getattr(a_profile(), field.name) for field in dataclasses.fields(Profile)}
    del whole["name"]
    with pytest.raises(ValueError, match="unknown extra"):
        parse_profile("p", {**whole, "extra": 1})
    with pytest.raises(ValueError, match="base_ms"):
        parse_profile("p", {**whole, "base_ms": float("nan")})
