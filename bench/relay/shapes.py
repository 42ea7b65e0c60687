"""The shapes of load, and one measurement of one shape."""

from __future__ import annotations

import dataclasses
import json
import resource
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.relay.pinned import Bystanders

TOKENS = 64
PROMPT_BYTES = 1000
API_KEY = "sk-" + secrets.token_hex(32)
"""Sent to every router; LiteLLM insists on one."""
GRPC_CONNECTIONS = 4
"""100 streams on each in shape S: what gRPC servers commonly allow on one connection."""
BUSY = 0.95
"""Share of a core above which whoever uses it may be what limits a measurement."""

CALM = 0.1
"""Share of a core that strangers may use before a measurement counts as disturbed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One kind of load."""

    name: str
    meaning: str
    streams: int
    pace_us: int
    """Time per token; 0 is as fast as it goes."""
    together: bool
    """Whether all streams tick at the same moments."""
    streamed: bool
    measure_s: float

    @property
    def spread_s(self) -> float:
        """Streams start evenly over the length of one answer, so that they also end evenly."""
        return self.pace_us * TOKENS / 1e6

    @property
    def warm_s(self) -> float:
        """Twice the length of an answer, or a second."""
        return max(1.0, 2.1 * self.spread_s)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("I", "emitted at once, 32 in flight", 32, 0, False, True, 3.0),
        Shape(
            "S", "400 streams at 20 ms per token, ticking together", 400, 20_000, True, True, 4.0
        ),
        Shape("P", "50 streams at 20 ms per token", 50, 20_000, False, True, 4.0),
        Shape("U", "not streamed, 32 in flight", 32, 0, False, False, 3.0),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement of one shape found."""

    cpu_ms: float
    """CPU time of the measured processes per request of TOKENS tokens."""
    ttft_us: float
    """Median."""
    reach_us: float
    """Median; the part of it until the back end writes the first token."""
    token_us_p50: float
    """From the back end's write of a token to the generator's read of it."""
    token_us_p99: float
    requests_per_s: float
    subject_use: float
    """Share of a core that the measured processes used."""
    back_use: float
    load_use: float
    bystanders_use: float
    """Share of a core that strangers used, of whichever core they used more."""
    errors: int

    @property
    def is_calm(self) -> bool:
        """Whether the machine was left to the measurement."""
        return self.bystanders_use <= CALM

    @property
    def is_valid(self) -> bool:
        """Generator and back end share a core; beyond `BUSY` they would be what is measured."""
        return self.errors == 0 and self.back_use + self.load_use <= BUSY


def measure(
    program: Path,
    shape: Shape,
    port: int,
    *,
    cores: tuple[int, int],
    subject: Sequence[int],
    back: Sequence[int],
    measure_s: float | None = None,
) -> Sample:
    """Load `port` with one shape.

    Args:
        program: the load generator of the protocol spoken there.
        shape: the load.
        port: of the measured router, or of a back end.
        cores: of the measured processes, and of generator and back end.
        subject: the processes whose CPU time is wanted.
        back: the processes of the back end.
        measure_s: length of the measurement; the shape's own when None.

    Raises:
        RuntimeError: the generator gave up.
    """
    bystanders = [Bystanders(core, pids) for core, pids in zip(cores, (subject, back), strict=True)]
    ended_s = _ended_children_s()
    found = run_load(program, shape, port, watch=(subject, back), measure_s=measure_s)
    # Tokens are counted rather than requests where there are many per request: the ends of the
    # window cut requests, but hardly tokens.
    answers = found["tokens"] / TOKENS if shape.streamed else found["requests"]
    seconds = found["seconds"]
    subject_s, back_s = found["watched_cpu_s"]
    return Sample(
        cpu_ms=1000 * subject_s / answers if answers else float("nan"),
        ttft_us=found["ttft_us_p50"],
        reach_us=found["reach_us_p50"],
        token_us_p50=found["token_us_p50"],
        token_us_p99=found["token_us_p99"],
        requests_per_s=answers / seconds,
        subject_use=subject_s / seconds,
        back_use=back_s / seconds,
        load_use=found["load_cpu_s"] / seconds,
        bystanders_use=max(
            bystanders[0].use(), bystanders[1].use(ended_s=_ended_children_s() - ended_s)
        ),
        errors=found["errors"] if answers else max(1, found["errors"]),
    )


def _ended_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_load(
    program: Path,
    shape: Shape,
    port: int,
    *,
    watch: Sequence[Sequence[int]],
    measure_s: float | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a load generator and return its figures, `watched_cpu_s` among them: one per group.

    Raises:
        RuntimeError: it gave up.
    """
    seconds = measure_s or shape.measure_s
    done = subprocess.run(
        [
            str(program),
            f"port={port}",
            f"streams={shape.streams}",
            f"tokens={TOKENS}",
            f"prompt={PROMPT_BYTES}",
            f"mark={shape.pace_us}:{int(shape.together)}",
            f"stream={int(shape.streamed)}",
            f"connections={GRPC_CONNECTIONS}",
            f"key={API_KEY}",
            f"warm_s={shape.warm_s}",
            f"spread_s={shape.spread_s}",
            f"measure_s={seconds}",
            f"watch={'/'.join(','.join(map(str, group)) for group in watch)}",
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=shape.warm_s + seconds + 60,
    )
    if done.returncode or not done.stdout:
        raise RuntimeError(f"the load generator gave up: {done.stderr.strip()}")
    if done.stderr:
        print(f"  first error: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
