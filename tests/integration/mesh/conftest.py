from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.mesh import Mesh, running, simulated


@pytest.fixture
async def mesh(tmp_path: Path, etcd: str, namespace: str) -> AsyncIterator[Mesh]:
    """Registry and router over two replicas with a paced simulated model."""
    spec = simulated()
    async with running(tmp_path, etcd, namespace, spec) as mesh:
        mesh.add_replica("r1", spec)
        mesh.add_replica("r2", spec)
        await mesh.placeable("r1", "r2")
        yield mesh
