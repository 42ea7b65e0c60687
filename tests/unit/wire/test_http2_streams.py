"""Streams: their ids, their states, header blocks, and that each ends once and alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import ErrorCode, frame
from forebay_wire.core.headers import Headers, encode
from hpack import Encoder

from tests.http2_peer import (
    ANSWER,
    REQUEST,
    TRAILERS,
    End,
    Recorder,
    a_client,
    a_server,
    block_of,
    data_frame,
    died_of,
    headers_frame,
    rst_frame,
)

CANCEL = ErrorCode.CANCEL
PRIORITY = (3).to_bytes(4, "big") + b"\x10"


def continuation(stream_id: int, part: bytes, *, last: bool = False) -> bytes:
    return frame(frames.CONTINUATION, frames.END_HEADERS if last else 0, stream_id, part)


def window_update(stream_id: int, increment: int = 1) -> bytes:
    return frames.window_update(stream_id, increment)


# --- Ids


@pytest.mark.parametrize("stream_id", [2, 4, 2**31 - 2])
def test_an_even_stream_of_a_client_ends_the_connection(stream_id: int) -> None:
    end = a_server()
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(headers_frame(stream_id)))


def test_a_stream_that_was_passed_over_cannot_be_opened() -> None:
    end = a_server()
    end.request(1)
    end.request(9)
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(headers_frame(5)))


def test_which_streams_were_passed_over_is_remembered_within_bounds() -> None:
    end = a_server()
    for stream_id in range(1, 401, 4):
        end.feed(headers_frame(stream_id), rst_frame(stream_id))
    assert died_of(end, ErrorCode.STREAM_CLOSED, end.feed(headers_frame(3)))


def test_streams_may_be_passed_over() -> None:
    end = a_server()
    assert end.request(2**31 - 1).stream.is_open
    assert end.feed() == []


def test_our_streams_are_odd_and_rise() -> None:
    end = a_client()
    assert [end.open()[0].id for _ in range(4)] == [1, 3, 5, 7]


def test_a_client_that_has_no_ids_left_is_retiring() -> None:
    end = a_client()
    end.connection._next_id = 2**31 - 3
    assert end.connection.can_open
    end.open()
    assert not end.connection.can_open
    assert end.connection.is_retiring


@pytest.mark.parametrize("stream_id", [1, 2, 99])
@pytest.mark.parametrize("is_client", [False, True])
@pytest.mark.parametrize(
    "of", [lambda i: data_frame(i, b"x"), window_update, rst_frame], ids=["data", "window", "reset"]
)
def test_a_frame_on_an_idle_stream_ends_the_connection(
    of: Callable[[int], bytes], stream_id: int, is_client: bool
) -> None:
    end = a_client() if is_client else a_server()
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(of(stream_id)))


@pytest.mark.parametrize("stream_id", [1, 2])
def test_headers_of_a_stream_nobody_opened_end_the_connection(stream_id: int) -> None:
    end = a_client()
    said = end.feed(headers_frame(stream_id, ANSWER))
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, said)


# --- States: what is taken in each (RFC 9113 §5.1)


def test_priority_is_taken_in_every_state() -> None:
    end = a_server()
    idle = frame(frames.PRIORITY, 0, 11, PRIORITY)
    assert end.feed(idle) == []
    request = end.request(1)
    assert end.feed(frame(frames.PRIORITY, 0, 1, PRIORITY)) == []
    end.feed(data_frame(1, b"", ended=True))
    assert end.feed(frame(frames.PRIORITY, 0, 1, PRIORITY)) == []
    request.stream.reset(CANCEL)
    assert end.feed(frame(frames.PRIORITY, 0, 1, PRIORITY)) == [("RstStream", 1, CANCEL)]
    assert end.request(11).stream.is_open


def test_a_stream_that_depends_on_itself_is_broken() -> None:
    end = a_server()
    end.request(3)
    said = end.feed(frame(frames.PRIORITY, 0, 3, PRIORITY))
    assert said == [("RstStream", 3, ErrorCode.PROTOCOL_ERROR)]


def test_the_end_of_a_stream_is_seen_among_frames_in_a_row() -> None:
    end = a_server()
    request = end.request(1)
    said = end.feed(data_frame(1, b"a"), data_frame(1, b"b", ended=True), data_frame(1, b"late"))
    reset = ("reset", ErrorCode.STREAM_CLOSED)
    assert request.recorder.told == [("data", b"ab"), ("end",), reset]
    assert said == [("RstStream", 1, ErrorCode.STREAM_CLOSED)]


def test_frames_in_a_row_of_two_streams_are_kept_apart() -> None:
    end = a_server()
    first, second = end.request(1), end.request(3)
    end.feed(
        *(data_frame(i, b"%d" % n) for n, i in enumerate((1, 1, 3, 3, 1, 3, 3))),
        data_frame(3, b""),
        data_frame(3, b"7", padding=2),
        data_frame(1, bytes(16384)),
        data_frame(1, b"8", ended=True),
    )
    assert first.recorder.told == [("data", b"014" + bytes(16384) + b"8"), ("end",)]
    assert second.recorder.data == b"23567"


def test_resets_by_the_peer_are_counted() -> None:
    end = a_server()
    end.request(1)
    end.request(3).stream.reset(CANCEL)
    end.feed(rst_frame(1), rst_frame(1), rst_frame(3))
    assert end.connection.resets == 1


def test_data_and_resets_are_taken_on_an_open_stream() -> None:
    end = a_server()
    request = end.request(1)
    end.feed(data_frame(1, b"a"), data_frame(1, b"b"), window_update(1), rst_frame(1))
    assert request.recorder.told == [("data", b"ab"), ("reset", CANCEL)]
    assert not request.stream.is_open


@pytest.mark.parametrize("by_headers", [False, True])
@pytest.mark.parametrize(
    "late",
    [
        data_frame(1, b"late"),
        data_frame(1, b""),
        data_frame(1, b"", ended=True),
        data_frame(1, b"late", padding=3),
        headers_frame(1, TRAILERS, ended=True),
        headers_frame(1, TRAILERS),
    ],
)
def test_what_follows_the_peers_end_breaks_its_stream_alone(by_headers: bool, late: bytes) -> None:
    end = a_server()
    request, other = end.request(1, ended=by_headers), end.request(3)
    if not by_headers:
        end.feed(data_frame(1, b"all", ended=True))
    told = list(request.recorder.told)
    assert end.feed(late) == [("RstStream", 1, ErrorCode.STREAM_CLOSED)]
    assert request.recorder.told == [*told, ("reset", ErrorCode.STREAM_CLOSED)]
    assert other.stream.is_open


def test_window_updates_and_resets_are_taken_after_the_peers_end() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    before = request.stream.window
    assert end.feed(window_update(1, 10)) == []
    assert request.stream.window == before + 10
    end.feed(rst_frame(1))
    assert request.recorder.resets == [CANCEL]


def test_everything_is_taken_after_our_own_end() -> None:
    end = a_client()
    stream, recorder = end.open(ended=True)
    end.feed(window_update(1, 10), headers_frame(1, ANSWER), data_frame(1, b"x"))
    assert recorder.kinds == ["headers", "data"]
    assert stream.ended_here
    assert not stream.ended_there
    end.feed(rst_frame(1))
    assert recorder.resets == [CANCEL]


def a_stream_that(ended: str) -> tuple[End, list[str]]:
    """A server whose stream 1 is over: by both ends, by the client's reset, or by ours."""
    end = a_server()
    request = end.request(1, ended=ended == "both")
    if ended == "both":
        request.stream.send_headers(encode(ANSWER))
        request.stream.send_trailers(encode(TRAILERS))
    elif ended == "there":
        end.feed(rst_frame(1))
    else:
        request.stream.reset(CANCEL)
    end.said()
    assert not end.connection.streams
    return end, request.recorder.kinds


@pytest.mark.parametrize("ended", ["both", "there", "here"])
def test_window_updates_resets_and_priority_are_ignored_on_a_closed_stream(ended: str) -> None:
    end, told = a_stream_that(ended)
    late = window_update(1) + window_update(1, 0) + rst_frame(1)
    assert end.feed(late, frame(frames.PRIORITY, 0, 1, PRIORITY)) == []
    assert end.owner.requests[0].recorder.kinds == told


@pytest.mark.parametrize("ended", ["both", "there"])
def test_data_on_a_closed_stream_is_answered_with_a_reset(ended: str) -> None:
    end, told = a_stream_that(ended)
    late = data_frame(1, b"late", padding=1)
    assert end.feed(late) == [("RstStream", 1, ErrorCode.STREAM_CLOSED)]
    assert end.owner.requests[0].recorder.kinds == told


@pytest.mark.parametrize("ended", ["both", "there"])
def test_headers_on_a_closed_stream_end_the_connection(ended: str) -> None:
    end, _ = a_stream_that(ended)
    said = end.feed(headers_frame(1))
    assert died_of(end, ErrorCode.STREAM_CLOSED, said)


def test_what_was_under_way_when_we_reset_a_stream_is_dropped() -> None:
    end, told = a_stream_that("here")
    late = data_frame(1, b"late") + headers_frame(1, TRAILERS, ended=True)
    assert end.feed(late) == []
    assert end.owner.requests[0].recorder.kinds == told


def test_how_many_resets_are_remembered_is_bounded() -> None:
    end = a_server(nuisances=10**6)
    for stream_id in range(1, 6001, 2):
        end.request(stream_id).stream.reset(CANCEL)
    assert len(end.connection._reset_here) == 1024
    assert end.feed(data_frame(5999, b"late"))[-1][0] == "RstStream"
    assert end.feed(data_frame(5999, b"late")) == []


def test_headers_of_a_stream_the_client_has_seen_end_are_answered_with_a_reset() -> None:
    end = a_client()
    end.open()
    end.feed(headers_frame(1, TRAILERS, ended=True))
    said = end.feed(headers_frame(1, TRAILERS, ended=True))
    assert said == [("RstStream", 1, ErrorCode.STREAM_CLOSED)]


# --- Ends


def test_headers_alone_may_be_a_whole_request_and_a_whole_answer() -> None:
    end = a_server()
    request = end.request(1, ended=True)
    assert request.ended
    assert request.stream.ended_there
    request.stream.send_trailers(encode(ANSWER + TRAILERS))
    assert end.said() == [("Headers", 1, ANSWER + TRAILERS, True)]
    assert not end.connection.streams
    client = a_client()
    _, recorder = client.open()
    client.feed(headers_frame(1, ANSWER + TRAILERS, ended=True))
    assert recorder.told == [("headers", ANSWER + TRAILERS, True)]
    assert not client.connection.streams


def test_trailers_end_a_request() -> None:
    end = a_server()
    request = end.request(1)
    end.feed(data_frame(1, b"x"), headers_frame(1, TRAILERS, ended=True))
    assert request.recorder.told == [("data", b"x"), ("headers", TRAILERS, True)]
    assert request.stream.ended_there


def test_trailers_of_a_request_that_do_not_end_it_break_it() -> None:
    end = a_server()
    request = end.request(1)
    said = end.feed(headers_frame(1, TRAILERS))
    assert said == [("RstStream", 1, ErrorCode.PROTOCOL_ERROR)]
    assert request.recorder.resets == [ErrorCode.PROTOCOL_ERROR]


def test_informational_headers_may_come_before_an_answer() -> None:
    end = a_client()
    _, recorder = end.open()
    early = [(b":status", b"103")]
    end.feed(headers_frame(1, early), headers_frame(1, ANSWER), data_frame(1, b"x", ended=True))
    assert recorder.told == [
        ("headers", early, False),
        ("headers", ANSWER, False),
        ("data", b"x"),
        ("end",),
    ]


def test_a_server_that_has_answered_does_not_want_the_rest_of_the_request() -> None:
    end = a_server()
    request = end.request(1)
    end.feed(data_frame(1, b"a part"))
    request.stream.send_trailers(encode(ANSWER + TRAILERS))
    assert [what[0] for what in end.said()] == ["Headers", "RstStream"]
    assert end.feed(data_frame(1, b"the rest", ended=True)) == []
    assert request.recorder.kinds == ["data"]
    assert not end.connection.streams


def test_a_client_that_has_its_answer_does_not_send_the_rest_of_the_request() -> None:
    end = a_client()
    stream, recorder = end.open(ended=False)
    stream.send_whole(bytes(100_000))
    end.said()
    answer = headers_frame(1, ANSWER + TRAILERS, ended=True)
    assert end.feed(answer) == [("RstStream", 1, ErrorCode.NO_ERROR)]
    assert end.feed(rst_frame(1, ErrorCode.NO_ERROR), window_update(1, 9999)) == []
    # The answer is not followed by a reset, which would be a second end.
    assert recorder.kinds == ["blocked", "headers"]
    assert not end.connection.streams
    assert not end.connection.blocked


def test_a_reset_of_ours_is_not_told_to_its_receiver() -> None:
    end = a_client()
    stream, recorder = end.open()
    end.said()
    stream.reset(CANCEL)
    stream.reset(CANCEL)
    assert end.said() == [("RstStream", 1, CANCEL)]
    assert recorder.told == []
    assert end.feed(headers_frame(1, ANSWER), data_frame(1, b"x"), rst_frame(1)) == []
    assert recorder.told == []


@pytest.mark.parametrize("ended", ["by us", "by the peer", "by the connection"])
def test_nothing_is_sent_on_a_stream_that_is_over(ended: str) -> None:
    end = a_server(request_window_bytes=100)
    request = end.request(1)
    stream = request.stream
    stream.hold()
    end.feed(data_frame(1, bytes(99)))
    if ended == "by us":
        stream.send_headers(encode(ANSWER))
        stream.send_trailers(encode(TRAILERS))
    elif ended == "by the peer":
        end.feed(rst_frame(1))
    else:
        end.connection.lost()
    end.said()
    stream.send_headers(encode(ANSWER))
    stream.send(b"x", 0, 1)
    stream.send(b"", 0, 0)
    stream.send_whole(b"x")
    stream.end()
    stream.send_trailers(encode(TRAILERS))
    stream.cut(encode(TRAILERS))
    stream.reset(CANCEL)
    stream.hold()
    stream.resume()
    stream.pump()
    assert end.said() == []
    assert stream.pending_bytes == 0


def test_a_large_answer_is_cut_with_trailers_at_once() -> None:
    end = a_server()
    stream = end.request(1, ended=True).stream
    stream.send(bytes(100_000), 0, 100_000)
    stream.send_trailers(encode(TRAILERS))
    end.said()
    stream.cut(encode([(b"grpc-status", b"8")]))
    assert end.said() == [("Headers", 1, [(b"grpc-status", b"8")], True)]
    assert not end.connection.streams
    assert end.feed(window_update(1, 10**6), window_update(0, 10**6)) == []


# --- Isolation


@pytest.mark.parametrize("what", ["on_request", "headers", "data", "padded", "end", "drained"])
def test_a_receiver_that_raises_loses_its_stream_alone(what: str) -> None:
    end = a_server()
    other = end.request(1)
    end.owner.fails_on_request = what == "on_request"
    request = end.request(3)
    end.owner.fails_on_request = False
    request.recorder.fails_on = {"data" if what == "padded" else what}
    if what == "headers":
        end.feed(data_frame(3, b"x"), headers_frame(3, TRAILERS, ended=True))
    elif what == "data":
        end.feed(data_frame(3, b"x"))
        end.feed(data_frame(3, b"y"))
    elif what == "padded":
        end.feed(data_frame(3, b"x", padding=1), data_frame(3, b"y", padding=1))
    elif what == "end":
        end.feed(data_frame(3, b"x", ended=True))
    elif what == "drained":
        request.stream.send(bytes(66_000), 0, 66_000)
        end.feed(window_update(3, 66_000), window_update(0, 66_000))
    assert not request.stream.is_open
    assert request.recorder.resets == [ErrorCode.INTERNAL_ERROR]
    assert request.recorder.data in (b"", b"x")
    end.feed(data_frame(1, b"fine", ended=True))
    assert other.recorder.told == [("data", b"fine"), ("end",)]
    assert end.connection.closed is None


def test_a_receiver_that_raises_when_it_ends_is_borne() -> None:
    end = a_server()
    requests = [end.request(i) for i in (1, 3, 5)]
    requests[0].recorder.fails_on = {"reset"}
    end.feed(rst_frame(1))
    requests[1].recorder.fails_on = {"reset"}
    end.connection.lost()
    assert [r.recorder.kinds for r in requests] == [["reset"]] * 3


def test_a_receiver_may_reset_its_stream_while_it_is_told_something() -> None:
    end = a_server()
    request = end.request(1)
    request.stream.on_data = lambda data, start, stop: request.stream.reset(CANCEL)
    said = end.feed(data_frame(1, b"x", ended=True), data_frame(1, b"y"))
    assert said == [("RstStream", 1, CANCEL)]
    assert request.recorder.told == []


# --- How many


def test_streams_beyond_the_limit_are_refused() -> None:
    end = a_server(streams=2)
    first, _ = end.request(1), end.request(3)
    assert end.feed(headers_frame(5)) == [("RstStream", 5, ErrorCode.REFUSED_STREAM)]
    assert end.feed(data_frame(5, b"under way", ended=True)) == []
    first.stream.reset(CANCEL)
    assert end.request(7).stream.id == 7
    assert len(end.owner.requests) == 3


# --- Header blocks


def test_a_header_list_too_large_is_left_to_the_owner_to_answer() -> None:
    end = a_server(header_bytes=1000)
    request = end.request(1, headers=[*REQUEST, (b"x", b"y" * 1000)])
    assert request.oversized
    request.stream.send_trailers(encode([(b":status", b"200"), (b"grpc-status", b"8")]))
    assert not end.request(3).oversized
    assert end.connection.closed is None


def test_a_header_list_many_times_too_large_ends_the_connection() -> None:
    end = a_server(header_bytes=1000)
    said = end.feed(headers_frame(1, [*REQUEST, (b"x", b"y" * 8000)]))
    assert died_of(end, ErrorCode.COMPRESSION_ERROR, said)


def test_an_answers_header_list_too_large_breaks_its_stream() -> None:
    end = a_client(header_bytes=1000)
    _, recorder = end.open()
    end.said()
    said = end.feed(headers_frame(1, [*ANSWER, (b"x", b"y" * 1000)]))
    assert said == [("RstStream", 1, ErrorCode.ENHANCE_YOUR_CALM)]
    assert recorder.resets == [ErrorCode.ENHANCE_YOUR_CALM]


@pytest.mark.parametrize(
    "block",
    [b"\xff\xff\xff", b"\x80", b"\xc5", b"\x00\x05ab", b"\x40\x81\xff\x00", b"\x3f\xff\x7f"],
)
def test_an_invalid_header_block_ends_the_connection(block: bytes) -> None:
    end = a_server()
    said = end.feed(frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20" + block))
    assert died_of(end, ErrorCode.COMPRESSION_ERROR, said)


def test_a_table_is_used_until_its_end_is_acknowledged() -> None:
    end = End(is_client=False)
    end.feed(frames.PREFACE, frames.settings_frame([]))
    encoder = Encoder()
    for stream_id in (1, 3, 5):
        block = encoder.encode([*REQUEST, (b"x-key", b"value")])
        end.feed(frame(frames.HEADERS, frames.END_HEADERS, stream_id, block))
    assert block[-1] >= 0x80, "the encoder used its table"
    end.feed(frame(frames.SETTINGS, frames.ACK, 0))
    encoder.header_table_size = 0
    block = encoder.encode([*REQUEST, (b"x-key", b"value")])
    end.feed(frame(frames.HEADERS, frames.END_HEADERS, 7, block))
    expected = [*REQUEST, (b"x-key", b"value")]
    assert [request.headers for request in end.owner.requests] == [expected] * 4


def test_a_table_that_is_kept_after_our_settings_ends_the_connection() -> None:
    end = a_server()
    said = end.feed(frame(frames.HEADERS, frames.END_HEADERS, 1, encode(REQUEST)))
    assert died_of(end, ErrorCode.COMPRESSION_ERROR, said)


def test_a_header_block_may_be_cut_anywhere() -> None:
    block = block_of(REQUEST)
    for cut in range(len(block) + 1):
        end = a_server()
        end.feed(frame(frames.HEADERS, frames.END_STREAM, 1, block[:cut]))
        assert not end.owner.requests
        end.feed(continuation(1, block[cut:], last=True))
        assert end.owner.requests[0].headers == REQUEST
        assert end.owner.requests[0].ended
        assert end.feed(frame(frames.PING, 0, 0, bytes(8))) == [("Ping", "ACK", bytes(8))]


def test_a_header_block_may_come_octet_by_octet() -> None:
    headers = [*REQUEST[:2], (b":path", b"/a.B/C"), (b"te", b"trailers")]
    end = a_server()
    end.feed(frame(frames.HEADERS, 0, 1, b""))
    for octet in block_of(headers):
        end.feed(continuation(1, bytes((octet,))))
    end.feed(continuation(1, b"", last=True))
    assert end.owner.requests[0].headers == headers


@pytest.mark.parametrize(
    "between",
    [
        data_frame(1, b"x"),
        data_frame(3, b"x"),
        data_frame(1, b""),
        headers_frame(5),
        frame(frames.PING, 0, 0, bytes(8)),
        frames.settings_frame([]),
        frames.window_update(0, 1),
        rst_frame(1),
        frame(0xEE, 0, 0),
        continuation(1, b""),
    ],
)
def test_nothing_may_come_between_the_frames_of_a_header_block(between: bytes) -> None:
    end = a_server()
    end.request(1)
    end.feed(frame(frames.HEADERS, 0, 3, block_of(REQUEST)))
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(between))


def test_a_continuation_of_nothing_ends_the_connection() -> None:
    end = a_server()
    end.request(1)
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, end.feed(continuation(1, b"", last=True)))


@pytest.mark.parametrize(
    ("flags", "payload", "code"),
    [
        (frames.PADDED, b"", ErrorCode.PROTOCOL_ERROR),
        (frames.PADDED, b"\x01", ErrorCode.PROTOCOL_ERROR),
        (frames.PADDED, b"\xff" + bytes(254), ErrorCode.PROTOCOL_ERROR),
        (frames.PRIORITIZED, bytes(4), ErrorCode.FRAME_SIZE_ERROR),
        (frames.PADDED | frames.PRIORITIZED, b"\x01" + bytes(5), ErrorCode.FRAME_SIZE_ERROR),
        (frames.PADDED | frames.PRIORITIZED, b"\x09" + bytes(5), ErrorCode.PROTOCOL_ERROR),
        (frames.PRIORITIZED, bytes((0, 0, 0, 1, 0)), ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_padding_and_priority_of_headers_must_fit(
    flags: int, payload: bytes, code: ErrorCode
) -> None:
    end = a_server()
    said = end.feed(frame(frames.HEADERS, flags | frames.END_HEADERS, 1, payload))
    assert died_of(end, code, said)


@pytest.mark.parametrize(
    ("padded", "prioritized"), list(itertools.product((0, 1, 9), (False, True)))
)
def test_headers_may_be_padded_and_carry_a_priority(padded: int, prioritized: bool) -> None:
    end = a_server()
    payload = (PRIORITY if prioritized else b"") + block_of(REQUEST)
    flags = frames.END_HEADERS | (frames.PRIORITIZED if prioritized else 0)
    if padded:
        flags |= frames.PADDED
        payload = bytes((padded,)) + payload + bytes(padded)
    end.feed(frame(frames.HEADERS, flags, 1, payload))
    assert end.owner.requests[0].headers == REQUEST


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05abcd", b"\xff" * 200])
def test_padding_longer_than_its_data_ends_the_connection(payload: bytes) -> None:
    end = a_server()
    end.request(1)
    said = end.feed(frame(frames.DATA, frames.PADDED, 1, payload))
    assert died_of(end, ErrorCode.PROTOCOL_ERROR, said)


@pytest.mark.parametrize("padding", [0, 1, 7, 255])
def test_padding_is_taken_off_data(padding: int) -> None:
    end = a_server()
    request = end.request(1)
    end.feed(
        data_frame(1, b"abc", padding=padding), data_frame(1, b"d", ended=True, padding=padding)
    )
    assert request.recorder.told == [("data", b"abcd"), ("end",)]


def test_large_header_blocks_of_ours_are_continued() -> None:
    client, server = a_client(), a_server(header_bytes=1 << 17)
    headers: Headers = [*REQUEST, *((b"x-%d" % i, b"v" * 1000) for i in range(100))]
    client.said()
    client.connection.open(Recorder()).send_headers(encode(headers))
    data = client.connection.take()
    found = []
    offset = 0
    while offset < len(data):
        word, flags, stream_id = frames.unpack(data, offset)
        found.append((word & 0xFF, flags, stream_id))
        offset += 9 + (word >> 8)
    first, *middle, last = found
    assert first == (frames.HEADERS, 0, 1)
    assert set(middle) == {(frames.CONTINUATION, 0, 1)}
    assert last == (frames.CONTINUATION, frames.END_HEADERS, 1)
    server.connection.receive(data, 0.0)
    assert server.owner.requests[0].headers == headers
