"""What the supervisor of a local fleet is told by the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from forebay_common.config import load_common, option

PREFIX = "FOREBAY_FLEET"


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Bounds of one local fleet."""

    start_timeout_s: float = option(
        600.0,
        "How long a fleet may take until its models answer, in seconds; raise it for large models.",
        minimum=1,
        maximum=7200,
    )
    ready_timeout_s: float = option(
        60.0,
        "How long a service may take to be ready when a fleet starts, in seconds; replicas have "
        "the whole start.",
        minimum=1,
        maximum=3600,
    )
    silence_s: float = option(
        6.0,
        "For how long a supervisor, which speaks every second, may be silent until `up` and `down` "
        "take it for hung, in seconds.",
        minimum=2,
        maximum=300,
    )
    stop_timeout_s: float = option(
        15.0,
        "How long a service may take to exit beyond its drain before it is killed, in seconds.",
        minimum=0.1,
        maximum=300,
    )
    restart_first_s: float = option(
        0.2,
        "Pause before a service that died is started again, in seconds; doubled with each death "
        "in a row.",
        minimum=0.01,
        maximum=60,
    )
    restart_most_s: float = option(
        30.0, "Longest such pause, in seconds.", minimum=0.01, maximum=3600
    )
    restart_stable_s: float = option(
        60.0,
        "A service that lived this long, in seconds, starts anew at the first pause.",
        minimum=0,
    )
    start_attempts: int = option(
        3,
        "How often a service, a replica or a load may fail during the start, until it is given up.",
        minimum=1,
        maximum=100,
    )
    log_bytes_max: int = option(
        8 << 20,
        "Size at which a log file is moved aside, in bytes; one older file is kept.",
        minimum=1 << 16,
    )
    spans_max: int = option(200_000, "Most spans the span store keeps.", minimum=100)
    span_bytes_max: int = option(
        128 << 20,
        "Most bytes of spans it keeps; its file takes half as much again.",
        minimum=1 << 20,
    )
    span_age_s_max: float = option(86400.0, "How long it keeps a trace, in seconds.", minimum=60)


_DRAIN_TIMEOUT_S = "10"


def drain_timeout_s(environ: Mapping[str, str]) -> float:
    """How long requests may go on after `forebay down`: `FOREBAY_DRAIN_TIMEOUT_S` as every service
    reads it, but less by default, because somebody waits at a terminal."""
    return load_common({"FOREBAY_DRAIN_TIMEOUT_S": _DRAIN_TIMEOUT_S, **environ}).drain_timeout_s
