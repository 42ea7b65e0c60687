"""An HTTP/1.1 server whose every answer has OpenAI's shape, also where the request was no HTTP.

Drain: idle connections close at once, new work is refused with DRAINING while the work in flight
ends; what is left after the grace is cut, and an answer that is cut says so in its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from email.utils import formatdate

from forebay_wire.core.cors import Cors
from forebay_wire.core.http1 import HttpLimits, RequestHead, Writer
from forebay_wire.exchange import Endpoint, Find
from forebay_wire.http1 import Connection
from forebay_wire.http1_exchange import Http1Exchange, draining

# After the grace, what was cut has this long to reach its client.
_LAST_WORDS_S = 1.0
_SWEEP_S_MAX = 1.0
_HANDSHAKE_S = 10.0


class HttpServer:
    """Serves what `find` gives for a method and a path."""

    def __init__(self, find: Find, limits: HttpLimits, *, cors: Cors | None = None) -> None:
        """Without `cors` no answer is for pages of other origins."""
        self.limits = limits
        self.cors = cors
        self._find = find
        self.writer = Writer("forebay")
        self.connections: set[Connection] = set()
        self.stalled: set[Connection] = set()
        self.kept_bytes = 0
        self._unflushed: list[Connection] = []
        self._work: set[Http1Exchange] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_empty = asyncio.Event()
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: list[asyncio.Server] = []
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._date_s = 0
        self._date = b""

    def find(self, head: RequestHead) -> Endpoint:
        """What answers a request. Raises ForebayError where nothing does."""
        cors = self.cors
        if cors is not None and (method := cors.asked(head)) is not None:
            self._find(method, head.path)
            told = cors.preflight(head)
            return Endpoint(lambda exchange: exchange.answer(b"", headers=told))
        return self._find(head.method, head.path)

    @property
    def draining(self) -> bool:
        """Whether work is refused because the process ends."""
        return self._draining

    @property
    def in_flight(self) -> int:
        """How many exchanges a drain would wait for."""
        return len(self._work)

    async def listen(
        self, address: str, *, tls: ssl.SSLContext | None = None, reuse_port: bool = False
    ) -> str:
        """Bind, start, and return the address that was bound.

        Args:
            address: `host:port`; port 0 takes a free one.
            tls: serves HTTPS. By ALPN it should offer nothing but `http/1.1`.
            reuse_port: let other processes listen there, too.

        Raises:
            OSError: the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        loop = self._loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self),
            host.strip("[]") or None,
            int(port),
            backlog=1024,
            ssl=tls,
            reuse_port=reuse_port or None,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
        )
        self._servers.append(server)
        if self._sweep_timer is None:
            self._sweep()
        return f"{host}:{server.sockets[0].getsockname()[1]}"

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let what is in flight end for up to `grace_s`, stop."""
        self._draining = True
        for connection in list(self.connections):
            connection.drain()
        await _within(self._is_idle, grace_s)
        for exchange in list(self._work):
            exchange.cut(draining())
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        await self._emptied()
        for connection in list(self.connections):
            connection.abort()
        await self._emptied()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()

    async def _emptied(self) -> None:
        if self.connections:
            self._is_empty.clear()
            await _within(self._is_empty, _LAST_WORDS_S)

    def now(self) -> float:
        """See `http1.Front`."""
        assert self._loop is not None, "it listens"
        return self._loop.time()

    def date(self) -> bytes:
        """See `http1.Front`."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self._date = f"{formatdate(now_s, usegmt=True)}\r\n\r\n".encode("ascii")
        return self._date

    def forget(self, connection: Connection) -> None:
        """See `http1.Front`."""
        self.connections.discard(connection)
        self.stalled.discard(connection)
        if not self.connections:
            self._is_empty.set()

    def flush_later(self, connection: Connection) -> None:
        """See `http1.Front`."""
        unflushed = self._unflushed
        if not unflushed:
            assert self._loop is not None, "it listens"
            self._loop.call_soon(self._flush)
        unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    def began_work(self, exchange: Http1Exchange) -> None:
        """See `http1.Front`."""
        self._work.add(exchange)
        self._is_idle.clear()

    def ended_work(self, exchange: Http1Exchange) -> None:
        """See `http1.Front`."""
        self._work.discard(exchange)
        if not self._work:
            self._is_idle.set()

    def _sweep(self) -> None:
        """Look after every deadline: cheaper than a timer per request, and late by a tick."""
        now = self.now()
        for connection in [c for c in self.connections if c.deadline <= now]:
            connection.expire(now)
        for connection in list(self.stalled):
            connection.check_progress(now)
        limits = self.limits
        shortest = min(limits.body_read_s, limits.slow_reader_s, limits.idle_s)
        tick_s = min(_SWEEP_S_MAX, max(0.01, shortest / 4))
        assert self._loop is not None, "it listens"
        self._sweep_timer = self._loop.call_later(tick_s, self._sweep)


async def _within(event: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
