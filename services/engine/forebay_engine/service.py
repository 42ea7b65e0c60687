"""EngineService: contract in, host out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as pb_grpc

from forebay_engine.core.lifecycle import State
from forebay_engine.host import Host
from forebay_engine.keeper_loop import Attempt

_Context = grpc.aio.ServicerContext[Any, Any]
_LOAD_INTERVAL_MS = 100


class EngineServicer(pb_grpc.EngineServiceServicer):
    """Serves one host."""

    def __init__(self, host: Host, *, drain_grace_s: float, memory_bytes: int) -> None:
        self._host = host
        self._drain_grace_s = drain_grace_s
        self._memory_bytes = memory_bytes

    async def LoadModel(  # noqa: N802
        self, request: pb.LoadModelRequest, context: _Context
    ) -> AsyncIterator[pb.LoadModelResponse]:
        """Start or join a load and stream its phases."""
        with self._host.board.subscribe() as changes:
            _, attempt = await self._host.load(request.spec)
            told = 0
            while True:
                # The timeline may grow while a phase is being told.
                while told < len(attempt.timeline):
                    yield _phase_begun(attempt, *attempt.timeline[told])
                    told += 1
                if attempt.outcome is not None:
                    break
                await changes.wait(load_not_before=float("inf"))
        now = asyncio.get_running_loop().time()
        yield pb.LoadModelResponse(
            state=_state(attempt.outcome),
            elapsed_ms=attempt.elapsed_ms(now),
            reason=attempt.reason,
            phases=attempt.durations(),
        )

    async def UnloadModel(  # noqa: N802
        self, request: pb.UnloadModelRequest, context: _Context
    ) -> pb.UnloadModelResponse:
        """Drain and stop a runner."""
        grace_s = request.grace_ms / 1000 if request.grace_ms else self._drain_grace_s
        await self._host.unload(request.model_version, grace_s)
        return pb.UnloadModelResponse()

    async def DrainModel(  # noqa: N802
        self, request: pb.DrainModelRequest, context: _Context
    ) -> pb.DrainModelResponse:
        """Refuse new requests and wait for the others."""
        await self._host.keeper(request.model_version).drain()
        return pb.DrainModelResponse()

    async def SleepModel(  # noqa: N802
        self, request: pb.SleepModelRequest, context: _Context
    ) -> pb.SleepModelResponse:
        """Drain and put to sleep."""
        await self._host.keeper(request.model_version).sleep()
        return pb.SleepModelResponse()

    async def WakeModel(  # noqa: N802
        self, request: pb.WakeModelRequest, context: _Context
    ) -> pb.WakeModelResponse:
        """Wake and verify."""
        await self._host.keeper(request.model_version).wake()
        return pb.WakeModelResponse()

    async def WatchEngine(  # noqa: N802
        self, request: pb.WatchEngineRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEngineResponse]:
        """Send the whole state, then again after each change; revisions count this call's."""
        interval_s = (request.load_interval_ms or _LOAD_INTERVAL_MS) / 1000
        loop = asyncio.get_running_loop()
        revision = 0
        with self._host.board.subscribe() as changes:
            while True:
                revision += 1
                yield pb.WatchEngineResponse(
                    revision=revision,
                    models=self._host.statuses(),
                    memory_bytes=self._memory_bytes,
                    draining=self._host.draining,
                )
                await changes.wait(load_not_before=loop.time() + interval_s)


def _phase_begun(attempt: Attempt, phase: int, at: float) -> pb.LoadModelResponse:
    return pb.LoadModelResponse(
        state=pb.MODEL_STATE_LOADING,
        phase=pb.LoadPhase.ValueType(phase),
        elapsed_ms=round((at - attempt.began_at) * 1000),
        phases=attempt.durations(),
    )


def _state(state: State) -> pb.ModelState.ValueType:
    return pb.ModelState.ValueType(state.value)
