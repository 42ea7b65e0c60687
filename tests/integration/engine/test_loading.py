"""Loads, unloads, sleep and the death of runners, on a real host with real runner processes."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_common.errors import Reason, from_rpc_error
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.engine_host import EngineHost, a_spec, running_host

pytestmark = pytest.mark.integration

PHASES = [
    pb.LOAD_PHASE_PROCESS,
    pb.LOAD_PHASE_IMPORT,
    pb.LOAD_PHASE_ENGINE_INIT,
    pb.LOAD_PHASE_WEIGHTS,
    pb.LOAD_PHASE_WARM_UP,
    pb.LOAD_PHASE_CANARY,
]


async def refusal(call: object) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call  # type: ignore[misc]
    return from_rpc_error(failure.value).reason


async def first_refusal(runner: inference_grpc.InferenceServiceStub) -> Reason:
    """Call until refused: the runner hears of its draining a moment after the host has told it."""
    async with asyncio.timeout(5):
        while True:
            try:
                async for _ in runner.Generate(a_prompt()):
                    pass
            except grpc.aio.AioRpcError as failure:
                return from_rpc_error(failure).reason


async def gone(pid: int, bound_s: float = 5.0) -> None:
    """Wait until a process is no more, by its own descriptor."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), bound_s)
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


async def test_load_streams_every_phase_and_ends_active(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        events = await host.load(a_spec())
        assert [event.phase for event in events[:-1]] == PHASES
        assert {event.state for event in events[:-1]} == {pb.MODEL_STATE_LOADING}
        last = events[-1]
        assert last.state == pb.MODEL_STATE_ACTIVE
        assert [phase.phase for phase in last.phases] == PHASES
        status = await host.until_active()
        assert status.limits.max_sequences == 256
        assert status.generation == 1
        assert status.runner_pid > 0


async def test_second_load_joins_the_first(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        one, other = await asyncio.gather(host.load(a_spec()), host.load(a_spec()))
        assert one[-1] == other[-1]
        assert (await host.until_active()).generation == 1
        assert (await host.load(a_spec()))[-1].state == pb.MODEL_STATE_ACTIVE


async def test_cancelled_load_call_does_not_stop_the_load(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        call = host.stub.LoadModel(pb.LoadModelRequest(spec=a_spec()))
        await anext(aiter(call))
        call.cancel()
        await host.until_active()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_version": "No Name"}, Reason.INVALID_ARGUMENT),
        ({"backend": pb.BACKEND_UNSPECIFIED}, Reason.INVALID_ARGUMENT),
        ({"profile": "nothing"}, Reason.INVALID_ARGUMENT),
        ({"max_sequences": 7}, Reason.INVALID_ARGUMENT),
        (
            {"model_version": "a@1", "backend": pb.BACKEND_VLLM, "artifact_path": "/nowhere"},
            Reason.ARTIFACT_INVALID,
        ),
        ({"model_version": "a@1", "memory_bytes": 2000}, Reason.INSUFFICIENT_MEMORY),
    ],
)
async def test_wrong_specifications_are_refused(
    tmp_path: Path, changes: dict[str, object], reason: Reason
) -> None:
    async with running_host(tmp_path, [a_spec()], memory_bytes=1000) as host:
        await host.until_active()
        call = host.stub.LoadModel(pb.LoadModelRequest(spec=a_spec(**changes)))
        assert await refusal(call) is reason


async def test_artifact_with_a_pickle_is_refused(tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (artifact / name).write_text("{}")
    spec = a_spec(model_version="a@1", backend=pb.BACKEND_VLLM, artifact_path=str(artifact))
    async with running_host(tmp_path) as host:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await host.load(spec)
        error = from_rpc_error(failure.value)
        assert error.reason is Reason.ARTIFACT_INVALID
        assert "pytorch_model.bin" in error.message
        assert str(tmp_path) not in error.message


async def test_models_are_bounded(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()], models_max=1) as host:
        await host.until_active()
        call = host.stub.LoadModel(pb.LoadModelRequest(spec=a_spec(model_version="b@1")))
        assert await refusal(call) is Reason.INSUFFICIENT_MEMORY


async def test_two_versions_live_side_by_side(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec(), a_spec(model_version="b@2")]) as host:
        first = await host.until_active()
        second = await host.until_active(model_version="b@2")
        assert first.runner_pid != second.runner_pid
        os.kill(first.runner_pid, signal.SIGKILL)
        runner = await host.runner(model_version="b@2")
        answer = [message async for message in runner.Generate(a_prompt())]
        assert answer[0].header.model_version == "b@2"


async def test_unloaded_version_leaves_no_process_and_no_socket(host: EngineHost) -> None:
    status = await host.until_active()
    await host.stub.UnloadModel(pb.UnloadModelRequest(model_version="tiny@1"))
    with pytest.raises(ProcessLookupError):
        os.kill(status.runner_pid, 0)
    assert not Path(status.socket_path).exists()
    watch = host.stub.WatchEngine(pb.WatchEngineRequest())
    assert not (await anext(aiter(watch))).models
    watch.cancel()
    await host.stub.UnloadModel(pb.UnloadModelRequest(model_version="tiny@1"))
    assert (await host.load(a_spec()))[-1].state == pb.MODEL_STATE_ACTIVE


async def test_loading_version_is_unloaded_without_waiting(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        spec = a_spec(profile="cpu-smollm2-135m")
        call = host.stub.LoadModel(pb.LoadModelRequest(spec=spec))
        await anext(aiter(call))
        began = time.monotonic()
        await host.stub.UnloadModel(pb.UnloadModelRequest(model_version="tiny@1"))
        assert time.monotonic() - began < 3


async def test_killed_runner_is_seen_at_once_and_started_again(host: EngineHost) -> None:
    before = await host.until_active()
    seen = asyncio.create_task(host.until(lambda s: s.state == pb.MODEL_STATE_FAILED))
    await host.load_of()
    began = time.monotonic()
    os.kill(before.runner_pid, signal.SIGKILL)
    failed = await seen
    assert time.monotonic() - began < 0.5
    assert failed.reason == "The runner was killed by SIGKILL."
    after = await host.until(lambda s: s.state == pb.MODEL_STATE_ACTIVE and s.generation == 2)
    assert after.restarts == 1
    assert after.runner_pid != before.runner_pid
    assert after.socket_path != before.socket_path


async def test_pause_grows_with_each_death_until_a_load_is_asked_for(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()], restart_first_s=300) as host:
        status = await host.until_active()
        os.kill(status.runner_pid, signal.SIGKILL)
        await host.until(lambda s: s.state == pb.MODEL_STATE_FAILED)
        assert (await host.load(a_spec()))[-1].state == pb.MODEL_STATE_ACTIVE


async def test_stopped_runner_that_cannot_answer_its_end_is_killed(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()], stop_timeout_s=0.3) as host:
        status = await host.until_active()
        os.kill(status.runner_pid, signal.SIGSTOP)
        request = pb.UnloadModelRequest(model_version="tiny@1", grace_ms=100)
        await host.stub.UnloadModel(request)
        with pytest.raises(ProcessLookupError):
            os.kill(status.runner_pid, 0)


async def test_load_that_takes_too_long_fails_with_the_reason(tmp_path: Path) -> None:
    async with running_host(tmp_path, load_timeout_s=1, restart_first_s=60) as host:
        events = await host.load(a_spec(profile="cpu-smollm2-135m"))
        assert events[-1].state == pb.MODEL_STATE_FAILED
        assert "longer than 1 s" in events[-1].reason


async def test_wrong_canary_answer_never_serves(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        await host.until_active()
        (recorded,) = (tmp_path / "canaries").iterdir()
    recorded.write_text('{"tokens":[1,2,3],"vector":[]}')
    async with running_host(tmp_path, restart_first_s=60) as host:
        events = await host.load(a_spec())
        assert events[-1].state == pb.MODEL_STATE_FAILED
        assert "another answer" in events[-1].reason


async def test_killed_host_leaves_no_runner(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        status = await host.until_active()
        host.process.kill()
        await gone(status.runner_pid)


async def test_killed_host_leaves_no_runner_that_is_loading(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        call = host.stub.LoadModel(pb.LoadModelRequest(spec=a_spec(profile="cpu-smollm2-135m")))
        await anext(aiter(call))
        status = await host.until(lambda s: s.runner_pid > 0)
        host.process.kill()
        await gone(status.runner_pid)


async def test_host_ends_well_on_sigterm_and_takes_its_runners_with_it(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        status = await host.until_active()
        began = time.monotonic()
        assert await host.stop() == 0
        assert time.monotonic() - began < 5
        with pytest.raises(ProcessLookupError):
            os.kill(status.runner_pid, 0)


async def test_drained_version_refuses_and_finishes_what_it_has(tmp_path: Path) -> None:
    async with running_host(tmp_path, [a_spec()]) as host:
        runner = await host.runner()
        running = runner.Generate(a_prompt(max_tokens=20_000))
        await anext(aiter(running))
        await host.until(lambda s: s.load.running == 1)
        draining = asyncio.ensure_future(
            host.stub.DrainModel(pb.DrainModelRequest(model_version="tiny@1"))
        )
        await host.until(lambda s: s.state == pb.MODEL_STATE_DRAINING)
        assert await first_refusal(runner) is Reason.DRAINING
        assert not draining.done()
        async for message in running:
            last = message
        assert last.usage.completion_tokens == 20_000
        await draining
        assert (await host.load(a_spec()))[-1].state == pb.MODEL_STATE_ACTIVE
        assert [m async for m in runner.Generate(a_prompt())]


async def test_unknown_versions_are_not_drained(host: EngineHost) -> None:
    call = host.stub.DrainModel(pb.DrainModelRequest(model_version="other@1"))
    assert await refusal(call) is Reason.MODEL_NOT_LOADED


async def test_sleeping_version_answers_after_it_was_woken(host: EngineHost) -> None:
    runner = await host.runner()
    name = "tiny@1"
    for _ in range(2):
        await host.stub.SleepModel(pb.SleepModelRequest(model_version=name))
    assert (await host.until(lambda s: True)).state == pb.MODEL_STATE_SLEEPING
    assert await refusal(runner.Generate(a_prompt())) is Reason.MODEL_NOT_LOADED
    drain = host.stub.DrainModel(pb.DrainModelRequest(model_version=name))
    assert await refusal(drain) is Reason.MODEL_NOT_LOADED
    for _ in range(2):
        await host.stub.WakeModel(pb.WakeModelRequest(model_version=name))
    assert (await host.until(lambda s: True)).state == pb.MODEL_STATE_ACTIVE
    assert [message async for message in runner.Generate(a_prompt())]


async def test_load_wakes_a_sleeping_version(host: EngineHost) -> None:
    await host.stub.SleepModel(pb.SleepModelRequest(model_version="tiny@1"))
    events = await host.load(a_spec())
    assert [event.phase for event in events[:-1]] == [pb.LOAD_PHASE_CANARY]
    assert events[-1].state == pb.MODEL_STATE_ACTIVE


async def test_health_tells_ready_from_alive(host: EngineHost) -> None:
    status = await host.until_active()
    await host.runner()
    service = "forebay.inference.v1.InferenceService"
    for channel, name in (
        (host.channels[0], "forebay.engine.v1.EngineService"),
        (host.channels[1], service),
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await host.stub.DrainModel(pb.DrainModelRequest(model_version=status.spec.model_version))
    health = health_pb2_grpc.HealthStub(host.channels[1])
    answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_watch_counts_its_messages_and_spares_load(host: EngineHost) -> None:
    runner = await host.runner()
    watch = host.stub.WatchEngine(pb.WatchEngineRequest(load_interval_ms=5_000))
    states = aiter(watch)
    assert (await anext(states)).revision == 1
    assert [message async for message in runner.Generate(a_prompt())]
    began = time.monotonic()
    await host.stub.SleepModel(pb.SleepModelRequest(model_version="tiny@1"))
    state = await anext(states)
    assert state.revision == 2
    assert state.models[0].state in (pb.MODEL_STATE_DRAINING, pb.MODEL_STATE_SLEEPING)
    assert time.monotonic() - began < 2
    watch.cancel()


def a_prompt(*, max_tokens: int = 4) -> inference.GenerateRequest:
    return inference.GenerateRequest(
        text="the river",
        sampling=inference.SamplingOptions(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_metrics_tell_state_restarts_and_phases(tmp_path: Path) -> None:
    port = free_port()
    options = {"metrics_listen": f"127.0.0.1:{port}", "restart_first_s": 0.01}
    async with running_host(tmp_path, [a_spec()], **options) as host:
        status = await host.until_active()
        os.kill(status.runner_pid, signal.SIGKILL)
        await host.until(lambda s: s.state == pb.MODEL_STATE_ACTIVE and s.generation == 2)
        page = await asyncio.to_thread(read, f"http://127.0.0.1:{port}/metrics")
    assert 'forebay_engine_model_state{model_version="tiny@1",state="ACTIVE"} 1.0' in page
    assert 'forebay_engine_runner_restarts_total{model_version="tiny@1"} 1.0' in page
    assert 'forebay_engine_load_phase_seconds{model_version="tiny@1",phase="IMPORT"}' in page
    assert 'forebay_engine_generated_tokens_total{model_version="tiny@1"}' in page


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_wrong_load_option_ends_the_process_and_names_the_variable(tmp_path: Path) -> None:
    environ = {**os.environ, "FOREBAY_ENGINE_LOAD": '[{"modelVersion": "No Name"}]'}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay_engine", env=environ, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode != 0
    assert b"FOREBAY_ENGINE_LOAD: No Name" in errors


async def test_runner_inherits_nothing_of_the_host(host: EngineHost) -> None:
    status = await host.until_active()
    links = [str(entry.readlink()) for entry in Path(f"/proc/{host.process.pid}/fd").iterdir()]
    sockets = {link for link in links if link.startswith("socket:")}
    theirs = {str(entry.readlink()) for entry in Path(f"/proc/{status.runner_pid}/fd").iterdir()}
    assert not sockets & theirs
