"""What is remembered of recent requests, to answer how they were placed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

from forebay_router.core.place import Candidate


@dataclasses.dataclass(slots=True)
class Attempt:
    """One try at one replica."""

    replica_id: str
    candidates: tuple[Candidate, ...]
    started_s: float
    outcome: str = ""
    first_message_ms: float | None = None


@dataclasses.dataclass(slots=True)
class Record:
    """One request."""

    request_id: str
    trace_id: str = ""
    requested_model: str = ""
    model_version: str = ""
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    outcome: str = ""
    """`succeeded`, `cancelled` or a reason; empty while it runs."""


class Recent:
    """The newest records, by request id. A repeated id replaces the older record."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Remember a request, forgetting the oldest when there are too many."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        while len(self._records) > self._limit:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The record of a request, if it is still remembered."""
        return self._records.get(request_id)


def most_telling(candidates: Sequence[Candidate], *, limit: int) -> tuple[Candidate, ...]:
    """The cheapest candidates, then the excluded ones, at most `limit`."""
    if len(candidates) <= limit:
        return tuple(candidates)
    ordered = sorted(
        candidates, key=lambda c: (c.excluded is not None, c.cost if c.cost is not None else 0.0)
    )
    return tuple(ordered[:limit])
