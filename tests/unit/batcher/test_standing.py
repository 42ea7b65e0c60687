"""Role, draining, and fences."""

from __future__ import annotations

import pytest
from forebay_batcher.core.standing import Role, Standing
from forebay_common.errors import ForebayError, Reason


def reason_of(call: object, *args: object, **kwargs: object) -> Reason:
    with pytest.raises(ForebayError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    return caught.value.reason


def test_activation_is_idempotent_for_one_fence() -> None:
    once = Standing(Role.STANDBY).activate(7, has_active_model=True)
    assert once == Standing(Role.ACTIVE, fence=7)
    assert once.activate(7, has_active_model=True) == once
    assert once.activate(8, has_active_model=True).fence == 8


def test_a_stale_fence_is_refused() -> None:
    standing = Standing(Role.ACTIVE, fence=7)
    assert reason_of(standing.activate, 6, has_active_model=True) is Reason.STALE_FENCE
    assert reason_of(standing.drain, 6) is Reason.STALE_FENCE
    assert reason_of(standing.activate, 0, has_active_model=True) is Reason.INVALID_ARGUMENT


def test_an_operators_drain_is_never_stale() -> None:
    assert Standing(Role.ACTIVE, fence=7).drain(0) == Standing(Role.ACTIVE, draining=True, fence=7)


def test_a_standby_without_a_model_is_not_activated() -> None:
    activate = Standing(Role.STANDBY).activate
    assert reason_of(activate, 1, has_active_model=False) is Reason.NO_REPLICA


def test_a_draining_replica_is_not_activated() -> None:
    draining = Standing(Role.STANDBY).drain(1)
    assert reason_of(draining.activate, 2, has_active_model=True) is Reason.DRAINING


def test_requests_are_refused_by_a_standby_and_once_the_drain_was_heard() -> None:
    draining = Standing(Role.ACTIVE).drain(0)
    draining.check_open()
    assert not draining.is_serving
    assert reason_of(draining.close().check_open) is Reason.DRAINING
    assert reason_of(Standing(Role.STANDBY).check_open) is Reason.NO_REPLICA
