"""Fixtures of the protocol's tests: a client of the service, and an owner."""

from collections.abc import AsyncGenerator

import pytest

from tests.support.api_server import ApiServer
from tests.support.run_world import HashingTrainer, owned_runs
from tests.support.standin_runs import StandInRuns, standing_in
from tests.support.tinker_client import TinkerClient, client_of


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
