"""A relay, an engine or both as a process, for tests that harm, freeze or measure one.

Writes its address as one line, then, for every line it is sent, what it holds as a line of JSON;
for a line that is not empty also how many objects there are.
"""

import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path

import uvloop
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_wire.client import ClientPool
from forebay_wire.core.limits import Limits
from forebay_wire.policy import SERVICE
from forebay_wire.relay import Relay
from forebay_wire.server import Server

from tests.wire_tools import Engine, RecordingPolicy, Seen, open_files


async def _serve() -> None:
    options = json.loads(sys.argv[1])
    limits = Limits(**options["limits"])
    server, seen = Server(limits), Seen()
    inner: Server | None = None
    pool: ClientPool | None = None
    policy = RecordingPolicy([options["target"]], keeps=False)
    timer_type = type(asyncio.get_running_loop().call_later(0, gc.collect))
    with tempfile.TemporaryDirectory() as directory:
        if options["role"] == "chain":
            inner = Server(limits)
            rpc.add_InferenceServiceServicer_to_server(Engine(seen), inner.grpc)
            inner.offer(SERVICE)
            policy.targets = [await inner.listen(f"unix:{Path(directory) / 'engine'}")]
        if options["role"] == "engine":
            rpc.add_InferenceServiceServicer_to_server(Engine(seen), server.grpc)
            server.offer(SERVICE)
        else:
            pool = ClientPool(limits)
            server.serve(Relay(policy, pool))
        print(await server.listen("127.0.0.1:0"), flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while order := await reader.readline():
            servers = [server] if inner is None else [server, inner]
            counts = {
                "streams": sum(s.streams for s in servers),
                "connections": sum(s.connections for s in servers),
                "in_flight": sum(s.in_flight for s in servers),
                "held": sum(s.held.used_bytes for s in servers),
                "requested": sum(s.requested.used_bytes for s in servers),
                "slow_readers_cut": sum(s.slow_readers_cut for s in servers),
                "pool_streams": pool.streams if pool is not None else 0,
                "admitted": policy.in_flight,
                "calls": seen.open,
                "answered": seen.calls,
                "tasks": len(asyncio.all_tasks()),
                "files": open_files(),
                **policy.outcomes,
            }
            if order.strip():
                # This takes a while, so it is done when it is asked for.
                gc.collect()
                counts["objects"] = len(gc.get_objects())
                counts["timers"] = sum(type(thing) is timer_type for thing in gc.get_objects())
            print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve())
