"""gRPC channels with keep-alive, bounded messages and bounded reconnect back-off."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

import grpc

# A body of 16 MiB passes every hop, with what its message adds.
ENVELOPE_BYTES = 4096
MAX_MESSAGE_BYTES = (16 << 20) + ENVELOPE_BYTES

# A broken peer is noticed within about 15 s while calls are open. gRPC servers punish pings that
# come more often than `grpc.http2.min_ping_interval_without_data_ms`; `server.py` allows these.
KEEPALIVE_S = 10.0
_KEEPALIVE = (
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This bounds an attempt, too: a busy peer may need a while for its first frame.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def connect(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keepalive_s: float = KEEPALIVE_S,
) -> grpc.aio.Channel:
    """Open a channel to `host:port` or `unix:/path`. Connects on first use."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # One TCP connection per channel object, so that closing one ends its connection.
            ("grpc.use_local_subchannel_pool", 1),
            # Our own retry layer decides: gRPC's transparent retries would hide a dead replica.
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
            *_KEEPALIVE,
            *_RECONNECT,
        ),
    )


@dataclasses.dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    methods: dict[str, Any]


class ChannelPool:
    """One channel per address, closed when the address is no longer retained."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._peers: dict[str, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened when there is none."""
        return self._peer(address).channel

    def raw_method(self, address: str, path: str, *, streams: bool) -> Any:
        """A multi-callable that sends and receives messages as bytes.

        Args:
            address: where to.
            path: `/package.Service/Method`.
            streams: whether the method answers with a stream.
        """
        peer = self._peer(address)
        method = peer.methods.get(path)
        if method is None:
            make = peer.channel.unary_stream if streams else peer.channel.unary_unary
            method = peer.methods[path] = make(path)
        return method

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            channel = connect(address, max_message_bytes=self._max_message_bytes)
            peer = self._peers[address] = _Peer(channel, {})
        return peer

    def retain(self, addresses: Iterable[str], *, grace_s: float = 30.0) -> None:
        """Close every channel to another address; its calls in flight get `grace_s`."""
        kept = set(addresses)
        for address in [a for a in self._peers if a not in kept]:
            task = asyncio.ensure_future(self._peers.pop(address).channel.close(grace_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace_s: float = 0.0) -> None:
        """Close every channel."""
        self.retain((), grace_s=grace_s)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
