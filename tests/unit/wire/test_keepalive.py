"""Pings are judged by a clock that stands still within a turn of the event loop."""

from collections.abc import Callable
from typing import Any

import pytest
from forebay_wire.core import frames
from forebay_wire.core.frames import frame
from forebay_wire.core.limits import Limits
from forebay_wire.transport import Turn, Wire, Wires

from tests.http2_peer import ANSWER, headers_frame, read_frames, settings

_LIMITS = Limits(keepalive_s=10, keepalive_timeout_s=5)
_INTRODUCTION = settings() + frame(frames.SETTINGS, frames.ACK, 0)
_ACK = frame(frames.PING, frames.ACK, 0, b"forebay!")


class _Loop:
    """An event loop whose turns and whose time are the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._soon: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Never: the test ticks."""

    def turn(self) -> None:
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()


class _Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


class _Receiver:
    """Hears everything and wants nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class _End:
    """One end of a connection with one open stream, after its peer has said all it will."""

    def __init__(self, *, is_client: bool) -> None:
        self.loop = _Loop()
        self.transport = _Transport()
        wires: Any = Wires(_LIMITS)
        wires.loop, wires.turn = self.loop, Turn(self.loop)  # type: ignore[arg-type]
        self.wire = Wire(wires, is_client=is_client, on_request=lambda *_: None)
        self.wire.connection_made(self.transport)
        if is_client:
            self.wire.data_received(_INTRODUCTION)
            stream = self.wire.connection.open(_Receiver())
            stream.send_headers(b"")
            stream.end()
            self.wire.data_received(headers_frame(stream.id, ANSWER))
        else:
            self.wire.data_received(frames.PREFACE + _INTRODUCTION + headers_frame(1, ended=True))
        self.loop.turn()

    def pinged_after(self, seconds: float) -> bool:
        """Let time go by; whether it asks for a sign of life."""
        self.transport.written.clear()
        self.loop.now += seconds
        self.wire.tick(self.loop.now)
        self.loop.turn()
        return any(
            type(each).__name__ == "PingFrame" and "ACK" not in each.flags
            for data in self.transport.written
            for each in read_frames(data)
        )


@pytest.mark.parametrize("is_client", [True, False])
async def test_an_answer_in_the_same_millisecond_is_an_answer(is_client: bool) -> None:
    end = _End(is_client=is_client)
    assert end.pinged_after(10)
    end.wire.data_received(_ACK)
    assert not end.pinged_after(5.5)
    assert not end.transport.is_aborted
    assert len(end.wire.connection.streams) == 1
    assert end.pinged_after(4.5), "it goes on asking"


@pytest.mark.parametrize("is_client", [True, False])
async def test_no_answer_ends_the_connection(is_client: bool) -> None:
    end = _End(is_client=is_client)
    assert end.pinged_after(10)
    assert not end.pinged_after(5)
    assert not end.transport.is_aborted
    assert not end.pinged_after(0.5)
    assert end.transport.is_aborted
    assert not end.wire.connection.streams
