"""Fixtures of the protocol's tests: a service, and a client of it."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.support.api_server import ApiServer, running_api
from tests.support.owned_runs import owned_runs
from tests.support.run_trainer import HashingTrainer
from tests.support.standin_runs import StandInRuns, standing_in
from tests.support.tinker_client import TinkerClient, client_of


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> TinkerClient:
    return await client_of(server)


@pytest.fixture
async def owner(server: ApiServer) -> AsyncGenerator[StandInRuns]:
    async with standing_in(server.bus) as running:
        yield running


@pytest.fixture
async def trainer(server: ApiServer) -> AsyncGenerator[HashingTrainer]:
    """A real owner, and the trainer that it asks."""
    async with owned_runs(server) as running:
        yield running
