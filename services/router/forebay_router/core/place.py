"""Which replica a request goes to: the one that is predicted to give a first token first.

predicted ms = work ahead in the queue + the part of the prompt that is not cached there * rate
+ what else there is (a step, slow start, and how late the oldest request without a token is).

Nothing is scanned per request: of many replicas those are compared that hold most of the prompt,
some that have least to do, and some drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from forebay_common.prefixes import LENGTHS, prefix_hashes

from forebay_router.core.placement import (
    NOTHING,
    Ask,
    Candidate,
    Draw,
    Exclusion,
    Exclusions,
    ModelLoad,
    Options,
    Placement,
    Replica,
    Wait,
    Weighed,
    standing_of,
)
from forebay_router.core.prefixes import gap_behind, thin_out
from forebay_router.core.sites import FEW, Site, Ticket, Version, level_of

__all__ = (
    "NOTHING",
    "Ask",
    "Candidate",
    "Draw",
    "Exclusion",
    "Exclusions",
    "ModelLoad",
    "Options",
    "Placement",
    "Placer",
    "Replica",
    "Ticket",
    "Weighed",
    "standing_of",
)

_HOLDERS, _IDLEST, _DRAWN = 3, 4, 2
"""Of those that have most of a prompt, by what engines tell and again by what was sent; of those
that have least to do; at random."""
_LOOKED_AT = 64
"""Most replicas, of those that have least to do, that are looked at for some that can be chosen.
Those that are down or ejected do not count: they are met once, and parked."""
_PARKED = 64
"""Most of those that are parked that are looked at again where there is no other."""
_SAME_MS, _SAME_SHARE = 1.0, 0.05
_NAMED_TOKENS = 64
"""What is cached of a shorter prompt is not worth looking for."""
_UNTOLD_S = 5.0
"""Time in which an engine that tells what it has cached has told of a prompt that it answers."""
_VERSIONS_KEPT = 10_000


_Able = tuple[float, Site, int, Wait]
"""Cost, where, cached tokens."""


class Placer:
    """Knows all replicas of one router's view, and places requests among them."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        self._versions: dict[str, Version] = {}
        self._replicas: dict[str, Replica] = {}
        self._sites = 0

    # --- What is told of replicas --------------------------------------------------------------

    def update(self, replica: Replica, now: float) -> None:
        """A replica reported, or was found."""
        before = self._replicas.get(replica.replica_id)
        self._replicas[replica.replica_id] = replica
        if before is not None:
            for name in before.models.keys() - replica.models.keys():
                self._remove(name, replica.replica_id)
        for name, load in replica.models.items():
            version = self._versions.get(name)
            if version is None:
                version = self._versions[name] = Version(
                    name, slow_start_s=self._options.slow_start_s
                )
            site = version.sites.get(replica.replica_id)
            if site is None:
                site = version.add(replica, now)
                self._sites += 1
            else:
                if load.active and not site.load.active:
                    version.restart(site, now)
                if replica.pool != site.replica.pool:
                    version.take_out(site)
            site.replica = replica
            site.load = load
            site.own_at_report = site.own
            site.own_tokens_at_report = site.own_tokens
            site.classes = self._options.pool_classes.get(replica.pool)
            version.stand(site, standing_of(replica, load), now)
            version.sort(site, now)

    def remove(self, replica_id: str) -> None:
        """A replica left. What runs there still ends."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            for name in replica.models:
                self._remove(name, replica_id)

    def returned(self, replica_id: str, now: float) -> None:
        """A replica is back after it was down or ejected: it starts slowly."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            for name in replica.models:
                version = self._versions[name]
                site = version.sites[replica_id]
                site.since_s = now
                version.unpark(site, now)
                version.sort(site, now)

    def cached(
        self,
        replica_id: str,
        model_version: str,
        *,
        stored: Sequence[int],
        removed: Iterable[int],
        reset: bool,
    ) -> bool:
        """An engine told what it has cached.

        Returns:
            False where that replica is not known to have the model: it must be told again.
        """
        version = self._versions.get(model_version)
        site = version.sites.get(replica_id) if version is not None else None
        if version is None or site is None:
            return False
        if reset:
            version.told.clear(site.number)
        site.is_told = True
        version.told.remove(site.number, removed)
        version.told.add(site.number, stored, most=self._prefixes_most())
        return True

    def untold(self, replica_id: str, model_version: str = "") -> None:
        """An engine, or all of a replica's, no longer tells what it has cached. What it told may be
        gone."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            for name in replica.models:
                if model_version in ("", name):
                    version = self._versions[name]
                    site = version.sites[replica_id]
                    site.is_told = False
                    version.told.clear(site.number)

    # --- Choosing ------------------------------------------------------------------------------

    def choose(
        self, ask: Ask, now: float, draw: Draw, exclusions: Exclusions = NOTHING
    ) -> Placement:
        """Choose a replica.

        Args:
            ask: the request; its `names` are filled in where they were needed.
            now: monotonic seconds.
            draw: decides among equals.
            exclusions: what stands against replicas beside their reports.
        """
        version = self._versions.get(ask.model_version)
        if version is None:
            return Placement(None, ())
        sites = version.sites
        is_ordered = len(sites) > FEW
        if ask.names is None and len(sites) > 1:
            _name(ask)
        compared = self._some(version, ask, now, draw, exclusions) if is_ordered else sites.values()
        weighed: list[Weighed] = []
        able: list[_Able] = []
        lowest = inf
        for site in compared:
            excluded = self._exclusion(site, ask, exclusions)
            if excluded is not None:
                weighed.append((site.replica.replica_id, None, excluded, 0.0, 0.0, 0.0, 0))
                continue
            wait = queue_ms, other_ms, rate_ms, ramp, _ = version.wait(site, now)
            cached = self._cached_tokens(version, site, ask, now) if ask.names else 0
            prefill_ms = (ask.prompt_tokens - cached) * rate_ms
            cost = queue_ms + prefill_ms + other_ms
            if ramp < 1.0:
                other_ms += cost * (1.0 / ramp - 1.0)
                cost /= ramp
            replica_id = site.replica.replica_id
            weighed.append((replica_id, cost, None, queue_ms, prefill_ms, other_ms, cached))
            able.append((cost, site, cached, wait))
            # Not min(): a comparison takes a quarter of a call.
            if cost < lowest:  # noqa: PLR1730
                lowest = cost
            if is_ordered:
                version.settle(site, level_of(wait))
        if not able:
            return Placement(None, weighed)
        cost, site, cached, wait = self._pick(version, able, lowest, draw)
        placeable = version.placeable if is_ordered else len(able)
        return Placement(site.replica, weighed, placeable, cost, cached, wait)

    def census(self, ask: Ask, exclusions: Exclusions = NOTHING) -> Counter[str]:
        """Replicas of a request's model version by why they cannot be chosen; "" counts those that
        can. Looks at each: for whoever asks why there is none."""
        version = self._versions.get(ask.model_version)
        sites = version.sites.values() if version is not None else ()
        return Counter(self._exclusion(site, ask, exclusions) or "" for site in sites)

    def _pick(
        self,
        version: Version,
        able: Sequence[_Able],
        lowest: float,
        draw: Draw,
    ) -> _Able:
        if version.slow and draw.random() < self._options.explore_share:
            slow = next(iter(version.slow))
            for one in able:
                if one[1] is slow:
                    del version.slow[slow]
                    version.slow[slow] = None
                    return one
        enough = lowest + max(_SAME_MS, _SAME_SHARE * lowest)
        best = [one for one in able if one[0] <= enough]
        return best[draw.randrange(len(best))] if len(best) > 1 else best[0]

    def _some(
        self, version: Version, ask: Ask, now: float, draw: Draw, exclusions: Exclusions
    ) -> Iterable[Site]:
        """The replicas that are worth comparing, of many."""
        found: dict[Site, None] = {}
        numbered = version.numbered
        if ask.names:
            for index, names in ((version.told, ask.names), (version.sent, ask.thin_names)):
                for number in index.holders(names, most=_HOLDERS, draw=draw.randrange):
                    if (site := numbered[number]) is not None:
                        found[site] = None
        for _ in range(_DRAWN):
            if (site := numbered[draw.randrange(len(numbered))]) is not None:
                found[site] = None
        if version.slow:
            found[next(iter(version.slow))] = None
        away: list[Site] = []
        able = looked = 0
        for site in version.idlest(ask.priority_class):
            excluded = self._exclusion(site, ask, exclusions)
            if excluded is None:
                found[site] = None
                able += 1
                if able == _IDLEST:
                    break
            elif excluded is Exclusion.DOWN or excluded is Exclusion.EJECTED:
                away.append(site)
                continue
            looked += 1
            if looked == _LOOKED_AT:
                break
        for site in away:
            version.park(site)
        if version.parked:
            self._look_again(version, ask, now, exclusions, found, most=1 if able else _PARKED)
        return found

    def _look_again(
        self,
        version: Version,
        ask: Ask,
        now: float,
        exclusions: Exclusions,
        found: dict[Site, None],
        *,
        most: int,
    ) -> None:
        for _ in range(most):
            site = version.oldest_parked()
            if site is None or site in found:
                return
            found[site] = None
            excluded = self._exclusion(site, ask, exclusions)
            if excluded is not Exclusion.DOWN and excluded is not Exclusion.EJECTED:
                version.unpark(site, now)

    @staticmethod
    def _exclusion(site: Site, ask: Ask, exclusions: Exclusions) -> Exclusion | None:
        if site.standing is not None:
            return site.standing
        replica_id = site.replica.replica_id
        if replica_id in exclusions.down:
            return Exclusion.DOWN
        classes = site.classes
        if classes is not None and ask.priority_class and ask.priority_class not in classes:
            return Exclusion.WRONG_CLASS
        if replica_id in exclusions.ejected:
            return Exclusion.EJECTED
        if replica_id in exclusions.tried:
            return Exclusion.TRIED
        if replica_id in exclusions.occupied:
            return Exclusion.SUSPECT
        return None

    def _cached_tokens(self, version: Version, site: Site, ask: Ask, now: float) -> int:
        assert ask.names is not None, "the prompt has names"
        cached_bytes = 0
        if site.is_told:
            if depth := version.told.depth(site.number, ask.names):
                cached_bytes = LENGTHS[depth - 1]
            # What was sent there last is not told of yet.
            since_s = now - _UNTOLD_S
            if site.unanswered and site.unanswered[0].sent_s < since_s:
                since_s = site.unanswered[0].sent_s
        else:
            since_s = now - self._options.prefix_ttl_s
        sent, names = version.sent, ask.thin_names
        if thinned := sent.depth(site.number, names, since_s=since_s):
            depth, end = gap_behind(thinned)
            if end > depth:
                # One that was sent as it is has its own end in there.
                depth += sent.last(site.number, ask.names[depth:end], since_s=since_s)
            cached_bytes = max(cached_bytes, LENGTHS[depth - 1])
        return ask.prompt_tokens * cached_bytes // ask.prompt_bytes if cached_bytes else 0

    # --- What becomes of requests --------------------------------------------------------------

    def begin(self, ask: Ask, placement: Placement, now: float) -> Ticket:
        """A request goes to the replica that was chosen."""
        replica, wait = placement.chosen, placement.wait
        assert replica is not None, "a request goes somewhere"
        assert wait is not None, "a choice was weighed"
        version = self._versions[ask.model_version]
        site = version.sites[replica.replica_id]
        rate_ms, ramp, is_full = wait[2:]
        ticket = Ticket(
            site,
            max(0, ask.prompt_tokens - placement.cached_tokens),
            now,
            site.tokens_ahead(now, rate_ms),
            placement.predicted_ms * ramp,
            ask.tells_first,
            is_full,
        )
        site.send(ticket)
        if ask.names:
            # Whatever is sent there next finds it, or waits until it does.
            names, most = ask.thin_names, self._prefixes_most()
            if names[-1] != ask.names[-1]:
                version.sent.add(site.number, ask.names[-1:], most=most, at_s=now)
            version.sent.add(site.number, names, most=most, at_s=now)
        version.sort(site, now)
        return ticket

    def first(self, ticket: Ticket, now: float) -> None:
        """Its first message came."""
        if ticket.first_s is not None or ticket.ended:
            return
        ticket.first_s = now
        site = ticket.site
        if ticket.tells_first and not ticket.queues:
            site.version.learn_first(ticket, now)
        site.answer(ticket, now)

    def end(self, ticket: Ticket, now: float, *, succeeded: bool) -> None:
        """Its attempt ended."""
        if ticket.ended:
            return
        ticket.ended = True
        site, version = ticket.site, ticket.site.version
        site.answer(ticket, now)
        site.own -= 1
        if succeeded and ticket.first_s is not None:
            version.learn_service(ticket, now)
        version.sort(site, now)

    def in_flight(self, replica_id: str) -> int:
        """This router's own requests on a replica now."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        return sum(self._versions[name].sites[replica_id].own for name in replica.models)

    def _remove(self, name: str, replica_id: str) -> None:
        version = self._versions[name]
        version.remove(version.sites[replica_id])
        self._sites -= 1
        # What was learned is kept with the name.
        if not version.sites and len(self._versions) > _VERSIONS_KEPT:
            del self._versions[name]

    def _prefixes_most(self) -> int:
        options = self._options
        return min(options.prefixes_most, options.prefixes_most_of_all // max(1, self._sites))


def _name(ask: Ask) -> None:
    if ask.prompt is None or ask.prompt_tokens < _NAMED_TOKENS:
        ask.names = ()
        return
    prompt = ask.prompt()
    ask.prompt_bytes = len(prompt)
    ask.names = prefix_hashes(prompt)
    ask.thin_names = thin_out(ask.names)
