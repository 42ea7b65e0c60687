"""The life of a model version on a host, as a table.

COLD -> LOADING -> ACTIVE -> DRAINING -> COLD is the plain life. A runner that dies makes it FAILED
until the next start; a drained one can sleep. Any pair that is not in the table is a mistake of
ours.
"""

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """Where a model version is; the values are those of `forebay.engine.v1.ModelState`."""

    COLD = 1
    LOADING = 2
    ACTIVE = 3
    DRAINING = 4
    SLEEPING = 5
    FAILED = 6


class Event(Enum):
    """What can happen to a model version."""

    START = "start"
    VERIFIED = "verified"
    DRAIN = "drain"
    RESUME = "resume"
    SLEPT = "slept"
    WAKE = "wake"
    DIED = "died"
    STOPPED = "stopped"


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.COLD, Event.START): State.LOADING,
    (State.LOADING, Event.VERIFIED): State.ACTIVE,
    (State.LOADING, Event.DIED): State.FAILED,
    (State.LOADING, Event.STOPPED): State.COLD,
    (State.ACTIVE, Event.DRAIN): State.DRAINING,
    (State.ACTIVE, Event.DIED): State.FAILED,
    (State.DRAINING, Event.RESUME): State.ACTIVE,
    (State.DRAINING, Event.SLEPT): State.SLEEPING,
    (State.DRAINING, Event.DIED): State.FAILED,
    (State.DRAINING, Event.STOPPED): State.COLD,
    (State.SLEEPING, Event.WAKE): State.LOADING,
    (State.SLEEPING, Event.DIED): State.FAILED,
    (State.SLEEPING, Event.STOPPED): State.COLD,
    (State.FAILED, Event.START): State.LOADING,
    (State.FAILED, Event.STOPPED): State.COLD,
}


class IllegalTransitionError(Exception):
    """An event happened in a state that does not know it."""


def next_state(state: State, event: Event) -> State:
    """Return the state after an event; an unknown pair raises IllegalTransitionError."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"{event.name} in {state.name}") from None


def is_settled(state: State) -> bool:
    """Say whether a load has ended, well or badly."""
    return state in (State.ACTIVE, State.FAILED)
