"""gRPC channels with keep-alive, bounded messages and bounded reconnect back-off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

MAX_MESSAGE_BYTES = 16 << 20

# A broken peer is noticed within about 15 s while calls are open. The times stay above what grpc
# servers punish by default (`GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS` is lowered in
# `server.py` to match).
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def connect(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
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
            *_KEEPALIVE,
            *_RECONNECT,
        ),
    )


class ChannelPool:
    """One channel per address, closed when the address is no longer retained."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened when there is none."""
        channel = self._channels.get(address)
        if channel is None:
            channel = connect(address, max_message_bytes=self._max_message_bytes)
            self._channels[address] = channel
        return channel

    def retain(self, addresses: Iterable[str], *, grace_s: float = 30.0) -> None:
        """Close every channel to another address; its calls in flight get `grace_s`."""
        kept = set(addresses)
        for address in [a for a in self._channels if a not in kept]:
            task = asyncio.ensure_future(self._channels.pop(address).close(grace_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace_s: float | None = None) -> None:
        """Close every channel."""
        self.retain((), grace_s=grace_s or 0.0)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
