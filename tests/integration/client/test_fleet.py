"""`forebay up` for real: every process of a local fleet, on simulated engines.

One fleet serves most of the tests, in order; the last ones stop it.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from forebay_client import AsyncClient, Client
from forebay_client.fleet.processes import of_fleet, wait_gone

from tests.fleet_commands import BOUND_S, Commands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("fleet"))
    yield commands
    commands.run("down")


@pytest.fixture(scope="module")
def started(commands: Commands) -> str:
    return commands.up("--profile", "paced", "--embeddings")


def service(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in status["services"] if one["name"] == name)
    return found


def test_up_tells_each_phase_and_what_to_type_next(started: str) -> None:
    for name in ("etcd", "registry", "router", "autoscaler"):
        assert f"{name}: ready after" in started
    assert "simulated@1 on" in started
    assert "chat/completions" in started
    assert "from openai import OpenAI" in started


def test_status_knows_every_part(commands: Commands, started: str) -> None:
    status = commands.until(lambda status: status["pools"][0]["standby"] == 1)
    assert status["phase"] == "ready"
    assert {one["state"] for one in status["services"]} == {"ready"}
    assert status["pools"][0]["active"] == 1
    placeable = [one for one in status["replicas"] if one["placeable"]]
    assert len(placeable) == 1
    assert {model["model_version"] for model in placeable[0]["replica"]["models"]} == {
        "simulated@1",
        "simulated-embed@1",
    }
    assert "ready for" in commands.run("status")


def test_both_protocols_answer(commands: Commands, started: str) -> None:
    status = commands.status()
    with Client(status["grpc_address"]) as client:
        answer = client.chat("simulated", "Where does the water go?", max_tokens=12)
        assert answer.usage.completion_tokens <= 12
        assert answer.text
        assert answer.system_fingerprint.startswith("simulated")
        vectors = client.embed("simulated-embed", ["a", "b"]).vectors
        assert len(vectors) == 2
        assert {model.name for model in client.models()} == {"simulated", "simulated-embed"}
    with openai.OpenAI(base_url=f"http://{status['http_address']}/v1", api_key="none") as http:
        completion = http.chat.completions.create(
            model="simulated",
            messages=[{"role": "user", "content": "Where does the water go?"}],
            max_tokens=12,
        )
    assert completion.choices[0].message.content == answer.text


async def test_the_asynchronous_client_answers_the_same(commands: Commands, started: str) -> None:
    address = commands.status()["grpc_address"]
    async with AsyncClient(address, timeout_s=BOUND_S) as client:
        async with client.stream_chat("simulated", "Where does it go?", max_tokens=6) as stream:
            deltas = [delta.text async for delta in stream]
        answer = await client.chat("simulated", "Where does it go?", max_tokens=6)
    assert "".join(deltas) == stream.answer.text == answer.text
    assert stream.answer.replica == answer.replica != ""


def test_a_streamed_request_is_one_chain_of_spans(commands: Commands, started: str) -> None:
    with Client(commands.status()["grpc_address"]) as client:
        asked = {"max_tokens": 5, "request_id": "deep-1"}
        with client.stream_chat("simulated", "How deep is it?", **asked) as stream:
            answer = stream.collect()
    trace = json.loads(commands.run("trace", "deep-1", "--json"))
    assert trace["connected"]
    assert trace["request_ids"] == ["deep-1"]
    names = {span["span_id"]: span["name"] for span in trace["spans"]}
    parents = {span["name"]: names.get(span["parent_id"], "") for span in trace["spans"]}
    assert parents == {
        "router": "",
        "place": "router",
        "queue": "router",
        "generate": "queue",
        "prefill": "generate",
        "decode": "generate",
    }
    generate = next(span for span in trace["spans"] if span["name"] == "generate")
    assert generate["attributes"]["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert commands.run("trace", trace["trace_id"]).startswith(f"trace {trace['trace_id']}")
    assert "deep-1" in commands.run("trace")


def test_chat_streams_and_shows_the_trace(commands: Commands, started: str) -> None:
    output = commands.run("chat", "--trace", "--max-tokens", "8", "What is a weir?")
    assert "8 tokens (length)" in output
    assert "router router" in output
    missing = commands.run("chat", "--model", "nobody", "hello", status=1)
    assert missing.startswith("Error: ")
    assert "[MODEL_NOT_FOUND]" in missing
    assert json.loads(commands.run("models", "--json"))[0]["name"] == "simulated"


def test_up_again_says_so_and_changes_nothing(commands: Commands, started: str) -> None:
    before = commands.status()
    began_s = time.monotonic()
    assert "already running" in commands.run("up")
    assert time.monotonic() - began_s < BOUND_S / 3
    after = commands.status()
    assert [one["process"] for one in after["services"]] == [
        one["process"] for one in before["services"]
    ]


async def test_a_burst_wakes_the_standby(commands: Commands, started: str) -> None:
    status = commands.until(lambda status: status["pools"][0]["standby"] == 1)
    assert status["pools"][0]["active"] == 1
    (standby,) = ids_of(status, "ROLE_STANDBY")
    too_many_for_one = status["pools"][0]["pool"]["target_requests_per_replica"] + 4

    woken = asyncio.Event()

    async def ask(client: AsyncClient) -> None:
        while not woken.is_set():
            await client.chat("simulated", "And then?", max_tokens=100, ignore_eos=True)

    def is_active(status: dict[str, Any]) -> bool:
        return standby in ids_of(status, "ROLE_ACTIVE")

    async with AsyncClient(status["grpc_address"]) as client, asyncio.TaskGroup() as burst:
        for _ in range(too_many_for_one):
            burst.create_task(ask(client))
        await asyncio.to_thread(commands.until, is_active)
        woken.set()


def ids_of(status: dict[str, Any], role: str) -> set[str]:
    replicas = (routed["replica"] for routed in status["replicas"])
    return {replica["replica_id"] for replica in replicas if replica["role"] == role}


@pytest.mark.parametrize("name", ["router", "autoscaler", "registry", "etcd"])
def test_a_service_that_is_killed_comes_back(commands: Commands, started: str, name: str) -> None:
    before = commands.status()
    os.kill(service(before, name)["process"]["pid"], signal.SIGKILL)

    def is_back(status: dict[str, Any]) -> bool:
        killed = service(status, name)
        is_placeable = any(one["placeable"] for one in status["replicas"])
        return killed["state"] == "ready" and killed["restarts"] == 1 and is_placeable

    commands.until(is_back)
    assert "tokens" in commands.run("chat", "--max-tokens", "2", "still there?")


def test_down_leaves_no_process(commands: Commands, started: str) -> None:
    assert of_fleet(commands.directory.path)
    assert "stopped in" in commands.run("down")
    assert of_fleet(commands.directory.path) == []
    assert commands.status() == {"phase": "stopped"}
    assert "router router" in commands.run("trace", "deep-1"), "traces outlive their fleet"


def test_what_is_given_is_used_and_nothing_outlives_a_killed_supervisor(
    tmp_path: Path, etcd: str, namespace: str
) -> None:
    commands = Commands(tmp_path)
    output = commands.up(
        "--profile", "instant", "--warm", "0", "--etcd", etcd, "--namespace", namespace
    )
    try:
        assert "etcd: external" in output
        fleet = commands.directory.read()
        assert fleet is not None
        left = of_fleet(commands.directory.path)
        os.kill(fleet.supervisor.pid, signal.SIGKILL)
        assert wait_gone(left, timeout_s=BOUND_S) == []
    finally:
        commands.run("down")
    assert of_fleet(commands.directory.path) == []


def test_a_fleet_in_the_foreground_ends_with_its_command(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    # Nobody is there: the start fails, and says why.
    failed = commands.run("up", "--model", "simulated", "--etcd", "127.0.0.1:1", status=1)
    assert "no etcd answers at 127.0.0.1:1" in failed.splitlines()[-1]
    arguments = ("--model", "simulated", "--profile", "instant", "--warm", "0", "--foreground")
    with commands.start("up", *arguments, "--http-port", "0", "--grpc-port", "0") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(BOUND_S) == 0, rest
    assert "stopped" in rest
    assert of_fleet(commands.directory.path) == []
