"""Real models, each behind one host for all tests of a module: a load takes half a minute."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as inference_grpc
from forebay_engine.prepare import MANIFEST

from tests.engine_host import EngineHost, running_host

_MODELS = Path(__file__).parents[3] / ".forebay" / "models"
CHAT = "smollm2@1"
EMBED = "minilm@1"


def _artifact(name: str) -> str:
    pytest.importorskip("vllm", reason="needs forebay-engine[cpu] or [cuda]")
    artifact = _MODELS / name
    if not (artifact / MANIFEST).exists():
        pytest.fail(f"prepare it: python -m forebay_engine.prepare {name} --into {artifact}")
    return str(artifact)


@pytest.fixture(scope="module")
def chat_artifact() -> str:
    """Where the chat model is."""
    return _artifact("smollm2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineHost]:
    """A host that has loaded the chat model."""
    spec = pb.ModelSpec(
        model_version=CHAT,
        backend=pb.BACKEND_VLLM,
        artifact_path=_artifact("smollm2"),
        context_tokens=2048,
        max_sequences=64,
    )
    # Eight streams are already many here, and an interval holds several of a CPU's steps.
    pace = {"frame_from_streams": 8, "frame_interval_ms": 300}
    async with running_host(tmp_path_factory.mktemp("chat"), **pace) as host:
        host.events = await host.load(spec)
        assert host.events[-1].state == pb.MODEL_STATE_ACTIVE, host.events[-1].reason
        yield host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat(chat_host: EngineHost) -> inference_grpc.InferenceServiceStub:
    """The chat model's runner."""
    return await chat_host.runner(model_version=CHAT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embed_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineHost]:
    """A host that has loaded the embedding model."""
    spec = pb.ModelSpec(
        model_version=EMBED,
        backend=pb.BACKEND_VLLM,
        artifact_path=_artifact("minilm"),
        task=pb.TASK_EMBED,
    )
    async with running_host(tmp_path_factory.mktemp("embed")) as host:
        host.events = await host.load(spec)
        assert host.events[-1].state == pb.MODEL_STATE_ACTIVE, host.events[-1].reason
        yield host
