"""A relay, an engine, both, or a client as a process, for tests that harm, freeze or measure one.

Writes its address as one line, then, for every line it is sent, what it holds as a line of JSON;
for a line that is not empty also how many objects there are. A client's address is empty, and it
tells how long its calls took since it last did, in seconds.
"""

import asyncio
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import uvloop
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_wire.client import ClientPool
from forebay_wire.core.limits import Limits
from forebay_wire.policy import SERVICE, Head, Route
from forebay_wire.relay import Relay
from forebay_wire.server import Server

from tests.wire_tools import (
    BOUND_S,
    UNLIMITED,
    Engine,
    RecordingPolicy,
    Script,
    Seen,
    open_files,
    read_text,
)


async def _orders() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while order := await reader.readline():
        yield order


async def _ask(options: dict[str, Any]) -> None:
    took: list[float] = []

    async def go_on(stub: Any) -> None:
        while True:
            started = time.monotonic()
            text = await read_text(stub.Generate(Script(3).request(), timeout=BOUND_S))
            assert text == "abc"
            took.append(time.monotonic() - started)
            await asyncio.sleep(0.002)

    async with grpc.aio.insecure_channel(options["target"], options=UNLIMITED) as channel:
        asking = asyncio.create_task(go_on(rpc.InferenceServiceStub(channel)))
        print(flush=True)
        async for _ in _orders():
            error = asking.exception() if asking.done() else None
            print(json.dumps({"took": took, "error": repr(error) if error else ""}), flush=True)
            took.clear()
        asking.cancel()


class _Policy(RecordingPolicy):
    """Lets those wait who ask for it."""

    def admit(self, head: Head, message: bytes) -> Route | Awaitable[Route]:
        return self.wait(head) if "wait" in head.metadata else self._route(head)


async def _sleep(head: Head) -> None:
    await asyncio.sleep(float(head.metadata["wait"]))


async def _serve(options: dict[str, Any]) -> None:
    limits = Limits(**options["limits"])
    server, seen = Server(limits), Seen()
    inner: Server | None = None
    pool: ClientPool | None = None
    policy = _Policy([options["target"]], keeps=False, admission=_sleep)
    timer_type = type(asyncio.get_running_loop().call_later(0, gc.collect))
    with tempfile.TemporaryDirectory() as directory:
        if options["role"] == "chain":
            # Its only client is the relay, which passes on the resets of all its own clients.
            inner = Server(dataclasses.replace(limits, nuisances=10**6, nuisances_per_s=1e6))
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
        async for order in _orders():
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
                "waiting": policy.waiting,
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
    given = json.loads(sys.argv[1])
    uvloop.run(_ask(given) if given["role"] == "client" else _serve(given))
