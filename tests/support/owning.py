"""The real owner of jobs, with stand-in workers around it."""

import asyncio
import contextlib
from typing import Any

import msgspec

from common.bus.bus import Bus
from common.bus.streams import GROUP_ENV, GROUP_TRAINER
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.worker.worker import Inbox
from harness.standin import FixedSlots, StandInEnv, StandInTrainer, create_job, stand_in_worker, until_status
from manager_service.owner.owner import Owner
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.sample_records import EventRecord
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import Tenants

LEASE_S = 0.6


async def is_archived(bus: Bus, job: str) -> bool:
    return not await bus.client.exists(bus.cell.job(job))


class System:
    """An owner, an env stand-in and a trainer stand-in on one bus. `settings`: the owner's own."""

    def __init__(self, bus: Bus, objects: Objects, *, lease_s: float = LEASE_S, **settings: Any) -> None:
        self.lease_s = lease_s
        stored = StoredBytes(bus.client, {bus.cell: bus.client}, 16 << 30)
        self.settings: dict[str, Any] = {"tenants": Tenants(bus.client), "stored": stored, **settings}
        self.bus = bus
        self.objects = objects
        self.store = AdapterStore(objects)
        self.env = StandInEnv(bus.cell)
        self.trainer = StandInTrainer(bus.cell, self.store)
        self.slots = FixedSlots()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.owner_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        cell = self.bus.cell
        env = stand_in_worker(self.bus, "env", Inbox(cell.env, GROUP_ENV), self.env, lease_s=self.lease_s)
        trainer = stand_in_worker(
            self.bus, "trainer", Inbox(cell.train, GROUP_TRAINER), self.trainer, slots=1, lease_s=self.lease_s
        )
        self._tasks = [asyncio.create_task(w.run(self._stop)) for w in (env, trainer)]
        self.start_owner()

    def start_owner(self) -> Owner:
        owner = Owner(
            bus=self.bus,
            cluster=self.slots,
            store=self.store,
            objects=self.objects,
            lease_s=self.lease_s,
            **self.settings,
        )
        self.owner_task = asyncio.create_task(owner.run(self._stop))
        self.owner = owner
        return owner

    async def kill_owner(self) -> None:
        """No goodbye: its leases run out."""
        assert self.owner_task is not None
        self.owner_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.owner_task

    async def stop(self) -> None:
        self._stop.set()
        living = [self.owner_task] if self.owner_task and not self.owner_task.done() else []
        async with asyncio.timeout(120):
            await asyncio.gather(*self._tasks, *living)

    async def run_job(self, spec: JobSpec, *statuses: str, seconds: float = 60.0) -> JobState:
        """Creates a job, and waits until it has succeeded, or has one of these statuses."""
        await create_job(self.bus, spec)
        return await until_status(self.bus, spec.id, *(statuses or ("succeeded",)), seconds=seconds)

    async def events(self, job: str) -> list[EventRecord]:
        rows: Any = await self.bus.client.xrange(self.bus.cell.events(job))
        return [msgspec.json.decode(fields[b"event"], type=EventRecord) for _, fields in rows]
