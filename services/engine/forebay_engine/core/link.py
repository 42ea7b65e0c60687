"""What host and runner tell each other: one JSON object per line over a socket pair.

The end of the stream says that the other process is gone. Messages are small and few: phases, load
at most ten times a second, and commands with one answer each.
"""

from typing import TypeAlias

import msgspec

LINE_BYTES_MAX = 1 << 20


class Phase(msgspec.Struct, tag="phase", frozen=True):
    """A load phase has begun; the number is that of `forebay.engine.v1.LoadPhase`."""

    phase: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded and has answered the canary prompt; the host decides whether well."""

    max_sequences: int
    kv_cache_tokens: int
    context_tokens: int
    system_fingerprint: str
    can_sleep: bool
    canary_tokens: tuple[int, ...]
    canary_vector: tuple[float, ...]


class Load(msgspec.Struct, tag="load", frozen=True):
    """What the engine does now, and its totals since the runner started."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    generated_tokens: int = 0
    resumed_by_prefill: int = 0
    resumed_by_replay: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The runner cannot go on and is about to exit."""

    reason: str


class Done(msgspec.Struct, tag="done", frozen=True):
    """The command has been carried out."""

    command: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The command cannot be carried out; the reason is one of the errors table."""

    command: str
    reason: str
    message: str


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message to a runner: what to load and where to serve it."""

    spec_json: str
    socket_path: str


class Command(msgspec.Struct, tag="command", frozen=True):
    """One of `serve`, `drain`, `sleep`, `wake`, `stop`."""

    name: str


FromRunner: TypeAlias = Phase | Ready | Load | Failed | Done | Refused
FromHost: TypeAlias = Start | Command

_ENCODER = msgspec.json.Encoder()
_FROM_RUNNER = msgspec.json.Decoder(FromRunner)
_FROM_HOST = msgspec.json.Decoder(FromHost)


def encode(message: FromRunner | FromHost) -> bytes:
    """Return a message's line."""
    return _ENCODER.encode(message) + b"\n"


def decode_from_runner(line: bytes) -> FromRunner:
    """Read a runner's line; one that is malformed is a `msgspec.DecodeError`."""
    return _FROM_RUNNER.decode(line)


def decode_from_host(line: bytes) -> FromHost:
    """Read a host's line; one that is malformed is a `msgspec.DecodeError`."""
    return _FROM_HOST.decode(line)
