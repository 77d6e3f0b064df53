"""Fixtures of the protocol's tests: a service, and a client of it."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.support.api_server import ApiServer, running_api
from tests.support.tinker_client import TinkerClient, client_of


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> TinkerClient:
    return await client_of(server)
