"""What an operator can set on a router."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence

from forebay_common.config import ConfigError, option
from forebay_common.metadata import CLASSES
from forebay_wire.core.cors import Cors

PREFIX = "FOREBAY_ROUTER"


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """A router's options."""

    grpc_listen: str = option("127.0.0.1:7070", "Where gRPC is served, `host:port`.")
    http_listen: str = option(
        "127.0.0.1:8080", "Where the OpenAI protocol is served, `host:port`; empty turns it off."
    )
    advertise_host: str = option(
        "", "Host that others reach this router by; the listening host when empty."
    )
    open: bool = option(
        False,
        "Let everybody in, without keys, as the tenant `default`; only while all addresses are on "
        "the loopback.",
    )
    key_secret_file: str = option(
        "",
        "File with the secret that API keys are hashed with, the same for all routers; one per "
        "line, the newest first. Needed unless `open`.",
    )
    default_timeout_s: float = option(
        600.0, "Deadline of a request that brings none, in seconds.", minimum=0.1, maximum=86400
    )
    max_timeout_s: float = option(
        3600.0, "Longest deadline a caller may set, in seconds.", minimum=0.1, maximum=86400
    )
    no_replica_wait_s: float = option(
        2.0,
        "How long a request waits for a replica to appear before NO_REPLICA, in seconds; raise it "
        "where replicas are replaced often.",
        minimum=0,
        maximum=600,
    )
    max_attempts: int = option(
        3, "Most replicas a request is sent to before its first message.", minimum=1, maximum=10
    )
    max_resumes: int = option(
        5, "Most times an answer that has begun goes on at another replica.", minimum=0, maximum=100
    )
    max_resume_bytes: int = option(
        1 << 20,
        "Most bytes of one streamed answer that are kept, so that it can go on elsewhere when its "
        "replica dies; a longer one ends with an error then. 0 turns resuming off.",
        minimum=0,
        maximum=64 << 20,
    )
    first_message_timeout_s: float = option(
        0.0,
        "Longest wait for an attempt's first message, in seconds, before it is tried elsewhere; 0 "
        "is no limit but the request's own.",
        minimum=0,
        maximum=3600,
    )
    silence_timeout_s: float = option(
        15.0,
        "Longest time between two messages of a stream, in seconds, before its replica counts as "
        "lost; 0 is no limit.",
        minimum=0,
        maximum=3600,
    )
    retry_share: float = option(
        0.2,
        "Further attempts after failures that may be overload, as a share of requests.",
        minimum=0,
        maximum=10,
    )
    retries_per_s: float = option(
        5.0, "Such attempts per second that need no requests.", minimum=0, maximum=10_000
    )
    hedge_after_ms: int = option(
        0,
        "After so many milliseconds without a first message, a request is also sent to a second "
        "replica; the first to answer goes on. 0 turns hedging off.",
        minimum=0,
        maximum=600_000,
    )
    hedge_share: float = option(
        0.05, "Most second attempts, as a share of requests.", minimum=0, maximum=1
    )
    slow_start_s: float = option(
        10.0,
        "Time over which a replica that joins, or is back, comes to take its full number of "
        "requests, in seconds.",
        minimum=0,
        maximum=3600,
    )
    explore_share: float = option(
        0.005,
        "Share of requests that go to a replica that seems slow, so that it is tried again.",
        minimum=0,
        maximum=1,
    )
    max_prefixes_per_replica: int = option(
        20_000,
        "Most names of cached prompt prefixes kept per replica and model version.",
        minimum=0,
        maximum=10_000_000,
    )
    max_prefixes: int = option(
        1_000_000,
        "Most names of cached prompt prefixes kept of all replicas, about 150 bytes each.",
        minimum=0,
        maximum=100_000_000,
    )
    prefix_ttl_s: float = option(
        600.0,
        "How long a prompt is taken to be cached where it was sent, in seconds, when the engine "
        "does not tell.",
        minimum=1,
        maximum=86400,
    )
    cache_interval_ms: int = option(
        100,
        "Least time between two reports of a replica's prefix caches, in milliseconds; 0 asks for "
        "none.",
        minimum=0,
        maximum=60_000,
    )
    pool_classes: str = option(
        "",
        "Classes that pools take, such as `batch=BATCH+BACKGROUND,chat=REALTIME`; a pool that is "
        "not named takes all.",
    )
    faults_in_a_row: int = option(
        3, "Faults in a row that take a replica out.", minimum=1, maximum=1000
    )
    fault_share: float = option(
        0.25, "Share of faults among recent answers that takes a replica out.", minimum=0, maximum=1
    )
    breaker_open_s: float = option(
        10.0,
        "How long a replica is first out, in seconds; doubled each time it fails its probes.",
        minimum=0.1,
        maximum=3600,
    )
    breaker_open_max_s: float = option(
        300.0, "Longest time out, in seconds.", minimum=0.1, maximum=86400
    )
    breaker_probes: int = option(
        3, "Requests, one at a time, that must end well before it is back.", minimum=1, maximum=100
    )
    max_suspects: int = option(
        10_000, "Most requests remembered that a runner died of.", minimum=1, maximum=1_000_000
    )
    quarantine_s: float = option(
        600.0,
        "How long a request that ended two runners is refused, in seconds.",
        minimum=0,
        maximum=86400,
    )
    load_on_demand: bool = option(
        True, "Load a model that no replica has when a request asks for it."
    )
    cold_wait_s: float = option(
        300.0, "Longest wait of a request for a model's load, in seconds.", minimum=0, maximum=3600
    )
    max_held: int = option(
        2000, "Most requests that wait for one model to be loaded.", minimum=1, maximum=1_000_000
    )
    max_released: int = option(
        64,
        "Of the requests that waited for one model, how many are sent to it at once before they "
        "get a first token.",
        minimum=1,
        maximum=100_000,
    )
    max_loads: int = option(
        4, "Most models this router has loaded at once.", minimum=1, maximum=1000
    )
    load_pause_s: float = option(
        10.0,
        "After a load that failed on every replica, how long requests for the model are refused, "
        "in seconds.",
        minimum=0,
        maximum=3600,
    )
    keepalive_s: float = option(
        1.0,
        "Silence of a replica with requests in flight after which it is pinged, in seconds.",
        minimum=0.1,
        maximum=3600,
    )
    keepalive_timeout_s: float = option(
        3.0,
        "Longest time a replica may take to answer a ping before it counts as lost, in seconds.",
        minimum=0.1,
        maximum=3600,
    )
    quota_timeout_ms: int = option(
        250,
        "Longest wait for another router's word on a tenant's limits, in milliseconds; then this "
        "router lets in its own part.",
        minimum=10,
        maximum=10_000,
    )
    quota_away: str = option(
        "share",
        "While the router that counts a tenant cannot be asked: `share` lets in an equal part of "
        "the limits, `refuse` refuses, `admit` lets in.",
        choices=("share", "refuse", "admit"),
    )
    quota_tick_s: float = option(
        1.0,
        "Between two looks at which routers can be reached, in seconds.",
        minimum=0.1,
        maximum=60,
    )
    quota_streams_ttl_s: float = option(
        10.0,
        "After how long without a word from a router its requests no longer count as running, in "
        "seconds; keep it above three looks.",
        minimum=2,
        maximum=600,
    )
    quota_default_output_tokens: int = option(
        512,
        "Tokens reserved for an answer that the request does not bound, until the model's own "
        "answers tell.",
        minimum=1,
        maximum=1_000_000,
    )
    shadow_at_once: int = option(
        4, "Most copies of requests under way at once.", minimum=1, maximum=1000
    )
    shadow_waiting: int = option(
        64,
        "Most copies that wait to be sent; what comes then is not copied.",
        minimum=1,
        maximum=100_000,
    )
    shadow_waiting_bytes: int = option(
        32 << 20, "Most bytes of them.", minimum=1024, maximum=1 << 30
    )
    shadow_timeout_s: float = option(
        120.0, "Longest time a copy may take, in seconds.", minimum=0.1, maximum=86400
    )
    tier_time_ms: int = option(
        20,
        "Longest time a classifier of tiers may take for a prompt, in milliseconds; what it says "
        "later is not heeded.",
        minimum=1,
        maximum=1000,
    )
    tier_overruns: int = option(
        3,
        "How often in a row a classifier may take longer before it is left alone.",
        minimum=1,
        maximum=1000,
    )
    tier_pause_s: float = option(30.0, "For how long, in seconds.", minimum=0, maximum=3600)
    max_in_flight: int = option(
        4096, "Most requests at once; more are refused with QUEUE_FULL.", minimum=1
    )
    max_body_bytes: int = option(
        16 << 20, "Largest body or message of a request, in bytes.", minimum=1024, maximum=1 << 30
    )
    max_header_bytes: int = option(
        32768,
        "Largest request line and header section of an HTTP request together, in bytes.",
        minimum=1024,
        maximum=1 << 20,
    )
    max_headers: int = option(
        100, "Most header fields of an HTTP request.", minimum=16, maximum=1000
    )
    max_http_connections: int = option(
        16384,
        "Most HTTP connections at once; more are answered 503 and closed. Keep it below the open "
        "files that the process may have.",
        minimum=1,
    )
    cors_origins: str = option(
        "",
        "Origins of web pages that may call the HTTP side from a browser, separated by commas, "
        "such as `https://chat.example.com`, or `*` for all; empty allows none.",
    )
    max_answer_bytes: int = option(
        256 << 20,
        "Largest HTTP answer that is not streamed, in bytes; it is kept until it is whole.",
        minimum=1 << 20,
        maximum=1 << 30,
    )
    body_read_timeout_s: float = option(
        30.0,
        "Longest time an HTTP head may take to arrive, and then its body, in seconds.",
        minimum=0.1,
    )
    slow_reader_s: float = option(
        30.0,
        "How long an HTTP client may leave a full buffer unread before it is cut, in seconds.",
        minimum=0.1,
    )
    idle_connection_s: float = option(
        75.0,
        "How long an idle HTTP connection is kept, in seconds; keep it above that of the load "
        "balancer in front.",
        minimum=1,
    )
    max_streams_per_connection: int = option(
        1024, "Most gRPC calls at once on one connection.", minimum=1, maximum=1 << 20
    )
    stream_buffer_bytes: int = option(
        65536,
        "Most bytes of one answer that wait here for a caller who reads slowly; then its runner "
        "waits.",
        minimum=16384,
        maximum=1 << 24,
    )
    max_held_bytes: int = option(
        64 << 20,
        "Most bytes of all gRPC answers that wait for slow callers; whoever exceeds it is cut.",
        minimum=1 << 20,
    )
    max_request_bytes: int = option(
        512 << 20,
        "Most bytes of all requests in flight, of gRPC and of HTTP each; more get QUEUE_FULL.",
        minimum=1 << 20,
    )
    max_connection_age_s: float = option(
        1800.0,
        "Age at which a gRPC connection is asked to be made anew, in seconds, ± 10 %, so that load "
        "spreads to new routers; 0 is never.",
        minimum=0,
    )
    connections_per_replica: int = option(
        2, "Most connections to one replica.", minimum=1, maximum=64
    )
    processes: int = option(
        1,
        "Router processes that share the ports; each is an instance of its own, with its own view "
        "and metrics. Raise it when one core is not enough.",
        minimum=1,
        maximum=256,
    )
    share_ports: bool = option(
        False, "Let other processes listen on the same ports; set by `processes`."
    )
    lifeline_fd: int = option(
        -1,
        "Open file whose other end ends this process when it closes; set by `processes`.",
        minimum=-1,
    )
    metrics_listen: str = option(
        "",
        "Where metrics are served apart from the HTTP port, `host:port`; with several processes "
        "each takes a free port there.",
    )
    tls_certificate_file: str = option(
        "", "PEM file with the certificate chain; both ports then speak TLS alone."
    )
    tls_key_file: str = option("", "PEM file with its key; the certificate's file when empty.")
    tls_client_ca_file: str = option(
        "", "PEM file with authorities; callers must then show a certificate of theirs."
    )
    load_interval_ms: int = option(
        100, "Least time between two load reports of a replica, in milliseconds.", minimum=10
    )
    watch_backoff_max_s: float = option(
        2.0,
        "Longest pause between attempts to reach a replica that is down, in seconds.",
        minimum=0.1,
        maximum=60,
    )
    unlisted_grace_s: float = option(
        10.0,
        "How long a replica without a lease is kept while it still answers, in seconds: etcd may "
        "have lost leases that their holders are about to renew.",
        minimum=0,
        maximum=300,
    )
    explain_requests: int = option(
        2048, "How many recent requests ExplainRequest knows.", minimum=1, maximum=100_000
    )
    explain_candidates: int = option(
        32, "Most candidates remembered of one placement.", minimum=1, maximum=10_000
    )

    def classes_by_pool(self) -> Mapping[str, frozenset[str]]:
        """`pool_classes`, read."""
        return _classes(self.pool_classes)

    def cors(self, exposed: Sequence[str] = ()) -> Cors | None:
        """What `cors_origins` says; None where no page of another origin may call."""
        origins = [part.strip() for part in self.cors_origins.split(",") if part.strip()]
        try:
            return Cors(origins, exposed=exposed) if origins else None
        except ValueError as error:
            raise ConfigError(f"{PREFIX}_CORS_ORIGINS", str(error)) from None

    def __post_init__(self) -> None:
        if not self.open and not self.key_secret_file:
            raise ConfigError(
                f"{PREFIX}_KEY_SECRET_FILE",
                f"is needed, so that API keys can be checked; or set {PREFIX}_OPEN=true for a "
                "local run that lets everybody in",
            )
        self.classes_by_pool()
        self.cors()
        host = self.advertise_host or self.grpc_listen.rpartition(":")[0]
        if not self.open and host in ("", "0.0.0.0", "[::]"):  # noqa: S104  # refused here
            raise ConfigError(
                f"{PREFIX}_ADVERTISE_HOST",
                "is needed where the listen address is a wildcard: routers count tenants' limits "
                "among one another",
            )
        for name in ("grpc_listen", "http_listen", "metrics_listen"):
            address = getattr(self, name)
            if self.open and address and not _is_loopback(address):
                raise ConfigError(
                    f"{PREFIX}_{name.upper()}",
                    f"must be on the loopback while {PREFIX}_OPEN lets everybody in",
                )


def _classes(text: str) -> Mapping[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        pool, equals, names = part.partition("=")
        classes = frozenset(names.split("+"))
        if not pool or not equals or not classes <= set(CLASSES):
            raise ConfigError(
                f"{PREFIX}_POOL_CLASSES",
                f"must be pool=CLASS+CLASS,… with classes of {', '.join(CLASSES)}",
            )
        found[pool] = classes
    return found


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
