"""What is left of one set of limits: two token buckets and a count of streams.

A bucket holds at most its burst and fills at a sixtieth of the minute's limit per second. What is
reserved leaves it at once; what was not used comes back, and what was used beyond the reservation
makes it negative. A level with less than it was reserved, given back later, is the same as one that
was reserved rightly from the beginning, so estimates cost nobody anything but time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import IntEnum

from forebay_common.metadata import Metadata

from forebay_router.core.access import Limits

STREAM_WAIT_S = 1.0
"""When to ask again where streams are used up: nobody knows when one ends."""
_INF = math.inf
# Levels are sums of floats; a request that is due must not fail by their rounding.
_SLACK = 1e-6


class Limit(IntEnum):
    """One of the limits of a scope. The numbers are the contract's."""

    REQUESTS = 1
    TOKENS = 2
    CONCURRENT = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """What stands against a request."""

    limit: Limit
    scope: int
    """Index of the meter whose limit it is."""
    wait_s: float
    """Until it would pass, were nothing else to come; infinite where it never would."""


class Meter:
    """The levels of one scope. Also what another router's meter was when it was last heard of."""

    __slots__ = (
        "at_s",
        "concurrent",
        "limits",
        "name",
        "others",
        "own",
        "request_burst",
        "request_rate",
        "requests",
        "revision",
        "streams",
        "token_burst",
        "token_rate",
        "tokens",
        "version",
    )

    limits: Limits
    revision: int
    request_burst: float
    request_rate: float
    token_burst: float
    token_rate: float
    concurrent: float

    def __init__(self, name: str, limits: Limits, revision: int, now: float) -> None:
        """Full. `name` is a model's, or empty for all of a tenant's; `revision` is that of the
        record of the limits."""
        self.name = name
        self._set(limits, revision)
        self.requests: float = self.request_burst
        self.tokens: float = self.token_burst
        self.at_s = now
        self.version = 0
        self.own = 0
        """This router's own requests in flight."""
        self.others: dict[str, int] = {}
        """Those of other routers' sessions."""
        self.streams = 0
        """All of them."""

    def follow(self, limits: Limits, revision: int, now: float) -> None:
        """Count by other limits from now on, unless they are older. What is used stays used."""
        if revision < self.revision:
            return
        if limits == self.limits:
            self.revision = revision
            return
        self.advance(now)
        used_requests = self.request_burst - self.requests if self.request_burst < _INF else 0.0
        used_tokens = self.token_burst - self.tokens if self.token_burst < _INF else 0.0
        self._set(limits, revision)
        self.requests = self.request_burst - used_requests
        self.tokens = self.token_burst - used_tokens
        self.version += 1

    def _set(self, limits: Limits, revision: int) -> None:
        self.limits = limits
        self.revision = revision
        self.request_burst, self.request_rate = _bucket(
            limits.requests_per_min, limits.request_burst
        )
        self.token_burst, self.token_rate = _bucket(limits.tokens_per_min, limits.token_burst)
        self.concurrent = _INF if limits.concurrent is None else limits.concurrent

    def advance(self, now: float) -> None:
        """Let time pass."""
        elapsed_s = now - self.at_s
        if elapsed_s <= 0.0:
            return
        self.at_s = now
        level = self.requests + elapsed_s * self.request_rate
        self.requests = level if level < self.request_burst else self.request_burst
        level = self.tokens + elapsed_s * self.token_rate
        self.tokens = level if level < self.token_burst else self.token_burst

    def give_back(self, requests: float, tokens: float, now: float) -> None:
        """Return what was reserved and not used; negative where more was."""
        self.advance(now)
        self.requests = min(self.request_burst, self.requests + requests)
        self.tokens = min(self.token_burst, self.tokens + tokens)
        self.version += 1

    def begin(self) -> None:
        """Count a request of this router in."""
        self.own += 1
        self.streams += 1

    def end(self) -> None:
        """Count it out."""
        self.own -= 1
        self.streams -= 1

    def note_streams(self, session: str, streams: int) -> None:
        """How many requests of another router are in flight."""
        self.streams += streams - self.others.get(session, 0)
        if streams:
            self.others[session] = streams
        else:
            self.others.pop(session, None)

    def is_idle(self, now: float) -> bool:
        """Whether it is as good as new."""
        self.advance(now)
        return (
            not self.streams
            and self.requests >= self.request_burst
            and self.tokens >= self.token_burst
        )

    def part(self, routers: int, now: float) -> Meter:
        """One router's equal part of it, for when nobody can be asked."""
        self.advance(now)
        part = Meter(self.name, self.limits, self.revision, now)
        if part.request_rate:
            part.request_burst = max(1.0, self.request_burst / routers)
        part.request_rate /= routers
        part.token_burst /= routers
        part.token_rate /= routers
        part.requests = min(part.request_burst, self.requests / routers)
        part.tokens = min(part.token_burst, self.tokens / routers)
        if self.concurrent < _INF and self.concurrent:
            part.concurrent = max(1, self.concurrent // routers)
        part.own = part.streams = self.own
        return part

    def wait_s(self, tokens: float) -> tuple[Limit, float]:
        """The limit that keeps a request waiting longest, and for how long."""
        found, longest_s = Limit.CONCURRENT, 0.0
        if self.streams >= self.concurrent:
            longest_s = STREAM_WAIT_S if self.concurrent else _INF
        for limit, short, burst, rate in (
            (Limit.REQUESTS, 1.0 - self.requests, self.request_burst - 1.0, self.request_rate),
            (Limit.TOKENS, tokens - self.tokens, self.token_burst - tokens, self.token_rate),
        ):
            if short > _SLACK:
                needed_s = short / rate if burst >= 0.0 and rate else _INF
                if needed_s > longest_s:
                    found, longest_s = limit, needed_s
        return found, longest_s


def _bucket(per_min: int | None, burst: int | None) -> tuple[float, float]:
    if per_min is None:
        return _INF, 0.0
    if per_min == 0:
        return 0.0, 0.0
    return float(per_min if burst is None else max(1, burst)), per_min / 60.0


def reserve(meters: Sequence[Meter], tokens: float, now: float) -> Refusal | None:
    """Take a request and its tokens out of all meters, or out of none and say why. The count of
    streams is the caller's to raise."""
    refusal: Refusal | None = None
    for index, meter in enumerate(meters):
        meter.advance(now)
        if (
            meter.requests < 1.0 - _SLACK
            or meter.tokens < tokens - _SLACK
            or meter.streams >= meter.concurrent
        ):
            limit, wait_s = meter.wait_s(tokens)
            if refusal is None or wait_s > refusal.wait_s:
                refusal = Refusal(limit, index, wait_s)
    if refusal is not None:
        return refusal
    for meter in meters:
        meter.requests -= 1.0
        meter.tokens -= tokens
        meter.version += 1
    return None


def headers(meters: Sequence[Meter], now: float) -> Metadata:
    """`x-ratelimit-…` as OpenAI has them, each of the meter of which least is left."""
    by_requests = by_tokens = None
    for meter in meters:
        meter.advance(now)
        if meter.request_burst < _INF and (
            by_requests is None or meter.requests < by_requests.requests
        ):
            by_requests = meter
        if meter.token_burst < _INF and (by_tokens is None or meter.tokens < by_tokens.tokens):
            by_tokens = meter
    told: Metadata = ()
    if by_requests is not None:
        told += _told(
            "requests",
            by_requests.limits.requests_per_min,
            by_requests.requests,
            by_requests.request_burst,
            by_requests.request_rate,
        )
    if by_tokens is not None:
        told += _told(
            "tokens",
            by_tokens.limits.tokens_per_min,
            by_tokens.tokens,
            by_tokens.token_burst,
            by_tokens.token_rate,
        )
    return told


def _told(kind: str, limit: int | None, level: float, burst: float, rate: float) -> Metadata:
    reset_s = (burst - level) / rate if rate else 0.0
    return (
        (_NAMES[kind, "limit"], str(limit)),
        (_NAMES[kind, "remaining"], str(max(0, int(level + _SLACK)))),
        (_NAMES[kind, "reset"], duration(reset_s)),
    )


_NAMES = {
    (kind, what): f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: `20ms`, `1s`, `8.64s`, `6m0s`, `1h0m0s`; rounded up to 1 ms."""
    ms = max(0, math.ceil(seconds * 1000 - _SLACK))
    if ms == 0:
        return "0s"
    if ms < 1000:
        return f"{ms}ms"
    whole_s, ms = divmod(ms, 1000)
    minutes, whole_s = divmod(whole_s, 60)
    text = f"{whole_s}.{ms:03d}".rstrip("0") + "s" if ms else f"{whole_s}s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
