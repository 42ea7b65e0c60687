"""What an engine host and its runners can be told."""

from dataclasses import dataclass

from forebay_common.config import option
from forebay_wire.core.limits import Limits

PREFIX = "FOREBAY_ENGINE"


@dataclass(frozen=True, slots=True)
class Config:
    """Options of the host; its runners inherit them."""

    listen: str = option(
        "127.0.0.1:0",
        "Address of EngineService, `host:port` (port 0: any free one) or `unix:/path`.",
    )
    metrics_listen: str = option(
        "", "Address of the Prometheus metrics, `host:port`; off when empty."
    )
    load: str = option("", "Model versions to load at start: a JSON list of `engine.v1.ModelSpec`.")
    memory_bytes: int = option(
        0,
        "Device memory that model versions may take together, in bytes; 0 leaves it undeclared.",
        minimum=0,
    )
    models_max: int = option(
        16, "Most model versions on this host, whatever their state.", minimum=1, maximum=1024
    )
    socket_dir: str = option(
        "", "Directory of the runners' sockets; a private temporary one when empty."
    )
    canary_dir: str = option(
        "", "Directory of recorded canary answers; `$XDG_CACHE_HOME/forebay/canaries` when empty."
    )
    load_timeout_s: float = option(
        900.0,
        "Longest load, in seconds; raise it for large models on slow storage.",
        minimum=1,
        maximum=7200,
    )
    stop_timeout_s: float = option(
        10.0,
        "How long a drained runner may take to exit before it is killed, in seconds.",
        minimum=0.1,
        maximum=300,
    )
    restart_first_s: float = option(
        0.5,
        "Pause before a dead runner is started again, in seconds; doubled by each failure.",
        minimum=0.01,
        maximum=300,
    )
    restart_most_s: float = option(
        30.0, "Longest such pause, in seconds.", minimum=0.01, maximum=3600
    )
    load_interval_ms: int = option(
        100, "How often a runner reports its load while it changes.", minimum=10, maximum=10_000
    )
    requests_max: int = option(
        1024,
        "Most requests a runner holds at once; further ones are refused with QUEUE_FULL.",
        minimum=1,
        maximum=1_000_000,
    )
    message_bytes_max: int = option(
        Limits().message_bytes,
        "Largest message a runner accepts, in bytes; no less than the router's largest body and "
        "4096.",
        minimum=1024,
        maximum=1 << 30,
    )
    slow_reader_s: float = option(
        300.0,
        "How long a caller may take nothing of an answer that waits for it before a runner cuts "
        "it, in seconds; keep it above the router's, which knows the client.",
        minimum=1,
    )
    frame_from_streams: int = option(
        128,
        "Open streams from which on a stream's tokens share frames, as `FRAME_INTERVAL_MS` says.",
        minimum=1,
        maximum=1_000_000,
    )
    frame_interval_ms: int = option(
        20,
        "Time between two frames of a stream under that load, in milliseconds; its first and last "
        "frame come at once, another waits for at most 1.75 times this. 0 turns it off.",
        minimum=0,
        maximum=1000,
    )
    cached_prefixes_max: int = option(
        1 << 17,
        "Most prefixes of prompts a runner knows of, to report those that are cached; about 60 for "
        "each prompt of 4k tokens that the KV cache holds. 0 turns the report off.",
        minimum=0,
        maximum=1 << 20,
    )
    cached_blocks_max: int = option(
        1 << 18,
        "Most blocks of a KV cache that are followed for that report; blocks beyond are left out.",
        minimum=1,
        maximum=1 << 22,
    )
    kv_cache_bytes: int = option(
        1 << 30,
        "KV cache of a vLLM runner on a CPU whose specification names none, in bytes.",
        minimum=1 << 26,
    )
