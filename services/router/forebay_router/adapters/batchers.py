"""Orders to batchers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.batcher.v1 import batcher_service_pb2_grpc as batcher_rpc
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_common.channel import ChannelPool
from forebay_common.errors import from_rpc_error


async def ensure_model(
    channels: ChannelPool, address: str, spec: engine.ModelSpec
) -> AsyncGenerator[batcher.EnsureModelResponse, None]:
    """Have a replica take requests for a model version, and follow it.

    Raises:
        ForebayError: the replica refuses, fails, or was lost.
    """
    call = batcher_rpc.BatcherServiceStub(channels.get(address)).EnsureModel(
        batcher.EnsureModelRequest(spec=spec)
    )
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()
