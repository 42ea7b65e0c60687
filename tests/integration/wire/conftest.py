import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from tests.wire_tools import Certificates, Hops, make_certificates

_ON_BOTH_LOOPS = ("test_relay", "test_tls", "test_http_front")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop; a Python client may as well run on asyncio's own loop."""
    if item.path.stem in _ON_BOTH_LOOPS:
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def hops() -> AsyncIterator[Hops]:
    """Builds servers, relays and clients, and takes them down."""
    async with contextlib.AsyncExitStack() as closing:
        yield Hops(closing)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, and what it has signed."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
