"""What an autoscaler is told by its environment."""

from __future__ import annotations

import dataclasses

from forebay_common.config import ConfigError, option

from forebay_autoscaler.core.model import Limits

PREFIX = "FOREBAY_AUTOSCALER"

_DEFAULTS = Limits()
# What is left of an order's time for processes that must be killed, and for the order to be told
# as failed before it counts as overdue.
ORDER_SLACK_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Options of one autoscaler."""

    listen: str = option("127.0.0.1:7002", "Where gRPC listens, `host:port`; port 0 picks one.")
    advertise: str = option(
        "", "`host:port` under which others reach this process; the bound address when empty."
    )
    metrics_listen: str = option("", "Where Prometheus metrics are served; empty: nowhere.")
    bootstrap: str = option(
        "",
        "Pools put at start: a JSON list of `autoscaler.v1.Pool`. A pool that was put by the same "
        "description before is left as it is now.",
    )
    launcher: str = option(
        "local",
        "`local` runs replicas as processes of this host; `dry-run` orders nothing, and records.",
        choices=("local", "dry-run"),
    )
    state_dir: str = option(
        ".forebay/autoscaler",
        "Directory of the local launcher's records, sockets and logs; the same for every "
        "autoscaler of one host.",
    )
    stop_replicas_on_exit: bool = option(
        False, "Whether this host's replicas end with this process; otherwise they go on."
    )
    tick_interval_s: float = option(
        _DEFAULTS.tick_interval_s,
        "Longest time between two looks at a pool, in seconds.",
        minimum=0.05,
        maximum=60,
    )
    tick_gap_s: float = option(
        0.05,
        "Least time between two looks when something changes, in seconds.",
        minimum=0.01,
        maximum=10,
    )
    stale_after_s: float = option(
        _DEFAULTS.stale_after_s,
        "Nothing is ordered on records that etcd has not confirmed for so long, in seconds.",
        minimum=1,
        maximum=300,
    )
    lost_after_s: float = option(
        _DEFAULTS.lost_after_s,
        "How long a running replica that is no longer announced counts as busy, before it is "
        "replaced, in seconds.",
        minimum=0,
        maximum=3600,
    )
    scale_up_step: int = option(
        _DEFAULTS.scale_up_step,
        "Most active replicas more than there are that one decision may want.",
        minimum=1,
        maximum=10_000,
    )
    max_starting: int = option(
        _DEFAULTS.max_starting,
        "Most replicas of a pool that start at the same time.",
        minimum=1,
        maximum=1000,
    )
    start_timeout_s: float = option(
        _DEFAULTS.start_timeout_s,
        "A replica that is not ready for so long is stopped, in seconds; raise it for large "
        "models on slow storage.",
        minimum=1,
        maximum=7200,
    )
    backoff_initial_s: float = option(
        _DEFAULTS.backoff_initial_s,
        "Wait before a launch after two failed ones, in seconds; doubled by each further one.",
        minimum=0.01,
        maximum=600,
    )
    backoff_max_s: float = option(
        _DEFAULTS.backoff_max_s, "Longest such wait, in seconds.", minimum=0.01, maximum=3600
    )
    backoff_reset_s: float = option(
        _DEFAULTS.backoff_reset_s,
        "After so long without a failed launch, in seconds, earlier ones are forgotten.",
        minimum=1,
        maximum=86_400,
    )
    retry_after_s: float = option(
        _DEFAULTS.retry_after_s,
        "How long a replica is left alone after an order to it failed, in seconds.",
        minimum=0.05,
        maximum=600,
    )
    activate_timeout_s: float = option(
        5.0, "Longest wait for a standby's answer to its activation, in seconds.", minimum=0.1
    )
    drain_timeout_s: float = option(
        120.0,
        "How long the requests of a replica that is taken away may go on, in seconds.",
        minimum=0,
        maximum=7200,
    )
    stop_grace_s: float = option(
        35.0,
        "How long a process may take to end after SIGTERM before it is killed, in seconds; more "
        "than FOREBAY_DRAIN_TIMEOUT_S.",
        minimum=0.1,
        maximum=7200,
    )
    order_timeout_s: float = option(
        _DEFAULTS.order_timeout_s + 20,
        "When an order whose result is not seen counts as failed, in seconds; more than a drain "
        "and two stops take.",
        minimum=1,
        maximum=20_000,
    )
    history_limit: int = option(100, "Decisions kept for each pool.", minimum=1, maximum=10_000)
    history_interval_s: float = option(
        10.0,
        "Least time between two writes of decisions that only repeat, in seconds.",
        minimum=0.1,
        maximum=3600,
    )
    replica_host: str = option(
        "127.0.0.1", "Address on which launched batchers listen; each takes a free port."
    )
    engine_command: tuple[str, ...] = option(
        (), "Command of an engine host, comma separated; empty: this Python's `forebay_engine`."
    )
    batcher_command: tuple[str, ...] = option(
        (), "Command of a batcher, comma separated; empty: this Python's `forebay_batcher`."
    )
    log_bytes_max: int = option(
        16 << 20,
        "Size from which a replica's log file is cut, in bytes; one earlier part is kept.",
        minimum=4096,
    )
    logs_kept: int = option(
        20, "Log files kept of replicas that are gone.", minimum=0, maximum=10_000
    )

    def __post_init__(self) -> None:
        needed_s = self.drain_timeout_s + 2 * self.stop_grace_s
        if self.order_timeout_s < needed_s + ORDER_SLACK_S / 3:
            raise ConfigError(
                f"{PREFIX}_ORDER_TIMEOUT_S",
                f"must be at least {needed_s + ORDER_SLACK_S / 3:g}, what a drain and two stops "
                "may take",
            )

    def limits(self) -> Limits:
        """The bounds of the core."""
        return Limits(
            tick_interval_s=self.tick_interval_s,
            stale_after_s=self.stale_after_s,
            lost_after_s=self.lost_after_s,
            scale_up_step=self.scale_up_step,
            max_starting=self.max_starting,
            start_timeout_s=self.start_timeout_s,
            backoff_initial_s=self.backoff_initial_s,
            backoff_max_s=self.backoff_max_s,
            backoff_reset_s=self.backoff_reset_s,
            order_timeout_s=self.order_timeout_s,
            retry_after_s=self.retry_after_s,
        )
