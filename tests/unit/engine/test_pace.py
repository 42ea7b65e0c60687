"""When the next frame of a stream may leave."""

import random

import pytest
from forebay_engine.core.pace import Pace

INTERVAL_S = 0.02


def a_pace(*, streams: int = 10, from_streams: int = 10, interval_s: float = INTERVAL_S) -> Pace:
    pace = Pace(from_streams=from_streams, interval_s=interval_s)
    pace.streams = streams
    return pace


def tick_after(pace: Pace, now: float) -> float:
    tick = pace.next_tick(now)
    assert tick is not None
    return tick


def test_few_streams_never_wait() -> None:
    assert a_pace(streams=9).next_tick(100.0) is None
    assert a_pace(streams=10).next_tick(100.0) is not None


def test_no_interval_turns_it_off() -> None:
    assert a_pace(streams=1000, interval_s=0).next_tick(100.0) is None


def test_lone_frame_waits_one_interval() -> None:
    assert a_pace().next_tick(100.0) == pytest.approx(100.0 + INTERVAL_S)


def test_frames_of_one_step_share_a_tick() -> None:
    pace = a_pace()
    # The turn in which an engine's step is written takes some milliseconds.
    ticks = {pace.next_tick(100.0 + 0.001 * late) for late in range(5)}
    assert len(ticks) == 1


def test_streams_out_of_step_come_to_share_ticks() -> None:
    pace = a_pace()
    due = sorted(tick_after(pace, 100.0 + 0.0007 * stream) for stream in range(40))
    assert 1 < len(set(due)) <= 3
    for _ in range(3):
        due = sorted(tick_after(pace, tick) for tick in due)
    beats = [(tick - 100.0) / INTERVAL_S for tick in due]
    assert [beat - round(beat) for beat in beats] == pytest.approx([0.0] * 40, abs=1e-6)


def test_frames_that_leave_a_little_after_their_tick_keep_the_rhythm() -> None:
    pace = a_pace()
    first = tick_after(pace, 100.0)
    # Another stream already waits for the tick after it, so the ticks go on.
    second = tick_after(pace, 100.0 + 0.015)
    assert second == pytest.approx(first + INTERVAL_S)
    assert tick_after(pace, first + 0.002) == second


def test_engine_slower_than_the_interval_is_never_held_back() -> None:
    pace, now = a_pace(), 100.0
    for _ in range(50):
        tick = max(tick_after(pace, now) for _ in range(10))
        now += 0.025
        assert tick <= now


def test_every_wait_is_bounded_and_no_two_frames_are_close() -> None:
    rng = random.Random(5)
    pace = a_pace()
    now = 1000.0
    for _ in range(5000):
        now += rng.choice((0.0, 0.0001, 0.004, 0.019, 0.05))
        wait_s = tick_after(pace, now) - now
        assert 0.75 * INTERVAL_S - 1e-6 <= wait_s <= 1.75 * INTERVAL_S + 1e-6
