"""Runs behind the API of a test: the real owner, and a trainer that computes hashes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.support.api_server import ApiServer
from tests.support.owning import System
from tests.support.run_trainer import HashingTrainer, hashing_trainer


@asynccontextmanager
async def owned_runs(server: ApiServer, lease_s: float = 1.0) -> AsyncGenerator[HashingTrainer]:
    system = System(server.bus, server.api.objects, lease_s=lease_s, tenants=server.api.tenants)
    system.start_owner()
    try:
        async with hashing_trainer(system.bus, system.store, lease_s=lease_s) as trainer:
            system.slots.workers.append(trainer.report())
            yield trainer
    finally:
        await system.stop()
