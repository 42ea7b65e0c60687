"""Random traffic: between two ends of ours, with h2 at the other end, cut anywhere, and broken.

Each case is made from a seed alone; a failure names it, and `-k 'name and seed'` runs it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import ErrorCode, frame
from forebay_wire.core.headers import encode
from forebay_wire.core.stream import Budget, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, ResponseReceived, StreamEnded, StreamReset
from hypothesis import given
from hypothesis import strategies as st

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
    headers_frame,
    rst_frame,
    settings,
)

NEVER_CALM = 10**9


# --- Any cut of the same bytes is the same


def fed(data: bytes, cuts: list[int]) -> tuple[object, ...]:
    end = End(is_client=False)
    end.connection.take()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        end.connection.receive(data[start:stop], 0.0)
    told = [(r.headers, r.ended, r.recorder.told) for r in end.owner.requests]
    return told, end.connection.take(), end.connection.closed


pieces = st.one_of(
    st.builds(headers_frame, st.sampled_from([1, 3, 5, 7]), ended=st.booleans()),
    st.builds(
        data_frame,
        st.sampled_from([1, 3, 5]),
        st.binary(max_size=60),
        ended=st.booleans(),
        padding=st.integers(-1, 20),
    ),
    st.builds(headers_frame, st.sampled_from([1, 3]), st.just(TRAILERS), ended=st.just(True)),
    st.builds(
        lambda i, cut: (
            frame(frames.HEADERS, 0, i, block_of(REQUEST)[:cut])
            + frame(frames.CONTINUATION, frames.END_HEADERS, i, block_of(REQUEST)[cut:])
        ),
        st.sampled_from([9, 11]),
        st.integers(0, 40),
    ),
    st.builds(rst_frame, st.sampled_from([1, 3])),
    st.builds(frames.window_update, st.sampled_from([0, 1, 3]), st.integers(0, 2**31 - 1)),
    st.builds(frame, st.just(frames.PING), st.sampled_from([0, 1]), st.just(0), st.just(bytes(8))),
    st.builds(frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 9), st.binary()),
    st.builds(settings, INITIAL_WINDOW_SIZE=st.integers(0, 2**31)),
    st.binary(max_size=30),
)


@given(st.lists(pieces, max_size=12), st.lists(st.integers(0, 2000), max_size=12))
def test_any_cut_of_the_same_bytes_is_the_same(parts: list[bytes], cuts: list[int]) -> None:
    data = frames.PREFACE + settings() + headers_frame(1) + b"".join(parts)
    assert fed(data, cuts) == fed(data, [])


@given(st.lists(pieces, max_size=6))
def test_octet_by_octet_is_the_same(parts: list[bytes]) -> None:
    data = frames.PREFACE + settings() + headers_frame(1) + b"".join(parts)
    assert fed(data, list(range(len(data)))) == fed(data, [])


# --- Two ends of ours


@dataclasses.dataclass(eq=False)
class Side:
    """One direction of one stream, as its sender knows it."""

    stream: Stream
    recorder: Recorder
    sent: bytearray = dataclasses.field(default_factory=bytearray)
    has_begun: bool = False
    is_whole: bool = False
    was_reset: bool = False


class Pair:
    """A client and a server, and what is under way between them."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.budgets = [Budget(rng.choice((30_000, 10**6, 10**9))) for _ in range(2)]
        windows = [rng.choice((50, 3_000, 65_535, 200_000)) for _ in range(2)]
        options: dict[str, Any] = {
            "nuisances": NEVER_CALM,
            "streams": rng.choice((1, 5, 100)),
            "stream_window_bytes": windows[0],
            "request_window_bytes": windows[1],
            "connection_window_bytes": rng.choice((1, 70_000, 1 << 20)),
        }
        self.client = End(is_client=True, budget=self.budgets[0], **options)
        self.server = End(is_client=False, budget=self.budgets[1], **options)
        self.ends = (self.client, self.server)
        self.windows = (windows[0], windows[1])
        self.size = min(20_000, max(30, min(windows) * 3))
        self.under_way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.requests: dict[int, Side] = {}
        self.answers: dict[int, Side] = {}
        self.shrunk = [False, False]

    def step(self) -> None:
        rng = self.rng
        act = rng.choice(
            (self.open, self.send, self.send, self.send, self.finish, self.hold, self.reset)
            + (self.pause, self.resize)
            + (self.move,) * 8
        )
        act()

    def open(self) -> None:
        if not self.client.connection.can_open:
            return
        recorder = Recorder()
        stream = self.client.connection.open(recorder)
        stream.send_headers(encode(REQUEST))
        self.requests[stream.id] = Side(stream, recorder, has_begun=True)

    def sides(self) -> list[Side]:
        return [
            side
            for side in (*self.requests.values(), *self.answers.values())
            if side.stream.is_open
        ]

    def any_side(self) -> Side | None:
        sides = self.sides()
        return self.rng.choice(sides) if sides else None

    def send(self) -> None:
        side = self.any_side()
        if side is None or side.stream.ended_here:
            return
        if not side.has_begun:
            side.has_begun = True
            side.stream.send_headers(encode(ANSWER))
        payload = self.rng.randbytes(self.rng.randrange(1, self.size))
        side.sent += payload
        side.stream.send(b"xx" + payload + b"y", 2, 2 + len(payload))

    def finish(self) -> None:
        side = self.any_side()
        if side is None or side.stream.ended_here:
            return
        side.is_whole = True
        if side in self.requests.values():
            if self.rng.random() < 0.5:
                side.stream.end()
            else:
                for _ in range(self.rng.randrange(3)):
                    piece = self.rng.randbytes(self.rng.randrange(1, 30))
                    side.sent += piece
                    side.stream.send(piece, 0, len(piece))
                payload = self.rng.randbytes(self.rng.randrange(self.rng.choice((30, self.size))))
                side.sent += payload
                side.stream.send_whole(payload)
        else:
            side.stream.send_trailers(encode(TRAILERS if side.has_begun else ANSWER + TRAILERS))

    def hold(self) -> None:
        side = self.any_side()
        if side is not None:
            if self.rng.random() < 0.3:
                side.stream.hold()
            else:
                side.stream.resume()

    def reset(self) -> None:
        side = self.any_side()
        if side is not None and self.rng.random() < 0.1:
            side.was_reset = True
            side.stream.reset(ErrorCode.CANCEL)

    def pause(self) -> None:
        connection = self.rng.choice(self.ends).connection
        if connection.is_paused:
            connection.resume()
        elif self.rng.random() < 0.3:
            connection.pause()

    def resize(self, *, back: bool = False) -> None:
        """Settings that an end does not know it sent: its peer gets a smaller window, which must
        be widened again for anything to move."""
        for index in (0, 1):
            if back and not self.shrunk[index]:
                continue
            if not back and (self.rng.random() < 0.7 or not self.ends[index].connection.is_greeted):
                continue
            self.collect()
            self.shrunk[index] = not self.shrunk[index]
            full = self.windows[index]
            size = self.rng.randrange(full) if self.shrunk[index] else full
            self.under_way[index].append(settings(INITIAL_WINDOW_SIZE=size))

    def collect(self) -> None:
        for end, way in zip(self.ends, self.under_way, strict=True):
            data = end.connection.take()
            if data:
                way.append(data)

    def move(self) -> None:
        self.collect()
        index = self.rng.randrange(2)
        way = self.under_way[index]
        if not way:
            return
        data = way.popleft()
        cut = self.rng.randrange(len(data) + 1) if self.rng.random() < 0.5 else len(data)
        if cut < len(data):
            way.appendleft(data[cut:])
        self.ends[1 - index].connection.receive(data[:cut], 0.0)
        for request in self.server.owner.requests:
            if request.stream.id not in self.answers:
                self.answers[request.stream.id] = Side(request.stream, request.recorder)
        self.check()

    def check(self) -> None:
        for end, budget in zip(self.ends, self.budgets, strict=True):
            connection = end.connection
            assert connection.closed is None
            assert connection.window >= 0
            waiting = sum(stream.pending_bytes for stream in connection.streams.values())
            assert budget.used_bytes == waiting
            assert connection.blocked.keys() <= connection.streams.keys()
        for side in self.sides():
            assert side.stream.receive_left >= 0

    def settle(self) -> None:
        """Let everything that was begun come to its end."""
        self.resize(back=True)
        for end in self.ends:
            end.connection.resume()
        for _ in range(200_000):
            for side in self.sides():
                side.stream.resume()
                if not side.stream.ended_here:
                    side.is_whole = True
                    if side in self.requests.values():
                        side.stream.end()
                    else:
                        block = TRAILERS if side.has_begun else ANSWER + TRAILERS
                        side.stream.send_trailers(encode(block))
            self.collect()
            if not any(self.under_way) and not self.sides():
                return
            self.move()
        raise AssertionError("it came to no end")


@pytest.mark.parametrize("seed", range(60))
def test_two_ends_deliver_what_was_sent_in_order_and_leave_nothing(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(1500):
        pair.step()
    pair.settle()
    assert pair.requests
    for end, budget in zip(pair.ends, pair.budgets, strict=True):
        assert not end.connection.streams
        assert not end.connection.blocked
        assert not end.connection._buffer
        assert end.connection._assembling is None
        assert budget.used_bytes == 0
    for stream_id, request in pair.requests.items():
        answer = pair.answers.get(stream_id)
        if answer is None:
            assert request.was_reset or request.recorder.resets
            continue
        check_delivery(request, answer)
        check_delivery(answer, request)
        check_ends(request.recorder, is_client=True, was_reset=request.was_reset)
        check_ends(answer.recorder, is_client=False, was_reset=answer.was_reset)


def check_delivery(sender: Side, receiver: Side) -> None:
    """What came is how what was sent begins; all of it, if the receiver heard of the end."""
    got = receiver.recorder.data
    assert sender.sent.startswith(got)
    if heard_end(receiver.recorder):
        assert got == sender.sent
        assert sender.is_whole


def heard_end(recorder: Recorder) -> bool:
    return any(what[0] == "end" or (what[0] == "headers" and what[2]) for what in recorder.told)


def check_ends(recorder: Recorder, *, is_client: bool, was_reset: bool) -> None:
    ends = sum(what[0] == "end" or (what[0] == "headers" and what[2]) for what in recorder.told)
    resets = recorder.resets
    assert ErrorCode.FLOW_CONTROL_ERROR not in resets
    assert ErrorCode.INTERNAL_ERROR not in resets
    assert ErrorCode.PROTOCOL_ERROR not in resets
    if is_client:
        assert ends + len(resets) <= 1
        assert was_reset or ends + len(resets) == 1
    else:
        assert ends <= 1
        assert len(resets) <= 1
    if ends or resets:
        last = [what for what in recorder.told if what[0] not in ("blocked", "drained")][-1]
        assert last[0] in ("end", "reset", "headers")


# --- h2 at the other end


class Strict:
    """h2 at the other end of a connection; it raises when we break a rule."""

    def __init__(self, end: End, seed: int) -> None:
        self.rng = random.Random(seed)
        self.end = end
        is_client = not end.connection.is_client
        self.h2 = H2Connection(H2Configuration(client_side=is_client, header_encoding=None))
        self.h2.initiate_connection()
        self.sent: dict[int, bytearray] = {}
        self.got: dict[int, bytearray] = {}
        self.waiting: dict[int, deque[bytes]] = {}
        self.ended: set[int] = set()
        self.opened: list[int] = []

    def queue(self, stream_id: int, payload: bytes) -> None:
        self.sent.setdefault(stream_id, bytearray()).extend(payload)
        self.waiting.setdefault(stream_id, deque()).append(payload)

    def exchange(self) -> bool:
        """Move bytes both ways, in pieces; whether there were any."""
        moved = False
        for stream_id, parts in list(self.waiting.items()):
            while parts:
                part = parts.popleft()
                room = self.h2.local_flow_control_window(stream_id)
                room = min(room, self.h2.max_outbound_frame_size)
                padding = self.rng.choice((None, 0, 9)) if room > 10 else None
                size = min(len(part), room if padding is None else room - 1 - padding)
                if size <= 0 < len(part):
                    parts.appendleft(part)
                    break
                if size < len(part):
                    parts.appendleft(part[size:])
                self.h2.send_data(stream_id, part[:size], pad_length=padding)
            if not parts:
                del self.waiting[stream_id]
                self.h2.end_stream(stream_id)
        data = self.h2.data_to_send()
        while data:
            moved = True
            cut = self.rng.randrange(1, len(data) + 1)
            self.end.connection.receive(data[:cut], 0.0)
            data = data[cut:]
        data = self.end.connection.take()
        while data:
            moved = True
            cut = self.rng.randrange(1, len(data) + 1)
            self._note(self.h2.receive_data(data[:cut]))
            data = data[cut:]
        return moved

    def _note(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, (RequestReceived, ResponseReceived)):
                self.opened.append(event.stream_id)
            elif isinstance(event, DataReceived):
                self.got.setdefault(event.stream_id, bytearray()).extend(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)
            else:
                assert not isinstance(event, StreamReset)


def rounds(strict: Strict) -> Iterator[int]:
    """Until nothing moves any more."""
    for index in range(10_000):
        if not strict.exchange():
            return
        yield index
    raise AssertionError("it came to no end")


@pytest.mark.parametrize("seed", range(12))
def test_a_client_of_h2_and_our_server_understand_each_other(seed: int) -> None:
    rng = random.Random(seed)
    end = End(is_client=False, request_window_bytes=rng.choice((100, 5_000, 65_535, 300_000)))
    strict = Strict(end, seed)
    if seed % 2:
        strict.h2.update_settings({4: rng.choice((0, 10, 5_000))})
    for stream_id in range(1, 21, 2):
        strict.h2.send_headers(stream_id, REQUEST)
        strict.queue(stream_id, rng.randbytes(rng.randrange(20_000)))
    answers: dict[int, bytes] = {}
    for index in rounds(strict):
        if index == 20 and seed % 2:
            strict.h2.update_settings({4: rng.choice((7_000, 100_000))})
        for request in end.owner.requests:
            stream = request.stream
            if stream.id in answers or not stream.ended_there:
                continue
            payload = answers[stream.id] = rng.randbytes(rng.randrange(100_000))
            stream.send_headers(encode(ANSWER))
            half = len(payload) // 2
            stream.send(payload, 0, half)
            stream.send(payload, half, len(payload))
            stream.send_trailers(encode(TRAILERS))
        if index == 40 and seed % 2:
            strict.h2.update_settings({4: 200_000})
    if seed % 2:
        strict.h2.update_settings({4: 200_000})
        assert list(rounds(strict))
    assert len(answers) == 10
    for request in end.owner.requests:
        assert request.recorder.data == strict.sent[request.stream.id]
        assert strict.got[request.stream.id] == answers[request.stream.id]
    assert strict.ended == set(answers)
    assert not end.connection.streams


@pytest.mark.parametrize("seed", range(12))
def test_our_client_and_a_server_of_h2_understand_each_other(seed: int) -> None:
    rng = random.Random(seed)
    end = End(is_client=True, stream_window_bytes=rng.choice((100, 5_000, 65_535, 300_000)))
    strict = Strict(end, seed)
    assert list(rounds(strict))
    sent: dict[int, bytes] = {}
    recorders: dict[int, Recorder] = {}
    for _ in range(10):
        recorder = Recorder()
        stream = end.connection.open(recorder)
        stream.send_headers(encode(REQUEST))
        payload = sent[stream.id] = rng.randbytes(rng.randrange(1, 100_000))
        stream.send_whole(payload)
        recorders[stream.id] = recorder
    for _ in rounds(strict):
        for stream_id in set(strict.ended) - strict.sent.keys():
            strict.h2.send_headers(stream_id, ANSWER)
            strict.queue(stream_id, rng.randbytes(rng.randrange(20_000)))
    for stream_id, recorder in recorders.items():
        assert strict.got[stream_id] == sent[stream_id]
        assert recorder.data == strict.sent[stream_id]
        told = [what for what in recorder.told if what[0] not in ("blocked", "drained")]
        assert told[0] == ("headers", ANSWER, False)
        assert told[-1] == ("end",)
        assert recorder.resets == []
    assert not end.connection.streams


# --- Broken traffic


def recorded(seed: int) -> tuple[list[bytes], list[bytes]]:
    """Valid frames from a client to a server, and back; without the preface."""
    pair = Pair(seed)
    ways: tuple[list[bytes], list[bytes]] = ([], [])
    collect = pair.collect

    def collect_and_keep() -> None:
        before = [len(way) for way in pair.under_way]
        collect()
        for kept, way, size in zip(ways, pair.under_way, before, strict=True):
            kept.extend(list(way)[size:])

    pair.collect = collect_and_keep  # type: ignore[method-assign]
    for _ in range(400):
        pair.step()
    pair.settle()
    return cut_frames(b"".join(ways[0])), cut_frames(b"".join(ways[1]))


def cut_frames(data: bytes) -> list[bytes]:
    data = data.removeprefix(frames.PREFACE)
    found = []
    while data:
        size = 9 + int.from_bytes(data[:3], "big")
        found.append(data[:size])
        data = data[size:]
    return found


def broken(rng: random.Random, traffic: list[bytes]) -> tuple[list[bytes], int]:
    """Traffic in which about every third frame is wrong, and how many are."""
    parts = list(traffic)
    count = 0
    for index in range(len(parts)):
        part = bytearray(parts[index])
        kind = rng.randrange(24)
        count += kind < 8
        if kind == 0:
            part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            part[rng.randrange(min(9, len(part)))] = rng.randrange(256)
        elif kind == 2:
            part = part[: rng.randrange(len(part))]
        elif kind == 3:
            length = int.from_bytes(part[:3], "big") + rng.randrange(-9, 10)
            part[:3] = max(0, length).to_bytes(3, "big")
        elif kind == 4:
            other = rng.randrange(len(parts))
            parts[other], parts[index] = parts[index], parts[other]
            continue
        elif kind == 5:
            part = part + part
        elif kind == 6:
            part = part + rng.randbytes(rng.randrange(30))
        elif kind == 7:
            part = bytearray()
        if kind < 8 and part[9:] and rng.random() < 0.5:
            # Keep the frame whole, so that what follows is still looked at.
            part[:3] = (len(part) - 9).to_bytes(3, "big")
        parts[index] = bytes(part)
    return parts, count


@pytest.mark.parametrize("seed", range(20))
def test_broken_traffic_never_raises_and_is_never_kept(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """500 broken frames, and twice as many good ones, for each seed."""
    rng = random.Random(seed)
    to_server, to_client = recorded(1000 + seed)
    count = 0
    while count < 500:
        is_client = rng.random() < 0.5
        traffic = to_client if is_client else to_server
        start = rng.randrange(len(traffic))
        parts, more = broken(rng, traffic[:1] + traffic[start : start + 40])
        count += more
        budget = Budget(10**6)
        end = (a_client if is_client else a_server)(budget=budget, streams=10)
        if is_client:
            for _ in range(20):
                end.open(ended=rng.random() < 0.5)
        data = b"".join(parts)
        while data and end.connection.closed is None:
            size = rng.randrange(1, 3000)
            end.connection.receive(data[:size], 0.0)
            data = data[size:]
            for request in end.owner.requests[-3:]:
                request.stream.send(bytes(100), 0, 100)
            end.connection.take()
            assert len(end.connection._buffer) < 9 + 16384
            assert len(end.connection.streams) <= 20
            assert len(end.connection._reset_here) <= 1024
            assert budget.used_bytes == sum(
                stream.pending_bytes for stream in end.connection.streams.values()
            )
        end.connection.lost()
        assert not end.connection.streams
        assert budget.used_bytes == 0
        assert end.owner.closed == 1
        assert all(len(request.recorder.resets) <= 1 for request in end.owner.requests)
    assert not caplog.records, "the core logs only its own faults"
