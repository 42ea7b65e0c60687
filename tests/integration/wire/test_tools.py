"""Other people's HTTP/2 clients: curl and h2load."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_wire.core.http1 import HttpLimits
from forebay_wire.exchange import Endpoint
from forebay_wire.http import HttpServer

from tests.wire_tools import (
    EMBED,
    GENERATE,
    Certificates,
    Child,
    Hops,
    RecordingPolicy,
    Script,
    address_of,
    at_scale,
    child,
    framed,
    neighbour,
    spread,
)

pytestmark = pytest.mark.integration
_GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")


async def _run(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-2000:])
    return ran


@pytest.mark.parametrize("is_secured", [False, True])
async def test_curl_gets_an_answer_and_its_trailers(
    hops: Hops, certificates: Certificates, tmp_path: Path, is_secured: bool
) -> None:
    engine = await hops.engine()
    policy = RecordingPolicy([engine.address])
    relay = await hops.relay(policy, certificates=certificates if is_secured else None)
    script = Script(3, 20)
    (tmp_path / "body").write_bytes(framed(script.request().SerializeToString()))
    port = address_of(relay).rpartition(":")[2]
    secured = ("--http2", "--cacert", str(certificates.ca))
    ran = await _run(
        *("curl", "-sS", "-D", "-", "-o", str(tmp_path / "answer"), *_GRPC),
        *(secured if is_secured else ("--http2-prior-knowledge",)),
        *("--data-binary", f"@{tmp_path / 'body'}"),
        f"{'https' if is_secured else 'http'}://localhost:{port}{GENERATE}",
    )
    assert ran.stdout.startswith("HTTP/2 200")
    assert "grpc-status: 0" in ran.stdout
    assert "forebay-usage: 1,3,0" in ran.stdout
    expected = b"".join(framed(answer.SerializeToString()) for answer in script.answers())
    assert (tmp_path / "answer").read_bytes() == expected


async def test_curl_gets_a_status_for_what_is_no_grpc(hops: Hops) -> None:
    engine = await hops.engine()
    url = f"http://{engine.address}{GENERATE}"
    got = await _run("curl", "-sS", "-i", "--http2-prior-knowledge", url)
    assert got.stdout.startswith("HTTP/2 405")
    posted = await _run("curl", "-sS", "-i", "--http2-prior-knowledge", "-d", "{}", url)
    assert posted.stdout.startswith("HTTP/2 415")
    plain = await _run("curl", "-sS", "-i", "--http1.1", url)
    assert plain.stdout.startswith("HTTP/1.1 400")
    assert "gRPC over HTTP/2" in plain.stdout


async def test_curl_that_would_rather_speak_http2_gets_http1_from_the_front() -> None:
    endpoint = Endpoint(lambda exchange: exchange.answer(b'{"a": 1}'))
    server = HttpServer(lambda method, path: endpoint, HttpLimits())
    address = await server.listen("127.0.0.1:0")
    ran = await _run("curl", "-sS", "-i", "--http2", "-d", "{}", f"http://{address}/v1/x")
    assert ran.stdout.startswith("HTTP/1.1 200")
    assert ran.stdout.endswith('{"a": 1}')
    await server.drain(0)


async def _load(server: Child, path: str, message: bytes, directory: Path) -> float:
    body = directory / "body"
    body.write_bytes(framed(message))
    count = at_scale(3000, 100_000)
    ran = await _run(
        *("h2load", "-n", str(count), "-c", "10", "-m", "20", "-d", str(body), *_GRPC),
        f"http://{server.address}{path}",
    )
    assert f"{count} succeeded, 0 failed, 0 errored, 0 timeout" in ran.stdout, ran.stdout
    assert f"{count} 2xx" in ran.stdout
    rate = re.search(r"([\d.]+) req/s", ran.stdout)
    assert rate is not None
    return float(rate[1])


async def test_h2load_s_requests_are_all_answered(hops: Hops, tmp_path: Path) -> None:
    if shutil.which("h2load") is None:
        pytest.skip("h2load is not installed")
    async with child() as server, neighbour(hops.stub(server.address), pause_s=0.01) as took:
        whole = pb.EmbedRequest(model="m").SerializeToString()
        unary = await _load(server, EMBED, whole, tmp_path)
        stream = Script(20).request().SerializeToString()
        streamed = await _load(server, GENERATE, stream, tmp_path)
        counts = await server.counts()
        assert counts["succeeded"] >= 2 * at_scale(3000, 100_000)
        assert "failed" not in counts
        print(f"{unary:.0f} unary calls/s, {streamed:.0f} streams of 20/s; beside: {spread(took)}")
