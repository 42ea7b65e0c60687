"""Flow control: both directions, both levels, and who waits for whom."""

from __future__ import annotations

import time

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import ErrorCode
from forebay_wire.core.headers import encode
from forebay_wire.core.stream import Budget

from tests.http2_peer import (
    ANSWER,
    TRAILERS,
    WIDE,
    End,
    Request,
    a_client,
    a_server,
    data_frame,
    died_of,
    headers_frame,
    rst_frame,
    settings,
)

DEFAULT = 65535


def window_update(stream_id: int, increment: int) -> bytes:
    return frames.window_update(stream_id, increment)


def sent(said: list[tuple[object, ...]], stream_id: int) -> bytes:
    """All payload that was sent on a stream."""
    return b"".join(what[2] for what in said if what[:2] == ("Data", stream_id))  # type: ignore[misc]


def send(request: Request, size: int) -> None:
    request.stream.send(bytes(size), 0, size)


# --- What we may send


def test_a_window_that_is_used_up_blocks_and_a_wider_one_resumes() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    payload = bytes(range(256)) * 300
    request.stream.send(payload, 0, len(payload))
    request.stream.send(payload, 100, 200)
    said = end.said()
    assert sent(said, 1) == payload[:DEFAULT]
    assert request.recorder.told == [("blocked",)]
    assert request.stream.pending_bytes == len(payload) + 100 - DEFAULT
    end.feed(window_update(0, 10**6))
    assert request.recorder.told == [("blocked",)]
    said = end.feed(window_update(1, 10**6))
    assert sent(said, 1) == payload[DEFAULT:] + payload[100:200]
    assert request.recorder.told == [("blocked",), ("drained",)]
    assert request.stream.pending_bytes == 0
    assert request.stream.moved_bytes == len(payload) + 100


def test_data_is_sent_up_to_the_last_octet_of_a_window() -> None:
    end = a_server()
    end.feed(settings(INITIAL_WINDOW_SIZE=10))
    request = end.request(1, ended=True)
    send(request, 10)
    assert request.recorder.told == []
    assert request.stream.window == 0
    send(request, 1)
    assert request.recorder.told == [("blocked",)]
    assert sent(end.said(), 1) == bytes(10)


def test_a_large_piece_is_cut_into_frames_without_a_word_to_its_receiver() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    send(request, 50_000)
    assert len(sent(end.said(), 1)) == 50_000
    assert request.recorder.told == []
    assert not end.connection.blocked


def test_the_end_waits_behind_what_waits() -> None:
    end = a_server()
    end.feed(settings(INITIAL_WINDOW_SIZE=4))
    request = end.request(1, ended=True)
    request.stream.send_headers(encode(ANSWER))
    request.stream.send(b"abcdef", 0, 6)
    request.stream.send_trailers(encode(TRAILERS))
    assert request.stream.ended_here
    assert [what[0] for what in end.said()] == ["Headers", "Data"]
    said = end.feed(window_update(1, 100))
    assert said == [("Data", 1, b"ef", False), ("Headers", 1, TRAILERS, True)]
    assert "drained" not in request.recorder.kinds
    assert not end.connection.streams


def test_a_request_that_waits_ends_with_its_last_data() -> None:
    end = a_client()
    end.feed(settings(INITIAL_WINDOW_SIZE=4))
    stream, _ = end.open(ended=False)
    stream.send_whole(b"abcdef")
    assert end.said()[-1] == ("Data", 1, b"abcd", False)
    assert end.feed(window_update(1, 100)) == [("Data", 1, b"ef", True)]
    stream, _ = end.open(ended=False)
    stream.send(b"abcdef", 0, 6)
    stream.end()
    end.said()
    assert end.feed(window_update(3, 100)) == [("Data", 3, b"ef", True)]
    stream, _ = end.open(ended=False)
    stream.send(b"ab", 0, 2)
    stream.end()
    assert end.said()[-1] == ("Data", 5, b"", True)


@pytest.mark.parametrize("stream_id", [0, 1])
def test_an_increment_of_zero_is_a_fault(stream_id: int) -> None:
    end = a_server()
    request = end.request(1)
    said = end.feed(window_update(stream_id, 0))
    if stream_id == 0:
        assert died_of(end, ErrorCode.PROTOCOL_ERROR, said)
    else:
        assert said == [("RstStream", 1, ErrorCode.PROTOCOL_ERROR)]
        assert request.recorder.resets == [ErrorCode.PROTOCOL_ERROR]


def test_a_window_of_a_stream_must_not_overflow() -> None:
    end = a_server()
    first, second = end.request(1), end.request(3)
    assert end.feed(window_update(1, WIDE - DEFAULT)) == []
    assert first.stream.window == WIDE
    assert end.feed(window_update(1, 1)) == [("RstStream", 1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert second.stream.is_open


@pytest.mark.parametrize("paused", [False, True])
def test_a_window_of_the_connection_must_not_overflow(paused: bool) -> None:
    end = a_server()
    if paused:
        end.connection.pause()
    assert end.feed(window_update(0, WIDE - DEFAULT)) == []
    assert died_of(end, ErrorCode.FLOW_CONTROL_ERROR, end.feed(window_update(0, 1)))


def test_settings_must_not_overflow_a_window() -> None:
    end = a_server()
    end.request(1)
    end.feed(window_update(1, WIDE - DEFAULT))
    said = end.feed(settings(INITIAL_WINDOW_SIZE=DEFAULT + 1))
    assert died_of(end, ErrorCode.FLOW_CONTROL_ERROR, said)


def test_a_stream_that_has_ended_here_needs_no_window() -> None:
    end = a_client()
    stream, recorder = end.open(ended=True)
    for _ in range(600):
        end.feed(window_update(1, WIDE))
    end.said()
    stream.send(b"x", 0, 1)
    assert end.said() == []
    assert recorder.told == []


def test_new_settings_move_the_windows_of_open_streams() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    send(request, 1000)
    window = end.connection.window
    end.feed(settings(INITIAL_WINDOW_SIZE=100))
    assert request.stream.window == 100 - 1000
    assert end.connection.window == window
    assert end.request(3).stream.window == 100
    send(request, 1)
    assert request.recorder.told == [("blocked",)]
    assert end.feed(window_update(1, 900)) == []
    assert request.stream.window == 0
    assert sent(end.feed(window_update(1, 1)), 1) == bytes(1)


def test_data_of_a_wider_window_leaves_behind_the_acknowledgement() -> None:
    end = a_server()
    end.feed(settings(INITIAL_WINDOW_SIZE=0))
    request = end.request(1, ended=True)
    send(request, 5)
    end.said()
    said = end.feed(settings(INITIAL_WINDOW_SIZE=5))
    assert said == [("Settings", "ACK"), ("Data", 1, bytes(5), False)]
    assert request.recorder.told[-1] == ("drained",)


def test_the_last_of_several_values_in_one_frame_counts() -> None:
    end = a_server()
    request = end.request(1)
    values = [(frames.INITIAL_WINDOW_SIZE, i % 1000) for i in range(2730)]
    end.feed(frames.settings_frame([*values[:-1], (frames.INITIAL_WINDOW_SIZE, 77)]))
    assert end.connection.peer_window == request.stream.window == 77


def test_a_frame_full_of_window_sizes_is_cheap_with_many_streams() -> None:
    """2,730 values times 1,024 streams would take a second."""
    end = a_server(streams=1024)
    for stream_id in range(1, 2049, 2):
        end.request(stream_id)
    attack = frames.settings_frame([(frames.INITIAL_WINDOW_SIZE, i) for i in range(2730)])
    end.said()
    started = time.process_time()
    end.feed(attack)
    assert time.process_time() - started < 0.1


def test_an_empty_end_needs_no_window() -> None:
    end = a_client()
    end.feed(settings(INITIAL_WINDOW_SIZE=0))
    end.open(ended=True)
    assert end.said()[-1] == ("Data", 1, b"", True)


# --- Turns


def blocked_by_the_connection(count: int) -> tuple[End, list[Request]]:
    """A server whose streams wait for the connection's window alone."""
    end = a_server(streams=2000)
    requests = [end.request(1 + 2 * i, ended=True) for i in range(count)]
    send(requests[0], DEFAULT)
    end.feed(window_update(1, DEFAULT))
    for request in requests:
        send(request, 100)
        send(request, 100)
    end.said()
    assert [request.recorder.told for request in requests] == [[("blocked",)]] * count
    return end, requests


def test_streams_that_wait_for_the_connection_take_turns() -> None:
    end, requests = blocked_by_the_connection(4)
    served: list[int] = []
    for _ in range(8):
        said = end.feed(window_update(0, 100))
        served += [what[1] for what in said if what[0] == "Data"]
    ids = [request.stream.id for request in requests]
    assert served[:4] == ids
    assert sorted(served) == sorted(ids * 2)
    assert [request.recorder.told[-1] for request in requests] == [("drained",)] * 4


def test_a_stream_that_does_not_wait_cannot_overtake_those_that_do() -> None:
    end, requests = blocked_by_the_connection(2)
    late = end.request(99, ended=True)
    send(late, 100)
    said = end.feed(window_update(0, 300))
    # Each of the first two sends all it can in its turn, and nobody is left out.
    assert {what[1] for what in said} == {requests[0].stream.id, requests[1].stream.id}
    said = end.feed(window_update(0, 200))
    assert {what[1] for what in said} == {requests[1].stream.id, late.stream.id}


def test_a_stream_that_waits_for_its_own_window_holds_up_nobody() -> None:
    end = a_server()
    slow, fast = end.request(1, ended=True), end.request(3, ended=True)
    end.feed(window_update(0, 10**6))
    send(slow, 100_000)
    send(fast, 1000)
    said = end.said()
    assert len(sent(said, 1)) == DEFAULT
    assert len(sent(said, 3)) == 1000
    assert fast.recorder.told == []


def test_window_updates_are_cheap_while_many_wait_for_their_own_windows() -> None:
    end = a_server(streams=1024, nuisances=10**6)
    end.feed(settings(INITIAL_WINDOW_SIZE=0), window_update(0, 10**6))
    for stream_id in range(1, 2049, 2):
        send(end.request(stream_id, ended=True), 10)
    end.said()
    updates = window_update(0, 1) * 1000
    started = time.process_time()
    end.feed(updates)
    assert time.process_time() - started < 0.2
    assert len(end.connection.blocked) == 1024


# --- A transport that is full


def test_nothing_is_sent_while_the_transport_is_full() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    send(request, 100)
    end.said()
    end.connection.pause()
    end.connection.pause()
    assert end.connection.is_paused
    send(request, 100)
    assert end.feed(window_update(0, 50), window_update(1, 50)) == []
    assert request.recorder.told == [("blocked",)]
    end.connection.resume()
    end.connection.resume()
    assert end.said() == [("Data", 1, bytes(100), False)]
    assert end.connection.window == DEFAULT - 200 + 50
    assert request.recorder.told[-1] == ("drained",)


# --- What waits, and for how long


def test_what_waits_is_counted_in_the_budget() -> None:
    budget = Budget(1 << 20)
    end = a_server(budget=budget)
    request = end.request(1, ended=True)
    send(request, DEFAULT + 1000)
    assert budget.used_bytes == request.stream.pending_bytes == 1000
    end.feed(window_update(0, 400), window_update(1, 400))
    assert budget.used_bytes == 600
    other = end.request(3, ended=True)
    send(other, 50)
    assert budget.used_bytes == 650
    end.feed(rst_frame(1))
    assert budget.used_bytes == 50
    end.connection.lost()
    assert budget.used_bytes == 0


def test_the_stream_that_exceeds_the_budget_is_cut_and_no_other() -> None:
    budget = Budget(1000)
    end = a_server(budget=budget)
    end.feed(window_update(0, 10**6))
    first, second = end.request(1, ended=True), end.request(3, ended=True)
    send(first, DEFAULT + 600)
    send(second, DEFAULT + 600)
    assert end.owner.overfull == [second.stream]
    assert not second.stream.is_open
    assert first.stream.is_open
    assert budget.used_bytes == 600
    send(first, 600)
    assert end.owner.overfull[1:] == [first.stream]
    assert budget.used_bytes == 0


def test_a_large_piece_that_goes_at_once_does_not_exceed_the_budget() -> None:
    budget = Budget(1000)
    end = a_server(budget=budget)
    request = end.request(1, ended=True)
    send(request, 60_000)
    assert end.owner.overfull == []
    assert len(sent(end.said(), 1)) == 60_000
    assert budget.used_bytes == 0


def test_a_reader_that_takes_nothing_is_slow() -> None:
    end = a_server(slow_reader_s=30.0)
    stuck, moving, reading = (end.request(i, ended=True) for i in (1, 3, 5))
    end.feed(settings(INITIAL_WINDOW_SIZE=10), window_update(0, 10**6))
    for request in (stuck, moving):
        send(request, 1000)
    send(reading, 5)
    assert end.connection.slow_readers() == []
    end.now = 29.0
    end.feed(window_update(3, 1))
    assert end.connection.slow_readers() == []
    end.now = 30.0
    end.feed(window_update(0, 1))
    assert end.connection.slow_readers() == [stuck.stream]
    stuck.stream.cut(encode(TRAILERS))
    end.now = 58.0
    end.feed(window_update(3, 10_000))
    assert end.connection.slow_readers() == []
    # Who waits again gets the whole time again.
    send(moving, 20_000)
    assert end.connection.slow_readers() == []
    end.now = 87.0
    end.feed(window_update(0, 1))
    assert end.connection.slow_readers() == []


def test_a_reader_that_never_took_anything_is_slow() -> None:
    end = a_server(slow_reader_s=30.0)
    end.feed(settings(INITIAL_WINDOW_SIZE=0))
    request = end.request(1, ended=True)
    send(request, 1)
    assert end.connection.slow_readers() == []
    end.now = 30.0
    end.feed(window_update(0, 1))
    assert end.connection.slow_readers() == [request.stream]


def test_a_message_of_16_mib_is_cut_without_copying_the_rest_each_time() -> None:
    """Copying it would move eight gigabytes."""
    end = a_client()
    end.feed(settings(INITIAL_WINDOW_SIZE=WIDE), window_update(0, WIDE - DEFAULT))
    stream, _ = end.open(ended=False)
    message = bytes(16 << 20)
    end.said()
    started = time.process_time()
    stream.send_whole(message)
    assert time.process_time() - started < 0.3
    assert end.connection.take().endswith(b"\0")


# --- What the peer may send


def test_a_streams_credit_is_renewed_once_half_is_used() -> None:
    end = a_server(request_window_bytes=100_000)
    request = end.request(1)
    assert end.feed(data_frame(1, bytes(16000)) * 3) == []
    said = end.feed(data_frame(1, bytes(16000)))
    assert said == [("WindowUpdate", 1, 64_000)]
    assert request.stream.receive_left == 100_000


def test_credit_of_one_octet_is_renewed() -> None:
    end = a_server(request_window_bytes=1)
    request = end.request(1)
    for _ in range(3):
        assert end.feed(data_frame(1, b"x")) == [("WindowUpdate", 1, 1)]
    assert request.recorder.data == b"xxx"


def test_a_stream_that_ends_gets_no_more_credit() -> None:
    end = a_server(request_window_bytes=10_000)
    request = end.request(1)
    assert end.feed(data_frame(1, bytes(9000), ended=True)) == []
    request.stream.resume()
    assert end.said() == []


def test_the_connections_credit_is_renewed_once_half_is_used() -> None:
    end = a_server(connection_window_bytes=100_000, request_window_bytes=1 << 20)
    end.request(1)
    assert end.feed(data_frame(1, bytes(16000)) * 3) == []
    assert end.feed(data_frame(1, bytes(16000))) == [("WindowUpdate", 0, 64_000)]


def test_a_connections_window_is_never_below_the_protocols_own() -> None:
    end = a_server(connection_window_bytes=1)
    end.request(1)
    assert end.feed(data_frame(1, bytes(16000)) * 2) == []
    assert end.feed(data_frame(1, bytes(16000))) == [("WindowUpdate", 0, 48_000)]


@pytest.mark.parametrize("padding", [-1, 0, 200])
def test_a_peer_that_exceeds_a_streams_window_loses_the_stream(padding: int) -> None:
    end = a_server(request_window_bytes=70_000)
    request, other = end.request(1), end.request(3)
    request.stream.hold()
    said = end.feed(*[data_frame(1, bytes(16000), padding=padding)] * 5)
    assert said == [("RstStream", 1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert request.recorder.resets == [ErrorCode.FLOW_CONTROL_ERROR]
    assert len(request.recorder.data) == 64_000
    assert other.stream.is_open


def test_a_peer_that_exceeds_the_connections_window_ends_it() -> None:
    end = a_server(connection_window_bytes=DEFAULT, request_window_bytes=1 << 20)
    end.request(1)
    said = end.feed(data_frame(1, bytes(16384)) * 4)
    assert died_of(end, ErrorCode.FLOW_CONTROL_ERROR, said)


def test_padding_counts_against_both_windows() -> None:
    end = a_server(request_window_bytes=1000, connection_window_bytes=DEFAULT)
    request = end.request(1)
    said = end.feed(data_frame(1, b"x", padding=255) * 2)
    assert said == [("WindowUpdate", 1, 514)]
    assert request.recorder.data == b"xx"
    assert end.connection._receive_left == DEFAULT - 514


def test_data_on_streams_that_are_gone_counts_against_the_connection() -> None:
    end = a_server(connection_window_bytes=DEFAULT)
    end.request(1).stream.reset(ErrorCode.CANCEL)
    end.said()
    said = end.feed(data_frame(1, bytes(16000)) * 3)
    assert said == [("WindowUpdate", 0, 48_000)]


def test_a_stream_on_hold_gets_no_credit_until_it_resumes() -> None:
    end = a_client(stream_window_bytes=64_000)
    stream, recorder = end.open()
    end.feed(headers_frame(1, ANSWER))
    stream.hold()
    assert end.feed(data_frame(1, bytes(16000)) * 4) == []
    assert len(recorder.data) == 64_000
    stream.resume()
    assert end.said() == [("WindowUpdate", 1, 64_000)]
    stream.hold()
    stream.resume()
    assert end.said() == []


def test_a_client_that_has_not_seen_a_small_window_yet_is_no_offender() -> None:
    end = End(is_client=False, request_window_bytes=1000)
    end.feed(frames.PREFACE, settings())
    request = end.request(1)
    said = end.feed(*[data_frame(1, bytes(13_107))] * 5)
    assert len(request.recorder.data) == DEFAULT
    assert said == [("WindowUpdate", 1, 1000)]
    # With our settings its window shrinks far below zero, and it needs credit to go on at all.
    said = end.feed(frames.frame(frames.SETTINGS, frames.ACK, 0))
    assert said == [("WindowUpdate", 1, DEFAULT - 1000)]
    assert request.stream.receive_left == 1000
    assert end.request(3).stream.receive_left == 1000
