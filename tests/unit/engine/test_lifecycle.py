import itertools

import pytest
from forebay_engine.core.lifecycle import (
    TRANSITIONS,
    Event,
    IllegalTransitionError,
    State,
    is_settled,
    next_state,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_in_the_table_or_refused(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{event.name} in {state.name}"):
            next_state(state, event)


def test_a_runner_can_die_in_every_state_that_has_one() -> None:
    with_runner = (State.LOADING, State.ACTIVE, State.DRAINING, State.SLEEPING)
    assert all(next_state(state, Event.DIED) is State.FAILED for state in with_runner)


def test_every_state_can_be_reached_and_left_for_cold() -> None:
    reached = {State.COLD}
    while grown := {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] in reached} - reached:
        reached |= grown
    assert reached == set(State)
    home = {State.COLD}
    while grown := {pair[0] for pair, after in TRANSITIONS.items() if after in home} - home:
        home |= grown
    assert home == set(State)


def test_only_active_and_failed_settle_a_load() -> None:
    assert {state for state in State if is_settled(state)} == {State.ACTIVE, State.FAILED}


def test_states_are_those_of_the_contract() -> None:
    from forebay.engine.v1 import engine_service_pb2 as pb

    for state in State:
        assert pb.ModelState.Name(state.value) == f"MODEL_STATE_{state.name}"
