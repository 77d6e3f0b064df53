"""Runs behind the API of a test: the real owner, and a trainer that computes hashes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from common.adapters import AdapterStore
from harness.standin import FixedSlots
from manager_service.owner.owner import Owner
from tests.support.api_server import ApiServer
from tests.support.run_trainer import HashingTrainer, hashing_trainer


@asynccontextmanager
async def owned_runs(server: ApiServer, lease_s: float = 1.0) -> AsyncGenerator[HashingTrainer]:
    bus, objects, slots, stop = server.bus, server.api.objects, FixedSlots(), asyncio.Event()
    store = AdapterStore(objects)
    owner = Owner(
        bus=bus, cluster=slots, store=store, objects=objects, tenants=server.api.tenants, lease_s=lease_s
    )  # fmt: skip
    owning = asyncio.create_task(owner.run(stop))
    try:
        async with hashing_trainer(bus, store, lease_s=lease_s) as trainer:
            slots.workers.append(trainer.report())
            yield trainer
    finally:
        stop.set()
        await owning
