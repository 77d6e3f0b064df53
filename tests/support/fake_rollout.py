"""A rollout worker whose engine computes nothing, in this process or in one of its own, which a test may kill:

python -m tests.support.fake_rollout URL SLOTS LEASE_S
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator

from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.cancellation import running
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker, worker_id
from rollout_service.adapters import AdapterCache
from rollout_service.handler import RolloutHandler
from rollout_service.process.process_engine import ProcessEngine
from rollout_service.settings import RolloutSettings
from tests.support.engines_under_test import fake_core, process_engine
from tests.support.fake_core import FakeCore

CELL = Cell("tiny")


@contextlib.asynccontextmanager
async def working(url: str, slots: int, lease_s: float) -> AsyncGenerator[tuple[ProcessEngine, FakeCore]]:
    """Runs it inside, with the slots and habits of a real one. What is under way at the end goes back."""
    settings, bus = RolloutSettings(rollout_slots=slots), Bus.connect(url, CELL)
    core = fake_core(step_s=0.05)
    engine = process_engine(lambda: core, ends=False, slots=settings.engine_slots)
    adapters = AdapterCache(AdapterStore(Objects.open("memory:///")), engine, idle_bytes=0)

    async def send_delta(*_: object) -> None: ...

    handler = RolloutHandler(engine, adapters, CELL, send_delta=send_delta)
    inboxes = [Inbox(CELL.rollout_first, GROUP_ROLLOUT), Inbox(CELL.rollout, GROUP_ROLLOUT)]
    reporter = Reporter(worker_id("rollout"), "rollout", CELL.base_model, About(slots=settings.shared_slots))
    habits = Habits(orphan_slots=settings.orphan_slots, progress_s=0.1)
    worker, stop = Worker(bus, handler, inboxes, reporter, lease_s=lease_s, habits=habits), asyncio.Event()
    await engine.start()
    try:
        async with running(worker.run(stop)) as (task,):
            yield engine, core
            stop.set()
            await task
    finally:
        await engine.stop()
        await bus.close()


async def main(url: str, slots: str, lease_s: str) -> None:
    async with working(url, int(slots), float(lease_s)):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
