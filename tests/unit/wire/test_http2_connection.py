"""A connection as a whole: how it begins, what frames may look like, settings, pings, the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import ErrorCode, frame
from forebay_wire.core.headers import NO_TABLE, encode
from forebay_wire.core.stream import Stream

from tests.http2_peer import (
    ANSWER,
    REQUEST,
    TRAILERS,
    End,
    a_client,
    a_server,
    block_of,
    data_frame,
    died_of,
    headers_frame,
    read_frames,
    rst_frame,
    settings,
)

Peer = Callable[[], End]
BOTH = pytest.mark.parametrize("a_peer", [a_server, a_client], ids=["server", "client"])
ACK = frame(frames.SETTINGS, frames.ACK, 0)
PING = frame(frames.PING, 0, 0, b"12345678")


def an_answer(stream_id: int, *, ended: bool = False) -> bytes:
    return headers_frame(stream_id, ANSWER, ended=ended)


# --- The beginning


def test_a_server_begins_with_settings() -> None:
    end = End(is_client=False)
    first, second = end.said()
    assert first == (
        "Settings",
        {
            frames.HEADER_TABLE_SIZE: 0,
            frames.INITIAL_WINDOW_SIZE: end.limits.request_window_bytes,
            frames.MAX_HEADER_LIST_SIZE: end.limits.header_bytes,
            frames.MAX_CONCURRENT_STREAMS: end.limits.streams,
        },
    )
    assert second == ("WindowUpdate", 0, end.limits.connection_window_bytes - 65535)


def test_a_client_begins_with_preface_and_settings_that_forbid_push() -> None:
    end = End(is_client=True)
    data = end.connection.take()
    assert data.startswith(frames.PREFACE)
    first = read_frames(data)[0]
    assert first.settings[frames.ENABLE_PUSH] == 0
    assert frames.MAX_CONCURRENT_STREAMS not in first.settings


def test_a_preface_may_come_in_pieces() -> None:
    end = End(is_client=False)
    end.said()
    for octet in frames.PREFACE + settings():
        assert end.connection.closed is None
        end.connection.receive(bytes((octet,)), 0.0)
    assert end.said() == [("Settings", "ACK")]
    assert end.connection.is_greeted


@pytest.mark.parametrize("wrong", [b"\x16\x03\x01\x02\x00", b"\0" * 24, b"123 not http"])
def test_a_wrong_preface_ends_the_connection(wrong: bytes) -> None:
    end = End(is_client=False)
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(wrong))


@pytest.mark.parametrize(
    "wrong", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n"]
)
def test_http1_at_an_http2_port_is_told_what_the_port_takes(wrong: bytes) -> None:
    end = End(is_client=False)
    end.connection.receive(wrong, 0.0)
    answer = end.connection.take()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"gRPC over HTTP/2" in answer
    assert end.connection.closed is ErrorCode.HTTP_1_1_REQUIRED
    assert end.owner.closed == 1


def test_an_http1_server_at_the_other_end_ends_the_connection() -> None:
    end = End(is_client=True)
    said = end.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert died_of(end, ErrorCode.FRAME_SIZE_ERROR, said)


@pytest.mark.parametrize(
    "first", [PING, ACK, headers_frame(1), frames.window_update(0, 1), frame(0xEE, 0, 0)]
)
@pytest.mark.parametrize("is_client", [False, True])
def test_the_first_frame_must_be_settings(first: bytes, is_client: bool) -> None:
    end = End(is_client=is_client)
    end.connection.receive(b"" if is_client else frames.PREFACE, 0.0)
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(first))


def test_a_client_may_send_requests_before_it_has_our_settings() -> None:
    end = End(is_client=False)
    end.said()
    end.feed(frames.PREFACE, settings(), headers_frame(1), data_frame(1, b"x", ended=True))
    assert end.owner.requests[0].recorder.told == [("data", b"x"), ("end",)]


def test_a_client_opens_nothing_before_it_has_the_servers_settings() -> None:
    end = End(is_client=True)
    assert not end.connection.can_open
    end.feed(settings())
    assert end.connection.can_open
    assert end.owner.capacity == 1


# --- Frames


@BOTH
def test_a_frame_larger_than_16384_ends_the_connection(a_peer: Peer) -> None:
    end = a_peer()
    # It is enough to see the length.
    said = end.feed(frame(0xEE, 0, 0, bytes(16385))[:9])
    assert died_of(end, ErrorCode.FRAME_SIZE_ERROR, said)


def test_a_frame_of_16384_is_taken() -> None:
    end = a_server()
    request = end.request(1)
    end.feed(data_frame(1, bytes(16384)))
    assert request.recorder.data == bytes(16384)


@BOTH
@pytest.mark.parametrize(
    "wrong",
    [
        frame(frames.PING, 0, 0, bytes(7)),
        frame(frames.PING, 0, 0, bytes(9)),
        frame(frames.PING, frames.ACK, 0, bytes(7)),
        frame(frames.SETTINGS, 0, 0, bytes(5)),
        frame(frames.SETTINGS, frames.ACK, 0, bytes(6)),
        frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)),
        frame(frames.WINDOW_UPDATE, 0, 1, bytes(5)),
        frame(frames.GOAWAY, 0, 0, bytes(7)),
    ],
)
def test_a_frame_of_a_wrong_fixed_size_ends_the_connection(a_peer: Peer, wrong: bytes) -> None:
    end = a_peer()
    assert died_of(end, ErrorCode.FRAME_SIZE_ERROR, end.feed(wrong))


@pytest.mark.parametrize("size", [0, 3, 5])
def test_a_reset_of_a_wrong_size_ends_the_connection(size: int) -> None:
    end = a_server()
    end.request(1)
    said = end.feed(frame(frames.RST_STREAM, 0, 1, bytes(size)))
    assert died_of(end, ErrorCode.FRAME_SIZE_ERROR, said)


@pytest.mark.parametrize("size", [0, 4, 6])
def test_a_priority_of_a_wrong_size_breaks_its_stream(size: int) -> None:
    end = a_server()
    first, second = end.request(1), end.request(3)
    said = end.feed(frame(frames.PRIORITY, 0, 1, bytes(size)))
    assert said == [("RstStream", 1, ErrorCode.FRAME_SIZE_ERROR)]
    assert first.recorder.resets == [ErrorCode.FRAME_SIZE_ERROR]
    assert second.stream.is_open
    said = end.feed(frame(frames.PRIORITY, 0, 5, bytes(size)))
    assert died_of(end, ErrorCode.FRAME_SIZE_ERROR, said)


@BOTH
@pytest.mark.parametrize(
    "wrong",
    [
        frame(frames.PING, 0, 1, bytes(8)),
        frame(frames.SETTINGS, 0, 1),
        frame(frames.GOAWAY, 0, 1, bytes(8)),
        frame(frames.DATA, 0, 0, b"x"),
        frame(frames.DATA, 0, 0),
        frame(frames.HEADERS, frames.END_HEADERS, 0, encode(REQUEST)),
        frame(frames.RST_STREAM, 0, 0, bytes(4)),
        frame(frames.PRIORITY, 0, 0, bytes(5)),
        frame(frames.CONTINUATION, frames.END_HEADERS, 0, encode(REQUEST)),
    ],
)
def test_a_frame_on_the_wrong_kind_of_stream_ends_the_connection(
    a_peer: Peer, wrong: bytes
) -> None:
    end = a_peer()
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(wrong))


def test_the_reserved_bit_is_ignored() -> None:
    end = a_server()
    request = end.request(1)
    for plain in (data_frame(1, b"one"), data_frame(1, b"two", ended=True)):
        word, flags, stream_id = frames.unpack(plain, 0)
        end.connection.receive(frames.pack(word, flags, stream_id | 1 << 31) + plain[9:], 0.0)
    assert request.recorder.data == b"onetwo"
    assert request.recorder.told[-1] == ("end",)
    assert end.feed(frame(frames.PING, 0, 1 << 31, bytes(8))) == [("Ping", "ACK", bytes(8))]
    window = end.connection.window
    end.feed(frame(frames.WINDOW_UPDATE, 0, 0, (1 << 31 | 5).to_bytes(4, "big")))
    assert end.connection.window == window + 5


@BOTH
@pytest.mark.parametrize("kind", [0x0A, 0x0B, 0x0C, 0x10, 0xFF])
@pytest.mark.parametrize("stream_id", [0, 1, 7])
def test_unknown_frames_are_ignored(a_peer: Peer, kind: int, stream_id: int) -> None:
    end = a_peer()
    assert end.feed(frame(kind, 0xFF, stream_id, b"whatever"), PING)[-1][0] == "Ping"
    assert end.connection.closed is None


def test_flags_without_a_meaning_are_ignored() -> None:
    end = a_server()
    end.feed(frame(frames.HEADERS, frames.END_HEADERS | 0x52, 1, block_of(REQUEST)))
    request = end.owner.requests[0]
    end.feed(frame(frames.DATA, 0x76, 1, b"x"))
    assert request.recorder.told == [("data", b"x")]
    assert end.feed(frame(frames.PING, 0xFE, 0, bytes(8))) == [("Ping", "ACK", bytes(8))]


@BOTH
def test_an_error_ends_the_connection_and_nothing_after_it_is_looked_at(a_peer: Peer) -> None:
    end = a_peer()
    said = end.feed(frame(frames.PING, 0, 1, bytes(8)), headers_frame(1), PING)
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, said)
    assert not end.owner.requests


def test_a_receiver_that_ends_the_connection_ends_it_at_once() -> None:
    end = a_server()
    request = end.request(1)

    def hang_up(data: bytes, start: int, stop: int) -> None:
        end.connection.fail(ErrorCode.INTERNAL_ERROR)

    request.stream.on_data = hang_up
    said = end.feed(data_frame(1, b"x"), headers_frame(3), data_frame(3, b"y"), b"\0\0\x08\x06")
    assert died_of(end, ErrorCode.INTERNAL_ERROR, said)
    assert len(end.owner.requests) == 1
    assert request.recorder.resets == [ErrorCode.CONNECTION_LOST]


# --- Settings


@BOTH
def test_settings_are_acknowledged(a_peer: Peer) -> None:
    end = a_peer()
    assert end.feed(settings(INITIAL_WINDOW_SIZE=100)) == [("Settings", "ACK")]
    assert end.feed(settings()) == [("Settings", "ACK")]


def test_an_acknowledgement_is_awaited_once() -> None:
    end = End(is_client=False, now=5.0)
    assert end.connection.settings_sent_at == 5.0
    end.feed(frames.PREFACE, settings(), ACK)
    assert end.connection.settings_sent_at is None
    assert end.feed(ACK) == []
    assert end.connection.closed is None


@BOTH
def test_unknown_settings_are_ignored(a_peer: Peer) -> None:
    end = a_peer()
    unknown = frames.settings_frame([(0x8, 1), (0xFE03, 1), (0xFFFF, 2**32 - 1), (0, 0)])
    assert end.feed(unknown) == [("Settings", "ACK")]


@BOTH
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (settings(ENABLE_PUSH=2), ErrorCode.PROTOCOL_ERROR),
        (settings(MAX_FRAME_SIZE=16383), ErrorCode.PROTOCOL_ERROR),
        (settings(MAX_FRAME_SIZE=2**24), ErrorCode.PROTOCOL_ERROR),
        (settings(INITIAL_WINDOW_SIZE=2**31), ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_a_setting_out_of_its_range_ends_the_connection(
    a_peer: Peer,
    wrong: bytes,
    code: ErrorCode,
) -> None:
    end = a_peer()
    assert died_of(end, code, end.feed(wrong))


@BOTH
@pytest.mark.parametrize("size", [16384, 2**24 - 1])
def test_a_frame_size_in_range_is_taken_and_not_used(a_peer: Peer, size: int) -> None:
    end = a_peer()
    assert end.feed(settings(MAX_FRAME_SIZE=size)) == [("Settings", "ACK")]


def test_we_send_no_frame_larger_than_16384() -> None:
    end = a_client()
    end.feed(settings(MAX_FRAME_SIZE=2**24 - 1, INITIAL_WINDOW_SIZE=2**31 - 1))
    stream, _ = end.open(ended=False)
    stream.send_whole(bytes(60_000))
    sizes = [len(what[2]) for what in end.said() if what[0] == "Data"]
    assert sizes == [16384, 16384, 16384, 10848]


def test_a_client_may_allow_push_and_a_server_may_not() -> None:
    assert a_server().feed(settings(ENABLE_PUSH=1)) == [("Settings", "ACK")]
    assert a_client().feed(settings(ENABLE_PUSH=0)) == [("Settings", "ACK")]
    end = a_client()
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(settings(ENABLE_PUSH=1)))


@BOTH
def test_a_push_promise_ends_the_connection(a_peer: Peer) -> None:
    end = a_peer()
    if end.connection.is_client:
        end.open()
    said = end.feed(frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2" + NO_TABLE))
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, said)


def test_the_servers_limit_on_streams_is_kept() -> None:
    end = a_client()
    end.feed(settings(MAX_CONCURRENT_STREAMS=2))
    stream, _ = end.open()
    end.open()
    assert not end.connection.can_open
    stream.reset(ErrorCode.CANCEL)
    assert end.connection.can_open
    end.feed(settings(MAX_CONCURRENT_STREAMS=0))
    assert not end.connection.can_open
    assert len(end.connection.streams) == 1


def test_our_first_header_block_gives_up_the_table() -> None:
    end = a_client()
    end.feed(settings(HEADER_TABLE_SIZE=0))
    end.open()
    end.open()
    blocks = [each.data for each in read_frames(end.connection.take()) if each.type == 1]
    assert [block[:1] == NO_TABLE for block in blocks] == [True, False]


# --- Pings


@BOTH
def test_a_ping_is_answered_with_its_own_payload(a_peer: Peer) -> None:
    end = a_peer()
    assert end.feed(PING) == [("Ping", "ACK", b"12345678")]


@BOTH
def test_the_answer_to_our_ping_is_known(a_peer: Peer) -> None:
    end = a_peer()
    end.connection.ping(b"are you?")
    assert end.said() == [("Ping", "", b"are you?")]
    assert end.feed(frame(frames.PING, frames.ACK, 0, b"are you?")) == []
    assert end.connection.acknowledged_ping == b"are you?"


@BOTH
def test_a_ping_of_the_peers_is_no_answer_to_ours(a_peer: Peer) -> None:
    end = a_peer()
    end.connection.ping(b"are you?")
    end.said()
    assert end.feed(PING) == [("Ping", "ACK", b"12345678")]
    assert end.connection.acknowledged_ping == b""


@BOTH
def test_an_answer_to_no_ping_is_ignored(a_peer: Peer) -> None:
    end = a_peer()
    assert end.feed(frame(frames.PING, frames.ACK, 0, b"goingawy")) == []
    assert end.connection.acknowledged_ping == b""


# --- The end


def test_a_graceful_end_is_announced_first_and_then_for_good() -> None:
    end = a_server()
    first = end.request(1)
    end.connection.go_away(gracefully=True)
    assert end.said() == [("GoAway", 2**31 - 1, ErrorCode.NO_ERROR)]
    assert end.connection.is_retiring
    second = end.request(3)
    assert second.stream.is_open
    end.connection.go_away(gracefully=False)
    assert end.said() == [("GoAway", 3, ErrorCode.NO_ERROR)]
    assert end.feed(headers_frame(5), data_frame(5, b"x"), rst_frame(5), headers_frame(7)) == []
    assert len(end.owner.requests) == 2
    for request in (first, second):
        end.feed(data_frame(request.stream.id, b"still heard", ended=True))
        request.stream.send_headers(encode(ANSWER))
        request.stream.send_trailers(encode(TRAILERS))
        assert request.recorder.told == [("data", b"still heard"), ("end",)]
        assert [what[:2] for what in end.said()] == [("Headers", request.stream.id)] * 2
    assert not end.connection.streams
    assert end.connection.closed is None


def test_header_blocks_of_ignored_streams_are_still_read() -> None:
    """They belong to the state that all blocks of the connection share."""
    end = a_server()
    end.connection.go_away(gracefully=False)
    assert end.said() == [("GoAway", 0, ErrorCode.NO_ERROR)]
    broken = frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff")
    assert died_of(end, ErrorCode.COMPRESSION_ERROR, end.feed(broken))


def test_streams_the_server_has_not_touched_may_be_sent_elsewhere() -> None:
    end = a_client()
    (_, touched), (_, untouched), (_, last) = end.open(), end.open(), end.open()
    end.feed(frames.goaway(1, ErrorCode.NO_ERROR))
    assert touched.told == []
    assert untouched.told == last.told == [("reset", ErrorCode.REFUSED_STREAM)]
    assert not end.connection.can_open
    assert end.connection.is_retiring
    end.feed(an_answer(1), data_frame(1, b"x"), headers_frame(1, TRAILERS, ended=True))
    assert touched.kinds == ["headers", "data", "headers"]
    assert not end.connection.streams


def test_a_graceful_goaway_of_the_server_leaves_all_streams() -> None:
    end = a_client()
    _, recorder = end.open()
    end.feed(frames.goaway(2**31 - 1, ErrorCode.NO_ERROR))
    assert recorder.told == []
    assert not end.connection.can_open
    end.feed(frames.goaway(0, ErrorCode.NO_ERROR))
    assert recorder.resets == [ErrorCode.REFUSED_STREAM]


def test_a_goaway_may_carry_debug_data_and_an_unknown_code() -> None:
    end = a_client()
    end.feed(frame(frames.GOAWAY, 0, 0, bytes(4) + b"\xff\xff\xff\xff" + b"too_many_pings"))
    assert end.connection.is_retiring
    assert end.connection.closed is None


def test_a_clients_goaway_is_borne() -> None:
    end = a_server()
    end.request(1)
    assert end.feed(frames.goaway(0, ErrorCode.NO_ERROR)) == []
    assert end.request(3).stream.is_open


def test_a_client_that_goes_away_opens_nothing_more() -> None:
    end = a_client()
    _, recorder = end.open()
    end.connection.go_away(gracefully=True)
    assert end.said()[-1] == ("GoAway", 0, ErrorCode.NO_ERROR)
    assert not end.connection.can_open
    assert recorder.told == []


@BOTH
def test_a_lost_transport_ends_every_stream_once(a_peer: Peer) -> None:
    end = a_peer()
    if end.connection.is_client:
        recorders = [end.open()[1] for _ in range(3)]
    else:
        recorders = [end.request(i).recorder for i in (1, 3, 5)]
    end.connection.lost()
    end.connection.lost()
    end.connection.fail(ErrorCode.INTERNAL_ERROR)
    assert [recorder.told for recorder in recorders] == [[("reset", ErrorCode.CONNECTION_LOST)]] * 3
    assert end.owner.closed == 1
    assert not end.connection.streams


def test_the_owner_is_told_once_that_there_is_something_to_take() -> None:
    end = a_server()
    before = end.owner.writable
    end.connection.receive(PING + PING, 0.0)
    assert end.owner.writable == before + 1
    end.said()
    end.connection.receive(PING, 0.0)
    assert end.owner.writable == before + 2
    acts: list[Callable[[Stream], None]] = [
        lambda stream: stream.send_headers(encode(ANSWER)),
        lambda stream: stream.send(b"x", 0, 1),
        lambda stream: stream.send(bytes(20_000), 0, 20_000),
        lambda stream: stream.send_whole(b"x"),
    ]
    stream = end.request(1, ended=True).stream
    for count, act in enumerate(acts):
        end.said()
        act(stream)
        assert end.owner.writable == before + 3 + count


def test_when_the_peer_was_heard_and_when_it_carried_something_is_known() -> None:
    end = a_server()
    connection = end.connection
    end.now = 1.0
    end.feed(PING)
    assert (connection.heard_at, connection.carried_at) == (1.0, 0.0)
    end.now = 2.0
    end.feed(headers_frame(1))
    assert (connection.heard_at, connection.carried_at) == (2.0, 2.0)
    end.now = 3.0
    end.feed(data_frame(1, b"x"))
    assert (connection.now, connection.heard_at, connection.carried_at) == (3.0, 3.0, 3.0)


def test_an_unknown_error_code_is_taken_for_an_internal_error() -> None:
    end = a_client()
    _, recorder = end.open()
    end.feed(frame(frames.RST_STREAM, 0, 1, b"\x12\x34\x56\x78"))
    assert recorder.resets == [ErrorCode.INTERNAL_ERROR]
