"""Who goes next: a bounded queue by priority class in front of each model version's slots.

Order, for each model version: every other start goes to the request that is overdue the longest,
if one is overdue; the others go to the highest class that waits, and within it to the earliest
expiry, then arrival. So at most 2·k + 1 starts go before an overdue request, where k others are
overdue longer, and the highest class keeps every other start: nobody starves, below or above.

Invariants: a model version never has more requests in flight than slots; an offered request leaves
exactly once (started, expired, unserved, or withdrawn); an expired one is never started.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice

from forebay_common.errors import Reason


class PriorityClass(IntEnum):
    """Highest first. The numbers are the contract's."""

    REALTIME = 1
    BATCH = 2
    BACKGROUND = 3

    word: str
    """Its name; an enum's own is looked up through a descriptor each time."""

    def __init__(self, number: int) -> None:
        self.word = self._name_


@dataclasses.dataclass(frozen=True, slots=True)
class ClassLimits:
    """What one class may claim."""

    queued_max: int
    wait_s_max: float
    """A request that has waited this long leaves unserved."""
    overdue_s: float
    """A request that has waited this long is overdue."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the queue may hold, and when it holds back."""

    classes: Mapping[PriorityClass, ClassLimits]
    queued_bytes_max: int
    kv_cache_usage_max: float
    """From this share of the KV cache on, nothing starts beside what runs."""


# `Request` and `Start` are values, too, but not frozen: each request makes both, in a third of the
# time that way.
@dataclasses.dataclass(slots=True)
class Request:
    """One request that waits or runs. Times are in seconds on one clock."""

    number: int
    """Grows with each arrival."""
    request_id: str
    model_version: str
    priority: PriorityClass
    size_bytes: int
    arrived: float
    deadline: float | None
    prompt_tokens: int = 0
    """Estimated. 0 once the engine has read them: its answer has begun."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """What a model version's runner can take."""

    generation: int
    """Of the runner's process. Slots of another one start empty."""
    slots: int
    kv_cache_usage: float
    target: str
    """Where the runner is reached. The queue does not look at it."""


@dataclasses.dataclass(slots=True)
class Start:
    """A request that gets a slot now."""

    request: Request
    capacity: Capacity
    """Of the runner whose slot it is."""
    overdue: bool
    """It was chosen because it was overdue the longest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """A request that ends unserved."""

    request: Request
    reason: Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What happens next. A plan until it is applied."""

    starts: tuple[Start, ...]
    leaves: tuple[Leave, ...]

    def __bool__(self) -> bool:
        return bool(self.starts or self.leaves)


@dataclasses.dataclass(slots=True)
class _Lane:
    """The waiting requests of one model version and class, in their two orders."""

    by_arrival: OrderedDict[int, Request] = dataclasses.field(default_factory=OrderedDict)
    by_expiry: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def add(self, request: Request, expires_at: float) -> None:
        self.by_arrival[request.number] = request
        insort(self.by_expiry, (expires_at, request.number))

    def remove(self, number: int, expires_at: float) -> None:
        del self.by_arrival[number]
        del self.by_expiry[bisect_left(self.by_expiry, (expires_at, number))]


class Queue:
    """The waiting and the running requests of one replica. Holds no lock: it has one owner."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[int, Request] = {}
        self._lanes: dict[tuple[str, PriorityClass], _Lane] = {}
        self._depths: Counter[PriorityClass] = Counter()
        self._queued: Counter[str] = Counter()
        self._queued_bytes = 0
        self._prompt_tokens: Counter[str] = Counter()
        """Of the requests that wait, or run without an answer yet, by model version."""
        self._running: dict[int, Start] = {}
        self._in_flight: Counter[tuple[str, int]] = Counter()
        self._capacities: Mapping[str, Capacity] = {}
        self._overdue_was_last: dict[str, bool] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests started and not released, on any generation of a runner."""
        return len(self._running)

    @property
    def queued_bytes(self) -> int:
        """Size of the messages that wait."""
        return self._queued_bytes

    def depth(self, priority: PriorityClass) -> int:
        """Requests of a class that wait."""
        return self._depths[priority]

    def queued(self, model_version: str) -> int:
        """Requests for a model version that wait."""
        return self._queued[model_version]

    def in_flight(self, model_version: str) -> int:
        """Requests that hold a slot of the model version's present runner."""
        capacity = self._capacities.get(model_version)
        return 0 if capacity is None else self._in_flight[model_version, capacity.generation]

    def waiting_prompt_tokens(self, model_version: str) -> int:
        """Estimated prompt tokens of the requests that wait, and of those that run and whose
        answer has not begun."""
        return self._prompt_tokens[model_version]

    def note_answer(self, request: Request) -> bool:
        """The answer of a request that was started begins: its prompt has been read.

        Returns whether that changes anything.
        """
        tokens, request.prompt_tokens = request.prompt_tokens, 0
        if tokens:
            self._prompt_tokens[request.model_version] -= tokens
        return tokens > 0

    def set_capacities(self, capacities: Mapping[str, Capacity]) -> None:
        """Replace what the runners can take. What waits for another model version will leave."""
        self._capacities = dict(capacities)
        for model_version in self._overdue_was_last.keys() - capacities.keys():
            del self._overdue_was_last[model_version]
        for model_version in [name for name, tokens in self._prompt_tokens.items() if not tokens]:
            del self._prompt_tokens[model_version]

    def start_at_once(self, request: Request, now: float) -> Start | Reason | None:
        """Start a request that nobody waits before, or say why it may not even wait.

        Does exactly what `offer`, `plan_batch` and `apply` would do of it. None, and no change,
        where it would not start by them, or where the plan has to tell.
        """
        refusal = self._why_refused(request, now)
        if refusal is not None:
            return refusal
        model_version = request.model_version
        if model_version in self._queued or not self._free(model_version):
            return None
        if self._expires_at(request) <= now:
            return None
        overdue_at, _ = self._due_at(request)
        overdue = overdue_at <= now and not self._overdue_was_last.get(model_version, False)
        start = Start(request, self._capacities[model_version], overdue)
        self._begin(start)
        return start

    def offer(self, request: Request, now: float) -> Reason | None:
        """Let a request wait, or say why not."""
        assert request.number not in self._waiting and request.number not in self._running
        refusal = self._why_refused(request, now)
        if refusal is not None:
            return refusal
        self._waiting[request.number] = request
        lane = self._lanes.setdefault((request.model_version, request.priority), _Lane())
        lane.add(request, self._expires_at(request))
        self._depths[request.priority] += 1
        self._queued[request.model_version] += 1
        self._queued_bytes += request.size_bytes
        self._prompt_tokens[request.model_version] += request.prompt_tokens
        return None

    def withdraw(self, number: int) -> Request | None:
        """Forget a request that waits, and return it; None if it does not wait."""
        return self._remove(number) if number in self._waiting else None

    def release(self, number: int) -> Request | None:
        """Free the slot of a request that runs, and return it; None if it does not run."""
        start = self._running.pop(number, None)
        if start is None:
            return None
        key = (start.request.model_version, start.capacity.generation)
        self._in_flight[key] -= 1
        if self._in_flight[key] == 0:
            del self._in_flight[key]
        self.note_answer(start.request)
        return start.request

    def plan_batch(self, now: float) -> Batch:
        """Say who starts and who leaves now. Changes nothing."""
        leaves: list[Leave] = []
        starts: list[Start] = []
        for (model_version, priority), lane in self._lanes.items():
            if model_version not in self._capacities:
                requests = lane.by_arrival.values()
                leaves.extend(Leave(request, Reason.MODEL_NOT_LOADED) for request in requests)
                continue
            for _, number in islice(lane.by_expiry, bisect_left(lane.by_expiry, _after(now))):
                request = self._waiting[number]
                leaves.append(Leave(request, self._why_expired(request, priority, now)))
        for model_version in self._capacities:
            if self._queued[model_version] and (free := self._free(model_version)):
                starts.extend(islice(self._in_order(model_version, now), free))
        return Batch(tuple(starts), tuple(leaves))

    def apply(self, batch: Batch) -> None:
        """Do what a plan of this moment says."""
        for leave in batch.leaves:
            self._remove(leave.request.number)
        for start in batch.starts:
            self._remove(start.request.number)
            self._begin(start)

    def next_expiry(self) -> float | None:
        """When the first waiting request expires."""
        return min((lane.by_expiry[0][0] for lane in self._lanes.values()), default=None)

    def listing(self, limit: int, now: float) -> list[Request]:
        """Up to `limit` waiting requests in the order they would start; model versions, which do
        not compete, take turns."""
        placed: list[tuple[int, int, Request]] = []
        for model_version in self._capacities:
            order = islice(self._in_order(model_version, now), limit)
            placed.extend((place, s.request.number, s.request) for place, s in enumerate(order))
        placed.sort(key=lambda entry: entry[:2])
        return [request for _, _, request in placed[:limit]]

    def _why_refused(self, request: Request, now: float) -> Reason | None:
        if request.deadline is not None and request.deadline <= now:
            return Reason.DEADLINE_EXCEEDED
        if request.model_version not in self._capacities:
            return Reason.MODEL_NOT_LOADED
        if self._depths[request.priority] >= self._limits.classes[request.priority].queued_max:
            return Reason.QUEUE_FULL
        if self._queued_bytes + request.size_bytes > self._limits.queued_bytes_max:
            return Reason.QUEUE_FULL
        return None

    def _begin(self, start: Start) -> None:
        request = start.request
        self._running[request.number] = start
        self._in_flight[request.model_version, start.capacity.generation] += 1
        self._overdue_was_last[request.model_version] = start.overdue
        self._prompt_tokens[request.model_version] += request.prompt_tokens

    def _free(self, model_version: str) -> int:
        capacity = self._capacities[model_version]
        in_flight = self._in_flight[model_version, capacity.generation]
        if capacity.kv_cache_usage >= self._limits.kv_cache_usage_max:
            # The figure may be older than the end of what caused it, so an idle runner gets one.
            return 0 if in_flight else min(1, capacity.slots)
        return max(0, capacity.slots - in_flight)

    def _in_order(self, model_version: str, now: float) -> Iterator[Start]:
        """Every request that waits for a model version and has not expired, as it would start."""
        capacity = self._capacities[model_version]
        lanes = [
            (priority, self._lanes[model_version, priority])
            for priority in PriorityClass
            if (model_version, priority) in self._lanes
        ]
        taken: set[int] = set()
        regular = [_Reader(self._unexpired(lane, now), taken) for _, lane in lanes]
        overdue = [
            _Reader(self._overdue(lane, self._limits.classes[priority], now), taken)
            for priority, lane in lanes
        ]
        overdue_was_last = self._overdue_was_last.get(model_version, False)
        while True:
            chosen = None
            if not overdue_was_last:
                late = [request for reader in overdue if (request := reader.peek())]
                chosen = min(late, key=self._due_at, default=None)
            overdue_was_last = chosen is not None
            if chosen is None:
                chosen = next((r for reader in regular if (r := reader.peek())), None)
            if chosen is None:
                return
            taken.add(chosen.number)
            yield Start(chosen, capacity, overdue_was_last)

    def _unexpired(self, lane: _Lane, now: float) -> Iterator[Request]:
        first = bisect_left(lane.by_expiry, _after(now))
        for index in range(first, len(lane.by_expiry)):
            yield self._waiting[lane.by_expiry[index][1]]

    def _overdue(self, lane: _Lane, limits: ClassLimits, now: float) -> Iterator[Request]:
        for request in lane.by_arrival.values():
            if request.arrived + limits.overdue_s > now:
                return
            if self._expires_at(request) > now:
                yield request

    def _due_at(self, request: Request) -> tuple[float, int]:
        due_at = request.arrived + self._limits.classes[request.priority].overdue_s
        return due_at, request.number

    def _expires_at(self, request: Request) -> float:
        leaves_at = request.arrived + self._limits.classes[request.priority].wait_s_max
        return leaves_at if request.deadline is None else min(leaves_at, request.deadline)

    def _why_expired(self, request: Request, priority: PriorityClass, now: float) -> Reason:
        if request.deadline is not None and request.deadline <= now:
            return Reason.DEADLINE_EXCEEDED
        assert request.arrived + self._limits.classes[priority].wait_s_max <= now
        return Reason.QUEUE_FULL

    def _remove(self, number: int) -> Request:
        request = self._waiting.pop(number)
        key = (request.model_version, request.priority)
        lane = self._lanes[key]
        lane.remove(number, self._expires_at(request))
        if not lane.by_arrival:
            del self._lanes[key]
        self._depths[request.priority] -= 1
        self._queued[request.model_version] -= 1
        if self._queued[request.model_version] == 0:
            del self._queued[request.model_version]
        self._queued_bytes -= request.size_bytes
        self._prompt_tokens[request.model_version] -= request.prompt_tokens
        return request


class _Reader:
    """Reads a lane in one order, passing over what was taken through the other."""

    def __init__(self, requests: Iterable[Request], taken: set[int]) -> None:
        self._requests = iter(requests)
        self._taken = taken
        self._next: Request | None = next(self._requests, None)

    def peek(self) -> Request | None:
        while self._next is not None and self._next.number in self._taken:
            self._next = next(self._requests, None)
        return self._next


def _after(now: float) -> tuple[float, float]:
    """Sorts behind everything that expires at `now`."""
    return now, float("inf")
