"""A model version on each of its replicas: what there is to do, and how long that will take.

What a replica reports is corrected by what this router has started and ended since. Of requests
that wait, those of this router are known one by one: the oldest is being computed since it became
the oldest, and when it is late, so is everything behind it.

Where replicas are many, they are kept in order of their predicted wait, by pool, so that those that
have least to do are found without looking at the others. Those that are down or ejected are parked
beside the order when they are met in it, and looked at again one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator

from forebay_router.core.placement import Exclusion, Replica, Wait
from forebay_router.core.prefixes import PrefixIndex
from forebay_router.core.rates import Factor, Line

FEW = 16
"""So many replicas need no order: all are compared."""
_LEVELS = 64
_LEVELS_PER_DOUBLING = 4.0
_USUAL_BASE_MS, _USUAL_RATE_MS, _USUAL_SERVICE_MS = 30.0, 0.05, 2000.0
_SERVICE_SHARE = 0.05
_SLOW = 1.5
"""A replica with a factor above this is tried now and then, to see whether it still is."""
_RAMP_LEAST = 0.1
_KV_FULL = 0.5
"""From this use of its KV cache on, it may be what bounds the requests of an engine."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """A request on a replica, from when it was sent to when its attempt ended."""

    site: Site
    tokens: int
    """Estimated prompt tokens that are not cached there."""
    sent_s: float
    ahead: float
    """Prompt tokens that were to be computed before it."""
    predicted_ms: float
    """To its first token, when it was sent."""
    tells_first: bool
    """Its first message comes with its first token."""
    queues: bool
    """It was expected to wait for a slot, which says nothing of how fast prompts are computed."""
    waits: bool = True
    """Its prompt is still to be computed, as far as can be told."""
    first_s: float | None = None
    ended: bool = False


class Site:
    """A model version on a replica."""

    __slots__ = (
        "classes",
        "factor",
        "head_s",
        "is_parked",
        "is_told",
        "level",
        "load",
        "number",
        "own",
        "own_at_report",
        "own_tokens",
        "own_tokens_at_report",
        "replica",
        "since_s",
        "standing",
        "unanswered",
        "unheard",
        "version",
    )

    def __init__(self, number: int, version: Version, replica: Replica, now: float) -> None:
        self.number = number
        self.version = version
        self.replica = replica
        self.load = replica.models[version.name]
        self.standing: Exclusion | None = None
        """What its own report speaks against it with."""
        self.classes: frozenset[str] | None = None
        """Those it takes; None for all."""
        self.factor = Factor(now)
        self.since_s = now
        """When it joined, or came back."""
        self.own = 0
        self.own_at_report = 0
        self.own_tokens = 0
        self.own_tokens_at_report = 0
        self.unanswered: deque[Ticket] = deque()
        self.head_s = now
        """Since when the oldest of them is the oldest."""
        self.unheard: deque[Ticket] = deque()
        """Those whose first message says nothing of their first token, until it is due."""
        self.is_told = False
        """Its engine tells what is cached; else what was sent there is taken for it."""
        self.level: int | None = None
        self.is_parked = False

    @property
    def requests(self) -> int:
        """On it now."""
        load = self.load
        requests = load.queued + load.in_flight + self.own - self.own_at_report
        return self.own if self.own > requests else requests

    def tokens_ahead(self, now: float, rate_ms: float) -> float:
        """Prompt tokens that are yet to be computed there."""
        if self.unheard:
            self._expire(now)
        own = self.own_tokens
        tokens: float = self.load.waiting_tokens + own - self.own_tokens_at_report
        # Not max(): a comparison takes a quarter of a call.
        if own > tokens:  # noqa: PLR1730
            tokens = own
        if self.unanswered:
            # The oldest is being computed.
            tokens -= min(self.unanswered[0].tokens, 1000.0 * (now - self.head_s) / rate_ms)
        return tokens if tokens > 0.0 else 0.0

    def send(self, ticket: Ticket) -> None:
        """A request is on its way there."""
        self.own += 1
        self.own_tokens += ticket.tokens
        if not ticket.tells_first:
            self.unheard.append(ticket)
            return
        if not self.unanswered:
            self.head_s = ticket.sent_s
        self.unanswered.append(ticket)

    def answer(self, ticket: Ticket, now: float) -> None:
        """A request no longer waits to be computed."""
        if ticket.waits:
            ticket.waits = False
            self.own_tokens -= ticket.tokens
        unanswered = self.unanswered
        # Mostly they answer in the order they were sent in.
        if unanswered and not unanswered[0].waits:
            while unanswered and not unanswered[0].waits:
                unanswered.popleft()
            self.head_s = now

    def _expire(self, now: float) -> None:
        unheard = self.unheard
        while unheard:
            oldest = unheard[0]
            if oldest.waits and now < oldest.sent_s + 0.001 * oldest.predicted_ms:
                return
            unheard.popleft()
            self.answer(oldest, now)


class Version:
    """A model version over all its replicas."""

    __slots__ = (
        "free",
        "levels",
        "line",
        "name",
        "numbered",
        "parked",
        "placeable",
        "sent",
        "service_ms",
        "sites",
        "slow",
        "slow_start_s",
        "told",
    )

    def __init__(self, name: str, *, slow_start_s: float) -> None:
        self.name = name
        self.slow_start_s = slow_start_s
        self.sites: dict[str, Site] = {}
        self.numbered: list[Site | None] = []
        self.free: list[int] = []
        self.levels: dict[str, list[dict[Site, None]]] = {}
        """By pool, of growing wait; whoever was chosen last stands last. Empty while there are few
        replicas."""
        self.parked: dict[Site, None] = {}
        self.slow: dict[Site, None] = {}
        """Those that seem slow; whoever was tried last stands last."""
        self.placeable = 0
        """Replicas that nothing in their reports speaks against."""
        self.told = PrefixIndex()
        """What engines tell that they have cached."""
        self.sent = PrefixIndex()
        """What was sent where, thinned out."""
        self.line = Line(base_ms=_USUAL_BASE_MS, rate_ms=_USUAL_RATE_MS)
        self.service_ms = _USUAL_SERVICE_MS
        """From the first token to the end."""

    # --- Predicting ----------------------------------------------------------------------------

    def wait(self, site: Site, now: float) -> Wait:
        """What a request finds there now."""
        line, load = self.line, site.load
        factor = site.factor.at(now)
        base_ms, rate_ms = line.base_ms * factor, line.rate_ms * factor
        other_ms = base_ms
        queue_ms = 0.0
        if (requests := site.requests) > 0:
            slots: float = load.slots or 1
            if load.kv_usage > _KV_FULL and load.in_flight:
                # As many as the KV cache has room for, when all are like those that are there.
                slots = min(slots, max(1.0, load.in_flight / load.kv_usage))
            busy = requests / slots
            if busy >= 1.0:
                queue_ms = (busy - 1.0 + 1.0 / slots) * self.service_ms * factor
                busy = 1.0
            # A step takes the longer, the more sequences it decodes.
            queue_ms += 0.5 * base_ms * busy + site.tokens_ahead(now, rate_ms) * rate_ms
            if site.unanswered:
                oldest = site.unanswered[0]
                late_ms = 1000.0 * (now - oldest.sent_s) - oldest.predicted_ms
                if late_ms > 0.0:
                    other_ms += late_ms
            is_full = requests >= slots
        else:
            is_full = False
        ramp = 1.0
        if now - site.since_s < self.slow_start_s:
            ramp = max(_RAMP_LEAST, (now - site.since_s) / self.slow_start_s)
        return queue_ms, other_ms, rate_ms, ramp, is_full

    def learn_first(self, ticket: Ticket, now: float) -> None:
        """A first token came."""
        site, line = ticket.site, self.line
        took_ms = 1000.0 * (now - ticket.sent_s)
        tokens = ticket.tokens + ticket.ahead
        site.factor.observe(took_ms, line.expected_ms(tokens), now)
        line.observe(tokens, took_ms, site.factor)
        if site.factor.at(now) > _SLOW:
            if self.sites.get(site.replica.replica_id) is site:
                self.slow[site] = None
        else:
            self.slow.pop(site, None)

    def learn_service(self, ticket: Ticket, now: float) -> None:
        """An answer is complete."""
        first_s = ticket.first_s
        if first_s is None or not ticket.tells_first:
            first_s = ticket.sent_s + 0.001 * ticket.predicted_ms
        self.service_ms += _SERVICE_SHARE * (max(0.0, 1000.0 * (now - first_s)) - self.service_ms)

    # --- Coming and going ----------------------------------------------------------------------

    def add(self, replica: Replica, now: float) -> Site:
        """A replica has this version now."""
        number = self.free.pop() if self.free else len(self.numbered)
        site = Site(number, self, replica, now)
        if number == len(self.numbered):
            self.numbered.append(site)
        else:
            self.numbered[number] = site
        self.sites[replica.replica_id] = site
        self.placeable += 1
        return site

    def restart(self, site: Site, now: float) -> None:
        """Its runner is another one: nothing of what was known holds."""
        site.since_s = now
        site.factor = Factor(now)
        self.slow.pop(site, None)
        # An engine that tells what it has cached tells this itself.
        self.sent.clear(site.number)

    def stand(self, site: Site, standing: Exclusion | None, now: float) -> None:
        """Note what a replica's report speaks against it with."""
        if standing is None and site.standing is not None:
            site.since_s = now
        self.placeable += (standing is None) - (site.standing is None)
        site.standing = standing

    def remove(self, site: Site) -> None:
        """A replica no longer has it. What runs there still ends."""
        del self.sites[site.replica.replica_id]
        self.placeable -= site.standing is None
        self.told.clear(site.number)
        self.sent.clear(site.number)
        self.slow.pop(site, None)
        self.take_out(site)
        self.numbered[site.number] = None
        self.free.append(site.number)
        if len(self.sites) == FEW:
            self.levels.clear()
            self.parked.clear()
            for other in self.sites.values():
                other.level, other.is_parked = None, False

    # --- Keeping order -------------------------------------------------------------------------

    @property
    def is_ordered(self) -> bool:
        """Whether there are so many that they are kept in order."""
        return len(self.sites) > FEW

    def sort(self, site: Site, now: float) -> None:
        """Put a replica where it belongs in the order; behind its equals."""
        if len(self.sites) <= FEW or self.sites.get(site.replica.replica_id) is not site:
            return
        if not self.levels:
            self.levels[site.replica.pool] = [{} for _ in range(_LEVELS)]
            for other in self.sites.values():
                self.sort(other, now)
        if site.standing is not None:
            self.take_out(site)
        elif not site.is_parked:
            found = self.wait(site, now)
            self._put(site, level_of(found))

    def take_out(self, site: Site) -> None:
        """Take a replica out of the order."""
        if site.level is not None:
            del self.levels[site.replica.pool][site.level][site]
            site.level = None
        if site.is_parked:
            del self.parked[site]
            site.is_parked = False

    def settle(self, site: Site, level: int) -> None:
        """Put a replica that was met at the wrong place where it belongs."""
        if site.level is not None and abs(site.level - level) > 1:
            self._put(site, level)

    def park(self, site: Site) -> None:
        """Take a replica out of the order that is down or ejected."""
        if site.level is not None:
            self.take_out(site)
            self.parked[site] = None
            site.is_parked = True

    def unpark(self, site: Site, now: float) -> None:
        """Put it back."""
        if site.is_parked:
            site.is_parked = False
            del self.parked[site]
            self.sort(site, now)

    def oldest_parked(self) -> Site | None:
        """The one that was looked at longest ago; it is the last to be looked at again."""
        site = next(iter(self.parked), None)
        if site is not None:
            del self.parked[site]
            self.parked[site] = None
        return site

    def idlest(self, priority_class: str) -> Iterator[Site]:
        """Those that have least to do first, of the pools that take a class. The order must not be
        changed meanwhile."""
        pools = tuple(self.levels.values())
        for level in range(_LEVELS):
            for levels in pools:
                for site in levels[level]:
                    if site.classes is not None and priority_class not in site.classes:
                        # The whole pool takes other classes.
                        break
                    yield site

    def _put(self, site: Site, level: int) -> None:
        if site.level is not None:
            del self.levels[site.replica.pool][site.level][site]
        levels = self.levels.get(site.replica.pool)
        if levels is None:
            levels = self.levels[site.replica.pool] = [{} for _ in range(_LEVELS)]
        levels[level][site] = None
        site.level = level


def level_of(wait: Wait) -> int:
    """The place of a predicted wait in the order; a slow start ends without notice, and is left
    out."""
    return min(_LEVELS - 1, int(_LEVELS_PER_DOUBLING * math.log2(1.0 + wait[0] + wait[1])))
