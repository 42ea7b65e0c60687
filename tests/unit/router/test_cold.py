from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.errors import ForebayError, Reason
from forebay_router.cold_loop import Cold
from forebay_router.core.cold import Host, LoadTimes, Presence, choose_host

_MODEL = "m@1"
_SPEC = engine.ModelSpec(model_version=_MODEL)


def test_where_it_sleeps_is_nearer_than_where_it_is_not() -> None:
    hosts = [
        Host("a", Presence.ABSENT, 0, 0),
        Host("b", Presence.ASLEEP, 3, 9),
        Host("c", Presence.ABSENT, 0, 1),
    ]
    assert [choose_host(hosts, tried=t) for t in ((), {"b"}, {"a", "b"}, {"a", "b", "c"})] == [
        hosts[1],
        hosts[0],
        hosts[2],
        None,
    ]


def test_load_times_are_learned_and_bounded() -> None:
    times = LoadTimes(most=2)
    assert times.remaining_s("a", 10, otherwise=60) == 50
    times.note("a", 20)
    times.note("a", 30)
    assert times.remaining_s("a", 5, otherwise=60) == 20
    assert times.remaining_s("a", 500, otherwise=60) == 1
    for name in ("b", "c"):
        times.note(name, 1)
    assert times.remaining_s("a", 0, otherwise=60) == 60


class _Fleet:
    def __init__(self, *ids: str) -> None:
        self.replicas = {
            one: batcher.Replica(replica_id=one, address=one, role=batcher.ROLE_ACTIVE)
            for one in ids
        }
        self.ordered: list[str] = []
        self.refusals: dict[str, ForebayError] = {}
        self.go_on = asyncio.Event()
        self.claims = True

    def reported(self) -> Sequence[batcher.Replica]:
        return list(self.replicas.values())

    def is_down(self, replica_id: str) -> bool:
        return False

    async def ensure(
        self, address: str, spec: engine.ModelSpec
    ) -> AsyncGenerator[batcher.EnsureModelResponse, None]:
        self.ordered.append(address)
        if address in self.refusals:
            raise self.refusals[address]
        model = self.replicas[address].models.add(model_version=spec.model_version)
        model.state, model.phase = engine.MODEL_STATE_LOADING, engine.LOAD_PHASE_WEIGHTS
        yield batcher.EnsureModelResponse(state=model.state, phase=model.phase)
        await self.go_on.wait()
        model.state = engine.MODEL_STATE_ACTIVE
        yield batcher.EnsureModelResponse(state=model.state)

    @contextlib.asynccontextmanager
    async def claim(self, model_version: str) -> AsyncIterator[bool]:
        yield self.claims


def _cold(fleet: _Fleet, *, held_most: int = 2000, pause_s: float = 5.0) -> Cold:
    return Cold(
        fleet,
        ensure=fleet.ensure,
        claim=fleet.claim,
        spec_of=lambda name: _SPEC if name == _MODEL else None,
        held_most=held_most,
        pause_s=pause_s,
        loads_most=2,
        released_most=8,
        clock=lambda: 0.0,
    )


async def _settled(cold: Cold) -> None:
    async with asyncio.timeout(5):
        while cold.loads:
            await asyncio.sleep(0)


async def test_a_herd_makes_one_load() -> None:
    fleet = _Fleet("a", "b")
    cold = _cold(fleet)
    assert cold.is_cold(_MODEL)
    with contextlib.ExitStack() as held:
        for _ in range(1000):
            held.enter_context(cold.hold(_MODEL))
        assert cold.held == 1000
        assert cold.phase(_MODEL) == "queued"
        while not fleet.ordered:
            await asyncio.sleep(0)
        assert cold.phase(_MODEL) == "weights"
        fleet.go_on.set()
        await _settled(cold)
    assert fleet.ordered == ["a"]
    assert cold.held == 0
    assert not cold.is_cold(_MODEL)


async def test_what_one_host_cannot_another_may() -> None:
    fleet = _Fleet("a", "b")
    fleet.refusals["a"] = ForebayError(Reason.INSUFFICIENT_MEMORY, "full")
    fleet.go_on.set()
    cold = _cold(fleet)
    with cold.hold(_MODEL):
        await _settled(cold)
    assert fleet.ordered == ["a", "b"]


async def test_what_no_host_can_is_refused_for_a_while() -> None:
    fleet = _Fleet("a")
    fleet.refusals["a"] = ForebayError(Reason.LOAD_FAILED, "broken")
    cold = _cold(fleet)
    with cold.hold(_MODEL):
        await _settled(cold)
        failure = cold.failure(_MODEL)
        assert failure is not None
        assert (failure.reason, failure.retry_after_s) == (Reason.NO_REPLICA, 5.0)
    with pytest.raises(ForebayError), cold.hold(_MODEL):
        pass
    assert fleet.ordered == ["a"]


async def test_the_herd_is_bounded() -> None:
    cold = _cold(_Fleet("a"), held_most=1)
    with (
        cold.hold(_MODEL),
        pytest.raises(ForebayError, match="too many") as refused,
        cold.hold(_MODEL),
    ):
        pass
    assert refused.value.retry_after_s == 60
    await cold.close()


async def test_another_routers_load_is_waited_for() -> None:
    fleet = _Fleet("a")
    fleet.claims = False
    cold = _cold(fleet)
    with cold.hold(_MODEL):
        model = fleet.replicas["a"].models.add(model_version=_MODEL)
        model.state, model.phase = engine.MODEL_STATE_LOADING, engine.LOAD_PHASE_IMPORT
        assert cold.phase(_MODEL) == "import"
        await _settled(cold)
    assert fleet.ordered == []
