"""A peer cannot make us work for nothing: each kind of flood ends, and no busy peer is taken for
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import ErrorCode, frame
from forebay_wire.core.headers import encode
from forebay_wire.core.patience import Patience

from tests.http2_peer import (
    ANSWER,
    REQUEST,
    TRAILERS,
    WIDE,
    End,
    a_client,
    a_server,
    block_of,
    data_frame,
    headers_frame,
    rst_frame,
    settings,
)

BURST = 1000
Flood = Callable[[End], Iterator[bytes]]


def odd() -> Iterator[int]:
    return iter(range(3, 2**31, 2))


def repeat(what: bytes) -> Flood:
    def flood(end: End) -> Iterator[bytes]:
        while True:
            yield what

    return flood


def rapid_reset(end: End) -> Iterator[bytes]:
    for stream_id in odd():
        yield headers_frame(stream_id, ended=True) + rst_frame(stream_id)


def reset_by_us(fault: Callable[[int], bytes]) -> Flood:
    """The client makes us reset its streams, which leaves it within the limit on streams."""

    def flood(end: End) -> Iterator[bytes]:
        for stream_id in odd():
            yield headers_frame(stream_id, ended=True) + fault(stream_id)

    return flood


def refused_streams(end: End) -> Iterator[bytes]:
    for stream_id in odd():
        yield headers_frame(stream_id)


def headers_on_a_reset_stream(end: End) -> Iterator[bytes]:
    end.owner.requests[0].stream.reset(ErrorCode.CANCEL)
    while True:
        yield headers_frame(1, TRAILERS, ended=True)


def data_on_a_closed_stream(end: End) -> Iterator[bytes]:
    end.feed(rst_frame(1))
    while True:
        yield data_frame(1, b"x")


def dribble(end: End) -> Iterator[bytes]:
    """Widens windows octet by octet, and so makes us send a frame per octet."""
    end.owner.requests[0].stream.send(bytes(10**6), 0, 10**6)
    while True:
        yield frames.window_update(1, 1) + frames.window_update(0, 1)


FLOODS: dict[str, Flood] = {
    "ping": repeat(frame(frames.PING, 0, 0, bytes(8))),
    "ping answers": repeat(frame(frames.PING, frames.ACK, 0, bytes(8))),
    "settings": repeat(settings()),
    "settings that change windows": repeat(
        settings(INITIAL_WINDOW_SIZE=0) + settings(INITIAL_WINDOW_SIZE=9)
    ),
    "settings acknowledgements": repeat(frame(frames.SETTINGS, frames.ACK, 0)),
    "empty data": repeat(data_frame(1, b"")),
    "padding alone": repeat(data_frame(1, b"", padding=9)),
    "priority": repeat(frame(frames.PRIORITY, 0, 99, bytes(5))),
    "window updates of one octet": repeat(frames.window_update(0, 1)),
    "window updates of one octet on a stream": repeat(frames.window_update(1, 1)),
    "window updates of nothing on a closed stream": repeat(frames.window_update(1, 1)),
    "unknown frames": repeat(frame(0xEE, 0, 0)),
    "goaway": repeat(frames.goaway(0, ErrorCode.NO_ERROR)),
    "resets of a closed stream": repeat(rst_frame(1)),
    "rapid reset": rapid_reset,
    "resets by us, for an empty window update": reset_by_us(lambda i: frames.window_update(i, 0)),
    "resets by us, for a window that overflows": reset_by_us(
        lambda i: frames.window_update(i, WIDE)
    ),
    "resets by us, for data after the end": reset_by_us(lambda i: data_frame(i, b"x")),
    "resets by us, for headers after the end": reset_by_us(lambda i: headers_frame(i, TRAILERS)),
    "resets by us, for a priority": reset_by_us(
        lambda i: frame(frames.PRIORITY, 0, i, i.to_bytes(4, "big") + b"\0")
    ),
    "resets by us, for a priority's size": reset_by_us(lambda i: frame(frames.PRIORITY, 0, i)),
    "refused streams": refused_streams,
    "headers on a reset stream": headers_on_a_reset_stream,
    "data on a closed stream": data_on_a_closed_stream,
    "dribble": dribble,
}


def frames_borne(flood: Flood, end: End, *, per_s: float = 0.0, at_most: int = 40 * BURST) -> int:
    """How often a flood's pattern is taken before the connection ends."""
    for count, part in enumerate(flood(end)):
        end.now += 0 if not per_s else 1 / per_s
        end.connection.receive(part, end.now)
        end.connection.take()
        if end.connection.closed is not None:
            assert end.connection.closed is ErrorCode.ENHANCE_YOUR_CALM
            return count
        if count >= at_most:
            break
    return at_most


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_with_enhance_your_calm(name: str) -> None:
    end = a_server(nuisances=BURST, nuisances_per_s=200.0, streams=100)
    end.request(1)
    assert frames_borne(FLOODS[name], end) <= BURST * 1.3
    assert not end.connection.streams
    assert not end.connection.blocked
    assert end.owner.closed == 1


@pytest.mark.parametrize("name", ["ping", "rapid reset", "dribble", "empty data"])
def test_a_flood_ends_also_when_it_is_spread_over_time(name: str) -> None:
    end = a_server(nuisances=BURST, nuisances_per_s=200.0, streams=100)
    end.request(1)
    assert frames_borne(FLOODS[name], end, per_s=1000.0) <= BURST * 2.5


def test_a_peer_below_the_rate_is_borne_for_ever() -> None:
    end = a_server(nuisances=BURST, nuisances_per_s=200.0)
    end.request(1)
    assert frames_borne(FLOODS["ping"], end, per_s=190.0) == 40 * BURST


def test_a_client_is_guarded_as_a_server_is() -> None:
    for name in ("ping", "settings", "unknown frames", "empty data", "window updates of one octet"):
        end = a_client(nuisances=BURST)
        end.open()
        assert frames_borne(FLOODS[name], end) <= BURST * 1.3


def test_the_rapid_reset_of_streams_ends_each_of_them() -> None:
    end = a_server(nuisances=BURST, streams=100)
    end.request(1)
    frames_borne(rapid_reset, end)
    assert all(request.recorder.kinds == ["reset"] for request in end.owner.requests)
    assert len(end.owner.requests) <= BURST + 1


@pytest.mark.parametrize(("size", "most"), [(0, 63), (1, 63), (16384, 15)])
def test_a_header_block_without_end_ends_the_connection(size: int, most: int) -> None:
    end = a_server(header_bytes=32 << 10)
    end.feed(frame(frames.HEADERS, 0, 1, block_of(REQUEST)))
    flood = repeat(frame(frames.CONTINUATION, 0, 1, bytes(size)))
    assert frames_borne(flood, end) == most
    assert not end.owner.requests


# --- Peers that are only busy


@pytest.mark.parametrize("streams", [1, 100, 1000])
@pytest.mark.parametrize("stall", [1, 25])
def test_a_reader_that_acknowledges_each_message_twice_is_never_cut(
    streams: int, stall: int
) -> None:
    """Many clients send a WINDOW_UPDATE for the stream and one for the connection, each time, and
    all at once after a stall; some measure the bandwidth with a ping each time."""
    end = a_server()
    end.feed(settings(INITIAL_WINDOW_SIZE=1 << 20), frames.window_update(0, 1 << 30))
    requests = [end.request(1 + 2 * i, ended=True) for i in range(streams)]
    ids = [request.stream.id for request in requests]
    token = bytes(120)
    steps = max(50, 20_000 // streams) // stall
    for _ in range(steps):
        for _ in range(stall):
            for request in requests:
                request.stream.send(token, 0, 120)
            end.now += 0.0001
            end.connection.take()
        answers = [frames.window_update(i, 120) + frames.window_update(0, 120) for i in ids]
        end.connection.receive(b"".join(answers * stall), end.now)
        end.connection.receive(frame(frames.PING, 0, 0, bytes(8)), end.now)
        assert end.connection.closed is None
    end.connection.take()


def test_a_slow_reader_that_acknowledges_each_message_is_never_cut() -> None:
    """Its window is always used up, and ends within a message."""
    end = a_server()
    request = end.request(1, ended=True)
    for _ in range(1000):
        request.stream.send(bytes(120), 0, 120)
    for _ in range(400):
        end.feed(frames.window_update(1, 120), frames.window_update(0, 120))
        assert end.connection.closed is None


def test_callers_of_whom_one_in_ten_leaves_are_never_cut() -> None:
    end = a_server()
    for index in range(20_000):
        stream_id = 1 + 2 * index
        request = end.request(stream_id, ended=True)
        if index % 10 == 0:
            end.connection.receive(rst_frame(stream_id), 0.0)
        else:
            request.stream.send_headers(encode(ANSWER))
            request.stream.send(b"x" * 20, 0, 20)
            request.stream.send_trailers(encode(TRAILERS))
            end.connection.receive(frames.window_update(0, 20), 0.0)
        end.connection.take()
        assert end.connection.closed is None


def test_a_server_that_acknowledges_each_request_is_never_cut() -> None:
    end = a_client()
    end.feed(frames.window_update(0, 1 << 30))
    for _ in range(10_000):
        stream, _ = end.open(ended=False)
        stream.send_whole(bytes(1000))
        end.connection.take()
        end.connection.receive(
            frames.window_update(stream.id, 1000)
            + frames.window_update(0, 1000)
            + frame(frames.PING, 0, 0, bytes(8))
            + headers_frame(stream.id, ANSWER + TRAILERS, ended=True),
            0.0,
        )
        assert end.connection.closed is None


def test_a_server_that_acknowledges_each_frame_of_an_upload_is_never_cut() -> None:
    end = a_client()
    stream, _ = end.open(ended=False)
    stream.send_whole(bytes(8 << 20))
    while stream.pending_bytes:
        for what in end.said():
            if what[0] == "Data":
                size = len(what[2])
                end.connection.receive(
                    frames.window_update(stream.id, size) + frames.window_update(0, size), 0.0
                )
        assert end.connection.closed is None


def test_data_that_is_padded_or_tiny_is_no_nuisance() -> None:
    end = a_server()
    request = end.request(1)
    for _ in range(3000):
        end.feed(data_frame(1, b"x", padding=1), data_frame(1, b"y"))
    assert request.recorder.data == b"xy" * 3000


def test_a_callers_streams_may_all_be_reset_at_once() -> None:
    """A client whose connection pool closes leaves a full connection's worth of calls."""
    end = a_server(streams=900)
    ids = range(1, 1801, 2)
    for stream_id in ids:
        end.request(stream_id, ended=True)
    end.feed(*(rst_frame(i) for i in ids))
    assert end.connection.closed is None


# --- Patience by itself


def test_patience_comes_back_with_time_and_with_what_is_written() -> None:
    patience = Patience(burst=10, per_s=2.0, now=0.0)
    assert [patience.bear(0.0) for _ in range(9)] == [True] * 9
    assert not patience.bear(0.0)
    patience = Patience(burst=10, per_s=2.0, now=0.0)
    for _ in range(9):
        assert patience.bear(0.0)
    patience.earn(6)
    assert [patience.bear(0.0) for _ in range(3)] == [True] * 3
    assert patience.bear(100.0)
    assert [patience.bear(100.0) for _ in range(9)] == [True] * 9
    assert not patience.bear(100.0)


def test_patience_has_a_maximum() -> None:
    patience = Patience(burst=10, per_s=2.0, now=0.0)
    patience.earn(10**9)
    borne = 0
    while patience.bear(10**9):
        borne += 1
        assert borne < 100
    assert patience.bear_update(0.0)
