"""What clients notice when parts of the mesh die. Nothing, where that can be."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common.channel import connect

from tests.mesh import Load, Mesh, ask, running, simulated, until

pytestmark = pytest.mark.integration
_OUTAGE_S = float(os.environ.get("FOREBAY_TEST_OUTAGE_S", "10"))


async def test_a_killed_runner_is_unseen_replaced_and_gone_from_the_view_within_a_second(
    mesh: Mesh,
) -> None:
    victim = await mesh.engine_status("r1")
    async with Load(mesh.grpc, 4) as load:
        await until(lambda: _true(load.answered > 20), 20)
        # Only requests that have no first token yet can move to another replica unseen, and a
        # runner without requests in flight has none that were further: so let one wait for it.
        os.kill(victim.runner_pid, signal.SIGKILL)
        killed_s = time.monotonic()

        async def gone() -> bool:
            return not (await mesh.view())["r1"].placeable

        await until(gone, 5)
        assert time.monotonic() - killed_s < 1
        assert mesh.replicas["r1"].host.poll() is None
        back_s = await mesh.placeable("r1", "r2")
    status = await mesh.engine_status("r1")
    assert status.state == engine.MODEL_STATE_ACTIVE
    assert status.runner_pid != victim.runner_pid
    assert status.restarts == 1
    assert back_s < 20
    # What had begun goes on elsewhere, and what had not is answered there; many ask the same.
    assert load.failures == []


async def test_requests_without_a_first_token_are_answered_by_the_other_replica(
    mesh: Mesh,
) -> None:
    """The runner is stopped first, so that every request it holds is one without a token."""
    pids = {name: (await mesh.engine_status(name)).runner_pid for name in ("r1", "r2")}
    async with connect(mesh.grpc) as channel:
        stub = rpc.InferenceServiceStub(channel)
        os.kill(pids["r1"], signal.SIGSTOP)
        asked = [asyncio.create_task(ask(stub, text=f"{n}")) for n in range(40)]

        async def held() -> bool:
            return (await mesh.view())["r1"].in_flight > 0

        await until(held, 5)
        os.kill(pids["r1"], signal.SIGKILL)
        answers = await asyncio.gather(*asked)
    assert all(answers)


async def test_a_killed_host_leaves_no_runner(mesh: Mesh) -> None:
    runner = (await mesh.engine_status("r1")).runner_pid
    mesh.replicas["r1"].host.kill()
    mesh.replicas["r1"].host.wait()

    async def dead() -> bool:
        return not Path(f"/proc/{runner}").exists()

    await until(dead, 5)
    await mesh.placeable("r2")
    async with connect(mesh.grpc) as channel:
        assert await ask(rpc.InferenceServiceStub(channel))


async def test_a_killed_batcher_is_unseen(mesh: Mesh) -> None:
    async with connect(mesh.grpc) as channel:
        stub = rpc.InferenceServiceStub(channel)
        mesh.replicas["r1"].batcher.kill()
        assert all(await asyncio.gather(*(ask(stub) for _ in range(20))))
        await mesh.placeable("r2")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_etcd_every_request_is_answered(
    tmp_path: Path, etcd_process: Callable[[], Any], namespace: str, how: str
) -> None:
    etcd = etcd_process()
    spec = simulated()
    async with running(tmp_path, etcd.endpoint, namespace, spec) as mesh:
        mesh.add_replica("r1", spec)
        mesh.add_replica("r2", spec)
        await mesh.placeable("r1", "r2")
        async with Load(mesh.grpc, 8) as load:
            await until(lambda: _true(load.answered > 20), 20)
            if how == "killed":
                etcd.kill()
            else:
                etcd.freeze()
            before, outage_ends_s = load.answered, time.monotonic() + _OUTAGE_S
            await until(lambda: _true(time.monotonic() > outage_ends_s), _OUTAGE_S + 10)
            during = load.answered - before
            if how == "killed":
                etcd.start()
            else:
                etcd.thaw()
            # Leases may have run out while it was frozen: the listing must heal, unseen as well.
            settled_s = time.monotonic() + 8
            await until(lambda: _true(time.monotonic() > settled_s), 20)
            await mesh.placeable("r1", "r2")
        assert load.failures == []
        assert during > 10 * _OUTAGE_S
        for name in ("r1", "r2"):
            assert await mesh.replica_record(name) is not None


async def test_a_caller_who_leaves_frees_the_engine_within_a_quarter_second(mesh: Mesh) -> None:
    async with connect(mesh.grpc) as channel:
        stub = rpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            model="sim", text="Go on.", sampling=pb.SamplingOptions(max_tokens=5000)
        )
        call = stub.Generate(request)
        await call.read()
        call.cancel()
        left_s = time.monotonic()

        async def idle() -> bool:
            loads = [(await mesh.engine_status(name)).load for name in ("r1", "r2")]
            return all(load.running == 0 and load.waiting == 0 for load in loads)

        await until(idle, 5)
        # The host hears of load every 100 ms; the engine itself stopped before that.
        assert time.monotonic() - left_s < 0.25 + 0.15


async def _true(value: bool) -> bool:
    return value
