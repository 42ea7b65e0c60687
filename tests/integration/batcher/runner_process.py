"""A runner in a process of its own, to be killed: streams until its caller leaves.

Usage: runner_process.py SOCKET_PATH. Prints one line once it listens.
"""

import asyncio
import sys
from typing import Any

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.server import Server


class Endless(rpc.InferenceServiceServicer):
    """One message, then silence."""

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        await context.write(pb.GenerateResponse(text_delta="first "))
        await asyncio.Event().wait()


async def main(path: str) -> None:
    server = Server()
    rpc.add_InferenceServiceServicer_to_server(Endless(), server.grpc)  # type: ignore[abstract]
    server.offer("forebay.inference.v1.InferenceService")
    await server.listen(f"unix:{path}")
    print("listening", flush=True)
    await server.grpc.wait_for_termination()


asyncio.run(main(sys.argv[1]))
