"""The API and the owner that most tests of the manager ask."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.bus.bus import Bus
from common.store.objects import Objects
from tests.support.api_server import ApiServer, running_api
from tests.support.owning import System


@pytest.fixture
async def server(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ApiServer]:
    """The API alone, with the `SETTINGS` of the test's file, if it has some."""
    async with running_api(redis_url, tmp_path / "data", **getattr(request.module, "SETTINGS", {})) as running:
        yield running


@pytest.fixture
async def system(bus: Bus, objects: Objects) -> AsyncIterator[System]:
    """An owner, with stand-ins for the workers."""
    system = System(bus, objects)
    await system.start()
    yield system
    await system.stop()
