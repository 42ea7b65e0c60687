"""The engine host's watch, and a look at whether a runner still serves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType

import grpc
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.engine.v1 import engine_service_pb2_grpc as rpc
from forebay_common.channel import connect
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_wire.core.frames import PREFACE, settings_frame

from forebay_batcher.core.models import Model, ModelState

# A newer host may have states that this batcher does not know.
_STATES: Mapping[int, ModelState] = {state.value: state for state in ModelState}
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}")
_REASON_CHARACTERS_MAX = 300


async def watch_engine(
    address: str, *, load_interval_ms: int
) -> AsyncGenerator[Mapping[str, Model], None]:
    """The host's models, whole each time; revisions need no check. Ends when the host ends it.

    Raises:
        grpc.RpcError: the host cannot be reached, or was lost.
    """
    async with connect(address) as channel:
        call = rpc.EngineServiceStub(channel).WatchEngine(
            pb.WatchEngineRequest(load_interval_ms=load_interval_ms)
        )
        try:
            async for state in call:
                yield MappingProxyType({m.spec.model_version: _model(m) for m in state.models})
        finally:
            call.cancel()


async def watch_cache(
    socket_path: str, *, interval_ms: int
) -> AsyncGenerator[pb.WatchCacheResponse, None]:
    """What a runner has in its prefix cache. Ends when the runner ends it.

    Raises:
        grpc.RpcError: the runner cannot be reached, was lost, or does not tell.
    """
    async with connect(f"unix:{socket_path}") as channel:
        call = rpc.CacheServiceStub(channel).WatchCache(
            pb.WatchCacheRequest(interval_ms=interval_ms)
        )
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()


async def load_model(address: str, spec: pb.ModelSpec) -> None:
    """Have the host load a model version, and return when it takes requests.

    Raises:
        ForebayError: the host refuses, the load failed (LOAD_FAILED), or the host was lost.
    """
    failed = False
    try:
        async with connect(address) as channel:
            call = rpc.EngineServiceStub(channel).LoadModel(pb.LoadModelRequest(spec=spec))
            async for event in call:
                failed = event.state == pb.MODEL_STATE_FAILED
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    if failed:
        raise ForebayError(Reason.LOAD_FAILED, "The model could not be loaded.")


async def wake_model(address: str, model_version: str) -> None:
    """Have the host wake a sleeping model version, and return when it takes requests.

    Raises:
        ForebayError: as `load_model`.
    """
    try:
        async with connect(address) as channel:
            await rpc.EngineServiceStub(channel).WakeModel(
                pb.WakeModelRequest(model_version=model_version)
            )
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def _model(status: pb.ModelStatus) -> Model:
    return Model(
        model_version=status.spec.model_version,
        state=_STATES.get(status.state, ModelState.UNKNOWN),
        phase=status.phase,
        task=status.spec.task,
        socket_path=status.socket_path,
        generation=status.generation,
        # A runner that names no limit gets one request at a time rather than none.
        slots=status.limits.max_sequences or status.spec.max_sequences or 1,
        context_tokens=status.limits.context_tokens or status.spec.context_tokens,
        kv_cache_usage=status.load.kv_cache_usage,
        generated_tokens=status.load.generated_tokens,
        reason=_plain(status.reason),
    )


def _plain(reason: str) -> str:
    """A reason without paths: those of this host are nobody else's business."""
    return _PATH.sub("<path>", reason)[:_REASON_CHARACTERS_MAX]


async def is_serving(socket_path: str, *, timeout_s: float = 0.2) -> bool:
    """Whether a gRPC server answers our greeting on a Unix socket.

    To connect is not enough, because a dying process may close its connections before the socket
    that it listens on. A slow answer counts as yes: a busy runner is not a dead one.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            writer.write(PREFACE + settings_frame(()))
            return bool(await reader.read(1))
    except TimeoutError:
        return True
    except OSError as error:
        return not isinstance(error, (ConnectionError, FileNotFoundError))
    finally:
        if writer is not None:
            writer.close()
