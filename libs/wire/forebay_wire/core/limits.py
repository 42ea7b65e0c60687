"""What a peer may make large, many or slow, in one place."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the token path. Services set them from their own options."""

    message_bytes: int = (16 << 20) + 4096
    """Largest message of a request, in bytes, before and after decompression."""
    header_bytes: int = 32 << 10
    """Largest header list, in bytes as RFC 9113 §6.5.2 counts them."""
    streams: int = 1024
    """Most streams a peer may have open on one connection."""
    stream_window_bytes: int = 64 << 10
    """Most bytes of one answer that wait here for a slow reader."""
    request_window_bytes: int = 256 << 10
    """Flow-control window of one request's message."""
    connection_window_bytes: int = 16 << 20
    """Flow-control window of a whole connection; it is refilled on arrival."""
    held_bytes: int = 64 << 20
    """Most bytes of all answers that wait for slow readers; whoever exceeds it is cut."""
    request_bytes: int = 512 << 20
    """Most bytes of all requests that are not complete or not sent on."""
    slow_reader_s: float = 30.0
    """How long a reader may take nothing of what waits for it before it is cut."""
    connect_timeout_s: float = 3.0
    """Longest time to connect to a peer and to hear its settings."""
    settings_timeout_s: float = 10.0
    """Longest time a peer may take to acknowledge our settings."""
    keepalive_s: float = 10.0
    """Silence on a connection with open streams after which the peer is pinged."""
    keepalive_timeout_s: float = 5.0
    """Longest time a peer may take to answer a ping."""
    pings_sparingly: bool = True
    """Ping a server that stays silent only twice in a row, then every five minutes: gRPC's own
    servers take more for abuse."""
    connection_age_s: float = 1800.0
    """Age at which a server asks a client to connect anew, ± 10 %; 0 is never."""
    connection_age_grace_s: float = 600.0
    """How long after that its open streams may go on."""
    idle_s: float = 900.0
    """Silence without streams after which a connection is closed."""
    connections_per_peer: int = 2
    """Most connections to one peer while its stream limit allows."""
    pending_per_peer: int = 4096
    """Most requests that wait for a connection to one peer."""
    nuisances: int = 1000
    """Frames without use (pings, settings, empty data, resets) that a peer may send in a burst."""
    nuisances_per_s: float = 200.0
    """How many of them it may send per second in the long run."""
