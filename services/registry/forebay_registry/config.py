"""What the registry is told."""

from __future__ import annotations

import dataclasses

from forebay_common.config import option

PREFIX = "FOREBAY_REGISTRY"


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Options of one registry process."""

    listen: str = option("127.0.0.1:7001", "Where gRPC listens, `host:port`; port 0 picks one.")
    advertise: str = option(
        "", "`host:port` under which others reach this process; the bound address when empty."
    )
    metrics_listen: str = option("", "Where Prometheus metrics are served; empty: nowhere.")
    bootstrap: str = option(
        "",
        "Versions put into the catalogue at start: a JSON list of PutVersionRequest. Putting them "
        "again changes nothing.",
    )
    max_versions: int = option(64, "Most versions of one model.", minimum=1, maximum=1000)
    write_attempts: int = option(
        8,
        "How often a change is tried while others change the same model, before CONFLICT.",
        minimum=1,
        maximum=100,
    )
    stale_after_s: float = option(
        5.0,
        "For how long etcd may be silent before the registry counts as not ready, in seconds.",
        minimum=1,
        maximum=300,
    )
