import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from forebay.engine.v1 import engine_service_pb2 as engine

from tests.mesh import Mesh, running, simulated, until


@pytest.fixture
async def mesh(tmp_path: Path, etcd: str, namespace: str) -> AsyncIterator[Mesh]:
    """Registry and router over two replicas with a paced simulated model."""
    spec = simulated()
    async with running(tmp_path, etcd, namespace, spec) as mesh:
        mesh.add_replica("r1", spec)
        mesh.add_replica("r2", spec)
        await mesh.placeable("r1", "r2")
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory, etcd: str) -> AsyncIterator[Mesh]:
    """The same, for all tests of a module that leave it as it was; also with an encoder."""
    chat, encoder, lone = (
        simulated(),
        simulated("encoder@1", task=engine.TASK_EMBED),
        simulated("lone@1"),
    )
    directory = tmp_path_factory.mktemp("mesh")
    async with running(
        directory,
        etcd,
        f"/shared-{uuid.uuid4().hex}",
        chat,
        encoder,
        lone,
        router={"FOREBAY_ROUTER_LOAD_ON_DEMAND": "false"},
    ) as mesh:
        mesh.add_replica("r1", chat, encoder)
        mesh.add_replica("r2", chat)
        await mesh.placeable("r1", "r2")
        for name, model in (("r1", "sim@1"), ("r1", "encoder@1"), ("r2", "sim@1")):

            async def active(name: str = name, model: str = model) -> bool:
                status = await mesh.engine_status(name, model)
                return status.state == engine.MODEL_STATE_ACTIVE

            await until(active, 30)
        yield mesh
