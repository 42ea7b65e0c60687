"""Follows what vLLM's core has in its prefix cache, and which prompts it was given.

The core publishes its events over ZMQ. They come on a Unix socket in a private directory, which is
gone once both ends have met.
"""

import asyncio
import functools
import logging
from array import array
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from forebay_engine.core.kv_events import KvEvents
from forebay_engine.core.prefix_cache import fold_blocks
from forebay_engine.runner.backend import Call
from forebay_engine.runner.cache_report import CacheReport
from forebay_engine.runner.vllm.arguments import CACHE_MESSAGES_MAX

_log = logging.getLogger(__name__)
_MEET_MS = 5000
_READ_MAX = 512
"""Messages that are read before others of the loop have their turn."""


class EngineCache:
    """The prefix cache of one engine that is up."""

    def __init__(self, report: CacheReport, *, block_tokens: int) -> None:
        self._report = report
        self._block_tokens = block_tokens
        self._events = KvEvents(
            report.cache, block_tokens=block_tokens, blocks_max=report.blocks_max
        )
        self._socket: Any = None
        self._listens = False

    async def follow(self, endpoint: str) -> None:
        """Meet the core at its endpoint, and follow it. Without the core, nothing is reported."""
        socket = zmq.Context().socket(zmq.SUB)
        socket.set_hwm(CACHE_MESSAGES_MAX)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(endpoint)
            met = await asyncio.to_thread(_has_met, monitor)
        finally:
            socket.disable_monitor()
        if not met:
            _log.warning("the engine tells nothing of its prefix cache")
            socket.close(linger=0)
            return
        self._socket = socket
        self._report.read_from(self._read, stop=self._close)
        self._listen()

    def note(self, call: Call, prompt: Any) -> None:
        """The engine is given a prompt of a call."""
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if tokens and self._socket is not None:
            blocks: Callable[[], list[int]] = functools.partial(
                _blocks_of, tokens, self._block_tokens
            )
            self._report.ran(
                call, tokens=len(tokens), blocks=blocks, block_tokens=self._block_tokens
            )

    def clear(self) -> None:
        """The engine has given its memory up, which it tells with its next step only."""
        self._events.clear()
        self._report.wake()

    def _listen(self) -> None:
        """Have the report ask when there is something, which wakes this process once for many."""
        if not self._listens:
            self._listens = True
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_news)
        # The descriptor only tells of what came after the last look.
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._on_news()

    def _on_news(self) -> None:
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._report.wake()

    def _close(self) -> None:
        if self._listens:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._socket = None

    def _read(self) -> None:
        gaps = self._events.gaps
        try:
            for _ in range(_READ_MAX):
                _, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                self._events.take_in(int.from_bytes(number, "big"), payload)
        except zmq.Again:
            pass
        if self._events.gaps > gaps:
            _log.warning("events of the prefix cache were lost: it is learned anew")
        if self._events.follows:
            self._report.begin()
        self._listen()


def _has_met(monitor: Any) -> bool:
    if not monitor.poll(_MEET_MS):
        return False
    return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def _blocks_of(tokens: list[int], block_tokens: int) -> list[int]:
    return fold_blocks(array("I", tokens).tobytes(), block_tokens)
