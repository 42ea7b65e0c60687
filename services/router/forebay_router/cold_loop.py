"""Has cold models woken or loaded while their requests wait: one load per model, whatever the herd.

Among routers the first to put a claim under its lease orders the load; the others wait for what it
does. While etcd is away each goes on alone: they choose the same host, where a load is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Protocol

from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.discovery import Keys
from forebay_common.errors import ForebayError, Reason
from forebay_common.lease import Lease
from forebay_common.store import Condition, Op, Store

from forebay_router.core.cold import Host, LoadTimes, Presence, choose_host

_log = logging.getLogger(__name__)
_CLAIM_AGAIN_S = 0.5
_UNKNOWN_LOAD_S = 60.0
_FAILED_MOST = 1024
_NOT_SERVING = frozenset({engine.MODEL_STATE_COLD, engine.MODEL_STATE_SLEEPING})
# What another host may be able to do.
_ELSEWHERE = frozenset(
    {
        Reason.INSUFFICIENT_MEMORY,
        Reason.DRAINING,
        Reason.NO_REPLICA,
        Reason.REPLICA_LOST,
        Reason.LOAD_FAILED,
        Reason.INTERNAL,
        Reason.UNSUPPORTED,
        Reason.INVALID_ARGUMENT,
    }
)


class Replicas(Protocol):
    """The fleet, as far as loads need it."""

    def reported(self) -> Sequence[batcher.Replica]:
        """Each replica as it last described itself."""
        ...

    def is_down(self, replica_id: str) -> bool:
        """Whether it is held for down."""
        ...


Ensure = Callable[[str, engine.ModelSpec], AsyncGenerator[batcher.EnsureModelResponse, None]]
Claim = Callable[[str], AbstractAsyncContextManager[bool]]


class Cold:
    """The models that are being made ready."""

    def __init__(
        self,
        fleet: Replicas,
        *,
        ensure: Ensure,
        claim: Claim,
        spec_of: Callable[[str], engine.ModelSpec | None],
        held_most: int,
        pause_s: float,
        loads_most: int,
        released_most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            fleet: where models are.
            ensure: makes a replica (its address) serve a model.
            claim: holds the right to load a model version among routers; False when another has it.
            spec_of: how to run a model version; None when it is not known.
            held_most: requests that may wait for one model version.
            pause_s: after a load that failed everywhere, until the next is tried.
            loads_most: loads at once.
            released_most: of the requests that waited for one model, how many may go to it at once
                before they get a first token, so that a herd does not fall upon a queue.
            clock: monotonic seconds.
        """
        self._fleet = fleet
        self._ensure = ensure
        self._claim = claim
        self._spec_of = spec_of
        self._held_most = held_most
        self._pause_s = pause_s
        self._loads_most = loads_most
        self._released_most = released_most
        self._clock = clock
        self._times = LoadTimes()
        self._held: dict[str, int] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}
        self._failed: dict[str, tuple[float, ForebayError]] = {}

    @property
    def held(self) -> int:
        """Requests that wait for a model now."""
        return sum(self._held.values())

    @property
    def loads(self) -> int:
        """Models that this router has made ready now, or waits for."""
        return len(self._tasks)

    def is_cold(self, model_version: str) -> bool:
        """Whether no replica has it, or is about to, and there is one that could load it."""
        return bool(self._hosts(model_version)) and all(
            model.state in _NOT_SERVING
            for replica in self._fleet.reported()
            for model in replica.models
            if model.model_version == model_version
        )

    def is_coming(self, model_version: str) -> bool:
        """Whether somebody is making it ready."""
        return model_version in self._tasks or self._state(model_version) is not None

    def is_awaited(self, model_version: str) -> bool:
        """Whether requests wait for it, or for their turn after they did."""
        return model_version in self._held

    @contextlib.contextmanager
    def hold(self, model_version: str) -> Iterator[asyncio.Semaphore]:
        """Let a request wait for a model, which is woken or loaded for it.

        Gives the gate that it passes afterwards; whoever passed it opens it again at its first
        token, or when it has ended.

        Raises:
            ForebayError: too many wait already, or the model could not be loaded a moment ago.
        """
        held = self._held.get(model_version, 0)
        if held >= self._held_most:
            raise ForebayError(
                Reason.NO_REPLICA,
                "The model is being loaded, and too many requests wait for it.",
                retry_after_s=self.remaining_s(model_version),
            )
        self._want(model_version)
        self._held[model_version] = held + 1
        gate = self._gates.get(model_version)
        if gate is None:
            gate = self._gates[model_version] = asyncio.Semaphore(self._released_most)
        try:
            yield gate
        finally:
            left = self._held[model_version] - 1
            if left:
                self._held[model_version] = left
            else:
                del self._held[model_version], self._gates[model_version]

    def failure(self, model_version: str) -> ForebayError | None:
        """Why the model cannot be had now; None while there is hope."""
        failed = self._failed.get(model_version)
        if failed is None:
            return None
        until_s, error = failed
        if until_s <= self._clock():
            del self._failed[model_version]
            return None
        return error

    def phase(self, model_version: str) -> str:
        """What a request for it waits for: `queued`, or a phase of its load in lower case."""
        return self._state(model_version) or "queued"

    def remaining_s(self, model_version: str) -> float:
        """Seconds until it will be ready, as far as can be told."""
        now = self._clock()
        elapsed_s = now - self._began.get(model_version, now)
        return self._times.remaining_s(model_version, elapsed_s, otherwise=_UNKNOWN_LOAD_S)

    async def close(self) -> None:
        """Stop waiting for loads; those that run go on where they are."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _state(self, model_version: str) -> str | None:
        found = None
        for replica in self._fleet.reported():
            for model in replica.models:
                if model.model_version != model_version:
                    continue
                if model.state == engine.MODEL_STATE_LOADING:
                    name = engine.LoadPhase.Name(model.phase) if model.phase in _PHASES else ""
                    found = name.removeprefix("LOAD_PHASE_").lower() or "loading"
        return found

    def _want(self, model_version: str) -> None:
        error = self.failure(model_version)
        if error is not None:
            raise error
        if model_version in self._tasks or not self.is_cold(model_version):
            return
        if len(self._tasks) >= self._loads_most:
            raise ForebayError(
                Reason.NO_REPLICA, "Too many models are being loaded at once.", retry_after_s=5
            )
        self._began[model_version] = self._clock()
        task = asyncio.get_running_loop().create_task(
            self._run(model_version), name=f"load {model_version}"
        )
        self._tasks[model_version] = task
        task.add_done_callback(lambda done: self._ended(model_version, done))

    def _ended(self, model_version: str, task: asyncio.Task[None]) -> None:
        del self._tasks[model_version]
        began = self._began.pop(model_version)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._times.note(model_version, self._clock() - began)
            return
        if not isinstance(error, ForebayError):
            _log.error("a load failed unexpectedly", exc_info=error)
        _log.warning("%s could not be loaded: %s", model_version, error)
        while len(self._failed) >= _FAILED_MOST:
            del self._failed[next(iter(self._failed))]
        shown = ForebayError(
            Reason.NO_REPLICA,
            "The model is not loaded, and no replica could load it.",
            retry_after_s=self._pause_s,
        )
        self._failed[model_version] = (self._clock() + self._pause_s, shown)

    async def _run(self, model_version: str) -> None:
        while self.is_cold(model_version):
            async with self._claim(model_version) as is_ours:
                if is_ours:
                    await self._load(model_version)
                    return
            await asyncio.sleep(_CLAIM_AGAIN_S)

    async def _load(self, model_version: str) -> None:
        spec = self._spec_of(model_version)
        if spec is None:
            raise ForebayError(Reason.MODEL_NOT_FOUND, "The model does not exist.")
        tried: set[str] = set()
        failure = ForebayError(Reason.NO_REPLICA, "There is no replica that could load it.")
        while (host := choose_host(self._hosts(model_version), tried=tried)) is not None:
            tried.add(host.replica_id)
            address = self._address(host.replica_id)
            _log.info("%s is made ready on %s", model_version, host.replica_id)
            try:
                async with aclosing(self._ensure(address, spec)) as states:
                    async for state in states:
                        if state.state == engine.MODEL_STATE_ACTIVE:
                            return
                failure = ForebayError(Reason.LOAD_FAILED, "The load ended early.")
            except ForebayError as error:
                failure = error
                if error.reason not in _ELSEWHERE:
                    raise
        raise failure

    def _hosts(self, model_version: str) -> list[Host]:
        return [
            Host(
                replica.replica_id,
                _presence(replica, model_version),
                len(replica.models),
                sum(model.queued + model.in_flight for model in replica.models),
            )
            for replica in self._fleet.reported()
            if replica.role == batcher.ROLE_ACTIVE
            and not replica.draining
            and not self._fleet.is_down(replica.replica_id)
        ]

    def _address(self, replica_id: str) -> str:
        return next(
            (each.address for each in self._fleet.reported() if each.replica_id == replica_id), ""
        )


_PHASES = frozenset(engine.LoadPhase.values())


def _presence(replica: batcher.Replica, model_version: str) -> Presence:
    for model in replica.models:
        if model.model_version == model_version and model.state == engine.MODEL_STATE_SLEEPING:
            return Presence.ASLEEP
    return Presence.ABSENT


@asynccontextmanager
async def claim_load(
    store: Store, keys: Keys, lease: Lease, owner: str, model_version: str
) -> AsyncIterator[bool]:
    """Hold the right to load a model version among routers, under a router's lease.

    Gives False when another router has it, True also while etcd is away.
    """
    key, value = keys.load(model_version), owner.encode()
    is_ours = True
    try:
        result = await store.commit(
            if_=[Condition.absent(key)],
            then=[Op.put(key, value, lease_id=lease.id)],
            else_=[Op.get(key)],
        )
        held = result.entries.get(key)
        is_ours = result.succeeded or (held is not None and held.value == value)
    except ForebayError as error:
        if error.reason is not Reason.STORE_UNAVAILABLE:
            raise
    try:
        yield is_ours
    finally:
        if is_ours:
            with contextlib.suppress(ForebayError):
                await store.commit(if_=[Condition.value(key, value)], then=[Op.delete(key)])
