"""The same requests to vLLM's own HTTP server and to the whole mesh: the same, field by field.

Each request goes to one after the other, alone, so that both compute the same batches. A difference
is one of those explained below, or a fault. An explanation that nothing needs is a fault, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_engine.config import Config
from forebay_engine.runner.vllm.arguments import CPU_ENVIRONMENT, ENVIRONMENT, vllm_arguments

from tests.conftest import EtcdProcess, free_port
from tests.fidelity import Answer, Difference, ask, differences
from tests.fidelity_cases import ANSWERED, MESSAGES, REFUSED, TEXT_MODEL, VECTOR_MODEL, Case
from tests.mesh import running, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]
_MODELS = Path(__file__).resolve().parents[3] / ".forebay" / "models"
_CHAT = engine.ModelSpec(
    model_version=TEXT_MODEL,
    backend=engine.BACKEND_VLLM,
    artifact_path=str(_MODELS / "smollm2"),
    context_tokens=2048,
    max_sequences=64,
    kv_cache_bytes=1 << 30,
)
_EMBED = engine.ModelSpec(
    model_version=VECTOR_MODEL,
    backend=engine.BACKEND_VLLM,
    artifact_path=str(_MODELS / "minilm"),
    task=engine.TASK_EMBED,
)
_WITHOUT_OURS = """\
import importlib.metadata

_all = importlib.metadata.entry_points


def _without_ours(**named):
    found = _all(**named)
    if not named:
        return found
    return importlib.metadata.EntryPoints(entry for entry in found if entry.name != "forebay")


importlib.metadata.entry_points = _without_ours
"""
_START_S = 240
_ANSWER_S = 120
CASES = [*ANSWERED, *REFUSED]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One request's two answers."""

    case: Case
    bare: Answer
    ours: Answer


@dataclasses.dataclass(frozen=True, slots=True)
class Explained:
    """A difference that is meant, or that nobody can avoid."""

    why: str
    covers: Callable[[Pair, Difference], bool]


def _are_errors(pair: Pair) -> bool:
    return pair.bare.status == pair.ours.status >= 400


def _is_of_one_batch(pair: Pair, found: Difference) -> bool:
    several = isinstance(pair.case.body, dict) and (pair.case.body.get("n") or 1) > 1
    return (
        several
        and found.where.endswith("logprob")
        and math.isclose(found.bare, found.ours, abs_tol=0.2)
    )


def _is_the_message(pair: Pair, found: Difference) -> bool:
    return _are_errors(pair) and found.where == "error.message" and bool(found.ours)


def _is_the_type(pair: Pair, found: Difference) -> bool:
    if not _are_errors(pair) or found.where not in ("error.type", "error.code"):
        return False
    error = json.loads(pair.ours.body)["error"]
    usual = {"invalid_request_error", "not_found_error"}
    return error["type"] in usual and not isinstance(error.get("code"), int)


def _plain(param: str | None) -> str:
    """A field's name as both spell it: `body.messages.0.role` and `messages[0].role`."""
    name = (param or "").removeprefix("body").strip(".")
    return re.sub(r"\[(\d+)\]", r".\1", name)


def _is_the_param(pair: Pair, found: Difference) -> bool:
    if not _are_errors(pair) or found.where != "error.param":
        return False
    if pair.case.path.startswith(MESSAGES):
        return repr(found.ours) == "absent"
    bare, ours = _plain(found.bare), _plain(found.ours)
    # vLLM names none, or where in the JSON, or which of its types it tried first.
    return not bare or bare.isdigit() or bare.split(".")[0] == ours.split(".")[0]


def _is_another_name(pair: Pair, found: Difference) -> bool:
    return (
        _are_errors(pair)
        and found.where == "error.param"
        and (found.bare, found.ours) == ("logprobs", "top_logprobs")
    )


def _is_anthropics_shape(pair: Pair, found: Difference) -> bool:
    return (
        _are_errors(pair)
        and pair.case.path.startswith(MESSAGES)
        and (found.where, found.ours) == ("type", "error")
    )


def _is_no_path_of_the_model(pair: Pair, found: Difference) -> bool:
    return (
        found.where == "status"
        and (pair.bare.status, pair.ours.status) == (404, 400)
        and b'"detail":"Not Found"' in pair.bare.body
        and b"does not offer that path" in pair.ours.body
    )


def _is_no_path(pair: Pair, found: Difference) -> bool:
    return (
        pair.bare.status == pair.ours.status == 404
        and found.where in ("detail", "error")
        and b"unknown_url" in pair.ours.body
    )


def _has_no_memory(pair: Pair, found: Difference) -> bool:
    return (
        found.where == "status"
        and "previous_response_id" in pair.case.body
        and (pair.bare.status, pair.ours.status) == (404, 400)
    )


EXPLAINED = [
    Explained("choices of one request may share a step or not; sums round", _is_of_one_batch),
    Explained("messages never repeat the input or name options of the server's", _is_the_message),
    Explained("types and codes are OpenAI's words, not class names and numbers", _is_the_type),
    Explained("the field is named as callers spell it, and always", _is_the_param),
    Explained("the field is the caller's, not the one it is turned into", _is_another_name),
    Explained("Anthropic's shape, also where vLLM has OpenAI's", _is_anthropics_shape),
    Explained("the path is served, for other models", _is_no_path_of_the_model),
    Explained("an unknown path is refused in OpenAI's shape", _is_no_path),
    Explained("no answers are kept, so none can be unknown", _has_no_memory),
]
_used: set[str] = set()
_asked: set[str] = set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Callable[[Case], tuple[str, str]]]:
    """Gives the URLs that answer a case: of vLLM's own server, and of the mesh."""
    folder = tmp_path_factory.mktemp("fidelity")
    etcd = EtcdProcess(folder / "etcd")
    etcd.start()
    bare: dict[bool, tuple[str, subprocess.Popen[bytes]]] = {}
    try:
        for spec in (_CHAT, _EMBED):
            bare[spec is _EMBED] = _serve_bare(spec, folder)
        async with running(folder, etcd.endpoint, "/fidelity", _CHAT, _EMBED) as mesh:
            mesh.add_replica("r1", _CHAT, _EMBED)
            await mesh.placeable("r1", timeout_s=_START_S)

            async def both() -> bool:
                models = (await mesh.view())["r1"].replica.models
                return all(model.state == engine.MODEL_STATE_ACTIVE for model in models)

            await until(both, _START_S)
            for url, process in bare.values():
                await _serving(url, process)
            yield lambda case: (bare[case.encoder][0], f"http://{mesh.http}")
            assert mesh.errors_logged() == []
    finally:
        for _, process in bare.values():
            process.terminate()
        for _, process in bare.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        etcd.kill()


def _serve_bare(spec: engine.ModelSpec, folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start vLLM's own server as the runner starts its engine, without what the runner adds."""
    arguments = vllm_arguments(spec, on_cpu=True, kv_cache_bytes=Config().kv_cache_bytes)
    port = free_port()
    # All of vLLM's processes look for plug-ins by themselves, and ours is installed here.
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "sitecustomize.py").write_text(_WITHOUT_OURS)
    with (folder / f"bare-{port}.out").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *arguments,
            ],
            env={**os.environ, **ENVIRONMENT, **CPU_ENVIRONMENT, "PYTHONPATH": str(bare)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Its engine outlives it where it is killed.
            start_new_session=True,
        )
    return f"http://127.0.0.1:{port}", process


async def _serving(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:

        async def answers() -> bool:
            assert process.poll() is None, "vLLM's server ended"
            try:
                async with session.get(f"{url}/health") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, _START_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


async def test_every_request_is_another_one() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 300
    assert len({json.dumps(c.body) for c in CASES if not isinstance(c.body, bytes)}) >= 300


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_the_mesh_answers_as_vllm_does(
    servers: Callable[[Case], tuple[str, str]], session: aiohttp.ClientSession, case: Case
) -> None:
    bare_url, our_url = servers(case)
    pair = Pair(case, await ask(session, bare_url, case), await ask(session, our_url, case))
    _asked.add(case.name)
    unexplained: list[str] = []
    for found in differences(pair.bare, pair.ours):
        reasons = [known.why for known in EXPLAINED if known.covers(pair, found)]
        _used.update(reasons)
        if not reasons:
            unexplained.append(str(found))
    assert unexplained == []


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
async def test_a_refusal_repeats_nothing_and_names_no_option(
    servers: Callable[[Case], tuple[str, str]], session: aiohttp.ClientSession, case: Case
) -> None:
    answer = await ask(session, servers(case)[1], case)
    if answer.status == 200:
        return
    assert answer.content_type == "application/json"
    error = json.loads(answer.body)["error"]
    shape = {"type", "message"}
    if not case.path.startswith(MESSAGES):
        shape |= {"param", "code"}
    assert set(error) == shape
    assert not re.search(
        r"VLLM_|--[a-z]|river river|\(parameter=|<dict|/work|/home", error["message"]
    )


async def test_every_explanation_is_needed() -> None:
    if len(_asked) < len(CASES):
        pytest.skip("not all were asked")
    # Whether sums round alike is chance.
    by_chance = {"choices of one request may share a step or not; sums round"}
    assert {known.why for known in EXPLAINED} - by_chance <= _used
