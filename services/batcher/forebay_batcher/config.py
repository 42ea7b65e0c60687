"""What a batcher is told by its environment."""

from __future__ import annotations

import dataclasses

from forebay_common.channel import MAX_MESSAGE_BYTES
from forebay_common.config import ConfigError, option

from forebay_batcher.core.queue import ClassLimits, Limits, PriorityClass

PREFIX = "FOREBAY_BATCHER"


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Options of one batcher."""

    listen: str = option(
        "127.0.0.1:0", "Where requests and control calls come in, `host:port`; port 0: a free one."
    )
    advertise_host: str = option(
        "", "Host under which others reach this batcher; empty: the host of `listen`."
    )
    metrics_listen: str = option("", "Where Prometheus metrics are served; empty: nowhere.")
    engine_address: str = option(
        "127.0.0.1:50060", "The engine host on this machine, `host:port` or `unix:/path`."
    )
    pool: str = option("default", "The pool this replica belongs to.")
    role: str = option(
        "active", "Take traffic at once, or wait to be claimed.", choices=("active", "standby")
    )
    replica_id: str = option("", "Name of the replica; empty: the instance id.")
    queued_max_realtime: int = option(
        256, "Most REALTIME requests that wait; lower it to refuse sooner.", minimum=0
    )
    queued_max_batch: int = option(1024, "Most BATCH requests that wait.", minimum=0)
    queued_max_background: int = option(4096, "Most BACKGROUND requests that wait.", minimum=0)
    queued_bytes_max: int = option(
        256 << 20, "Most bytes of messages that wait, all classes together.", minimum=1
    )
    queue_wait_s_max_realtime: float = option(
        30.0, "A REALTIME request that has waited this long, in seconds, is refused.", minimum=0.001
    )
    queue_wait_s_max_batch: float = option(
        600.0, "A BATCH request that has waited this long, in seconds, is refused.", minimum=0.001
    )
    queue_wait_s_max_background: float = option(
        3600.0,
        "A BACKGROUND request that has waited this long, in seconds, is refused.",
        minimum=0.001,
    )
    overdue_s_realtime: float = option(
        5.0,
        "A REALTIME request that has waited this long, in seconds, is overdue: every other start "
        "goes to the request that is overdue the longest.",
        minimum=0,
    )
    overdue_s_batch: float = option(
        10.0, "A BATCH request that has waited this long, in seconds, is overdue.", minimum=0
    )
    overdue_s_background: float = option(
        60.0, "A BACKGROUND request that has waited this long, in seconds, is overdue.", minimum=0
    )
    kv_cache_usage_max: float = option(
        0.95,
        "From this share of the KV cache on, nothing starts beside what runs; lower it where the "
        "engine preempts.",
        minimum=0,
        maximum=1,
    )
    run_s_max: float = option(
        3600.0, "Longest run of a request, in seconds, whatever its deadline.", minimum=0.001
    )
    message_bytes_max: int = option(
        MAX_MESSAGE_BYTES,
        "Largest message accepted, in bytes; no less than the router's largest body and 4096.",
        minimum=1024,
        maximum=1 << 30,
    )
    streams_per_connection_max: int = option(
        4096, "Most calls at once on one connection of a router.", minimum=1, maximum=1 << 20
    )
    slow_reader_s: float = option(
        300.0,
        "How long a router may take nothing of an answer before it is cut, in seconds; keep it "
        "well above the router's own.",
        minimum=1,
    )
    announce_interval_s: float = option(
        1.0, "Least time between two announcements of load alone, in seconds.", minimum=0.05
    )
    drain_linger_s: float = option(
        0.2,
        "How long requests are still accepted after the drain was announced, in seconds; about the "
        "time routers need to hear of it.",
        minimum=0,
        maximum=30,
    )
    engine_load_interval_ms: int = option(
        50, "Least time between two reports of load asked of the engine host.", minimum=1
    )
    cache_interval_ms: int = option(
        50,
        "Least time between two reports of its prefix cache asked of a runner, in milliseconds.",
        minimum=10,
        maximum=60_000,
    )
    cached_prefixes_max: int = option(
        1 << 18,
        "Most cached prefixes of prompts that are passed on of one model version; no less than its "
        "runner's own limit.",
        minimum=1,
        maximum=1 << 20,
    )
    keepalive_s: float = option(
        1.0,
        "Silence of a runner with requests in flight after which it is pinged, in seconds.",
        minimum=0.1,
        maximum=3600,
    )
    keepalive_timeout_s: float = option(
        3.0,
        "Longest time a runner may take to answer a ping before it counts as lost, in seconds.",
        minimum=0.1,
        maximum=3600,
    )
    engine_retry_s_max: float = option(
        1.0, "Longest wait before the engine host is called again, in seconds.", minimum=0.05
    )

    def __post_init__(self) -> None:
        host = self.advertise_host or self.listen.rpartition(":")[0]
        if host in ("", "0.0.0.0", "[::]"):  # noqa: S104  # refused here
            raise ConfigError(
                f"{PREFIX}_ADVERTISE_HOST", "is needed where the listen address is a wildcard"
            )
        for name in ("pool", "replica_id"):
            if "/" in getattr(self, name):
                raise ConfigError(f"{PREFIX}_{name.upper()}", "must not hold a slash")
        if not self.pool:
            raise ConfigError(f"{PREFIX}_POOL", "must not be empty")
        if not self.engine_address:
            raise ConfigError(f"{PREFIX}_ENGINE_ADDRESS", "must not be empty")

    def limits(self) -> Limits:
        """The bounds of the queue."""
        return Limits(
            classes={
                PriorityClass.REALTIME: ClassLimits(
                    self.queued_max_realtime,
                    self.queue_wait_s_max_realtime,
                    self.overdue_s_realtime,
                ),
                PriorityClass.BATCH: ClassLimits(
                    self.queued_max_batch, self.queue_wait_s_max_batch, self.overdue_s_batch
                ),
                PriorityClass.BACKGROUND: ClassLimits(
                    self.queued_max_background,
                    self.queue_wait_s_max_background,
                    self.overdue_s_background,
                ),
            },
            queued_bytes_max=self.queued_bytes_max,
            kv_cache_usage_max=self.kv_cache_usage_max,
        )
