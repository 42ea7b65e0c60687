"""A host with one simulated version."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine_host import EngineHost, a_spec, running_host


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[EngineHost]:
    """A host with one simulated version, which takes requests."""
    async with running_host(tmp_path, [a_spec()], restart_first_s=0.05) as started:
        await started.until_active()
        yield started
