"""What is remembered of recent requests, to answer how they were placed."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from forebay_router.core.place import Candidate


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One try at one replica."""

    replica_id: str
    candidates: Sequence[Candidate]
    started_s: float
    outcome: str = ""
    first_message_s: float | None = None
    kind: str = "first"
    """`first`, `retry`, `resume` or `hedge`."""
    predicted_ms: float = 0.0
    placeable: int = 0

    @property
    def first_message_ms(self) -> float | None:
        """From the attempt's start to its first message."""
        if self.first_message_s is None:
            return None
        return (self.first_message_s - self.started_s) * 1000

    @property
    def excluded(self) -> Mapping[str, int]:
        """Of those that were looked at, how many were excluded for each reason."""
        return Counter(one.excluded.value for one in self.candidates if one.excluded is not None)


@dataclasses.dataclass(slots=True, eq=False)
class Wait:
    """A time that a request did not spend at a replica."""

    what: str
    """`catalogue`, `replica`, `model`, `quota` or `retry`."""
    waited_s: float
    detail: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One request."""

    request_id: str
    trace_id: str = ""
    requested_model: str = ""
    model_version: str = ""
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    outcome: str = ""
    """`succeeded`, `cancelled` or a reason; empty while it runs."""
    tenant: str = ""
    priority_class: str = ""
    prompt_tokens: int = 0
    via: str = ""
    tier_reason: str = ""
    waits: list[Wait] = dataclasses.field(default_factory=list)
    began_s: float = 0.0
    ended_s: float | None = None

    def duration_s(self, now: float) -> float:
        """From its arrival to its end, or to now while it runs."""
        return (now if self.ended_s is None else self.ended_s) - self.began_s


class Recent:
    """The newest records, by request id. A repeated id replaces the older record."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Remember a request, forgetting the oldest when there are too many."""
        records = self._records
        if record.request_id in records:
            del records[record.request_id]
        records[record.request_id] = record
        if len(records) > self._limit:
            records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The record of a request, if it is still remembered."""
        return self._records.get(request_id)


def most_telling(candidates: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
    """The cheapest candidates, then the excluded ones, at most `limit`."""
    if len(candidates) <= limit:
        return candidates
    return sorted(candidates, key=_rank)[:limit]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return candidate.cost is None, candidate.cost or 0.0
