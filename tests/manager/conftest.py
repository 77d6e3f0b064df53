"""The API and the owner that most tests of the manager ask."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.bus.bus import Bus
from common.store.objects import Objects
from tests.support.api_server import ApiServer, running_api
from tests.support.owning import System

if TYPE_CHECKING:  # most tests do not need them
    from playwright.async_api import Browser

    from tests.support.browser import Tab


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


@pytest_asyncio.fixture(loop_scope="session")
async def tab(server: ApiServer, browser: "Browser") -> "AsyncIterator[Tab]":
    """A tab that knows no key, where the loop is the session's as the browser's is."""
    from tests.support.browser import browsing

    async with browsing(browser, server.url) as tab:
        yield tab
