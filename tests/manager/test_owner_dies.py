"""An owner that dies at a Redis command of any kind loses nothing and does nothing twice.

Each life is a job of stand-in workers in a cell of its own. Its first owner dies before a command is sent, or after Redis
has done it and before the answer is looked at; from then on nothing more of it reaches Redis, as of a process that was
killed. Its leases run out, and a second owner ends the job.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any

import pytest
import redis.asyncio as aioredis

from common.bus.bus import Bus
from common.bus.redis_connection import FastClient, FastConnection
from common.bus.scripts import CREATE_GROUP
from common.bus.streams import GROUP_ENV, GROUP_TRAINER, NUM_PARTITIONS, Cell, partition_of
from common.cancellation import cancel_all
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from common.worker.worker import Inbox
from harness.standin import (
    FixedSlots,
    StandInEnv,
    StandInTrainer,
    create_job,
    held_out,
    job_spec,
    ledger_of,
    stand_in_worker,
    until_status,
)
from manager_service.owner.leases import RELEASE, ROUND
from manager_service.owner.owner import Owner
from manager_service.owner.transaction import COMMIT
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import Tenants
from tests.common.test_worker import until

STEPS, BATCH, GROUP, HELD_OUT = 2, 2, 2, 2
LEASE_S = 60.0
AT_ONCE = 8
TEXTS = {
    "COMMIT": COMMIT,
    "ROUND": ROUND,
    "RELEASE": RELEASE,
    "CREATE_GROUP": CREATE_GROUP,
}
SCRIPTS = {sha1(text.encode()).hexdigest(): name for name, text in TEXTS.items()}
SET_UP = {"AUTH", "CLIENT", "HELLO", "SELECT"}
"""Commands by which the client library greets Redis."""

OCCURRENCES: dict[str, Iterable[int]] = {
    "COMMIT": range(1, 9),
    "ROUND": (1,),
    "CREATE_GROUP": (1, 53),
    "GET": (1, 16),
    "SMEMBERS": (1, 16),
    "HGETALL": (1,),
    "HVALS": (1,),
    "XREADGROUP": (1, 25, *range(47, 56, 2)),
    "INFO": (1,),
    "EXISTS": (1,),
    "TIME": (1,),
    "ZRANGE": (1, 3),
    "XTRIM": (1, 4),
    "MEMORY": (1,),
    "XLEN": (1,),
}
"""Every command that an owner sends (a script by its name, a pipeline by its first), and at which of them it dies."""


SELDOM = {"MULTI", "XPENDING", "SCRIPT", "HMGET", "HGET"}
"""Commands that slow loops send, only if the job lasts long enough for them to turn again, and changes nothing; and the first use of
a script that Redis does not know yet."""


class Died(BaseException):
    """The process ended here. No exception that anybody may catch."""


@dataclass
class Fate:
    """The end of an owner's life: before or after the `at`-th command of this name."""

    at: int = 0  # 0: never
    name: str = ""
    after: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    dead: bool = False
    last: Any = None  # the connection on which the last command was sent

    def meets(self, name: str) -> bool:
        """Count a command; True if it is the one."""
        self.seen[name] += 1
        return name == self.name and self.seen[name] == self.at

    def die(self) -> None:
        self.dead = True
        raise Died


class MortalConnection(FastConnection):
    """Sends nothing once its owner is dead."""

    def __init__(self, *, fate: Fate, **options: Any) -> None:
        super().__init__(**options)
        self._fate = fate

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        fate, name = self._fate, _name(command)
        met = name not in SET_UP and not fate.dead and fate.meets(name)
        if fate.dead or (met and not fate.after):
            fate.die()
        if met:
            fate.last = self
        await super().send_packed_command(command, check_health)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        answer = await super().read_response(*args, **options)
        if self._fate.last is self:
            self._fate.die()
        return answer


def _name(command: Any) -> str:
    """The name of the first command in packed ones: `*<words> $<length> <name> $<length> <argument> …`."""
    words = (command if isinstance(command, bytes) else b"".join(command))[:200].split(b"\r\n")
    name = words[2].decode().upper()
    return SCRIPTS.get(words[4].decode(), "EVALSHA") if name == "EVALSHA" else name


@dataclass
class Life:
    """A job from its creation to its end, under an owner that dies."""

    url: str
    objects: Objects
    cell: Cell
    fate: Fate

    async def run(self) -> None:
        bus, stop = Bus.connect(self.url, self.cell, self.objects), asyncio.Event()
        trainer = StandInTrainer(self.cell, AdapterStore(self.objects))
        inboxes = (Inbox(self.cell.env, GROUP_ENV), Inbox(self.cell.train, GROUP_TRAINER))
        workers = [
            stand_in_worker(bus, "env", inboxes[0], StandInEnv(self.cell)),
            stand_in_worker(bus, "trainer", inboxes[1], trainer, slots=1),
        ]
        running = [asyncio.create_task(worker.run(stop)) for worker in workers]
        try:
            await self._job(bus, trainer)
        finally:
            stop.set()
            await asyncio.gather(*running)
            await bus.close()

    async def _job(self, bus: Bus, trainer: StandInTrainer) -> None:
        spec = job_spec(self.cell.base_model, num_steps=STEPS, batch_size=BATCH, group_size=GROUP)
        spec = await held_out(self.objects, spec, HELD_OUT)
        await create_job(bus, spec)
        await self._first_owner(bus, spec.id)
        await bus.client.delete(self.cell.owners, *(self.cell.lease(p) for p in range(NUM_PARTITIONS)))
        owning = asyncio.create_task(self._owner(bus).run(asyncio.Event()))
        try:
            await until_status(bus, spec.id, "succeeded", seconds=60)
            await until(lambda: self._nothing_open(bus))
        finally:
            await cancel_all([owning])
        await self._check(bus, spec.id, trainer)

    async def _first_owner(self, bus: Bus, job: str) -> None:
        """Runs until it dies, or until the job has succeeded."""
        pool = aioredis.ConnectionPool.from_url(
            self.url, connection_class=MortalConnection, fate=self.fate, client_name=self.cell.base_model, protocol=3
        )
        mortal = Bus(FastClient.from_pool(pool), self.cell, self.objects)
        living = asyncio.create_task(self._owner(mortal).run(asyncio.Event()))
        succeeds = asyncio.create_task(until_status(bus, job, "succeeded", seconds=60))
        await asyncio.wait([living, succeeds], return_when=asyncio.FIRST_COMPLETED)
        await cancel_all([living, succeeds])
        await pool.disconnect()
        await until(lambda: self._is_gone(bus))
        with contextlib.suppress(asyncio.CancelledError):
            try:
                living.result()
            except* Died:
                pass

    async def _is_gone(self, bus: Bus) -> bool:
        """True once Redis has done what the first owner sent last: it may be a renewal of its lease."""
        return self.cell.base_model not in {client["name"] for client in await bus.client.client_list()}

    def _owner(self, bus: Bus) -> Owner:
        store = AdapterStore(self.objects)
        return Owner(
            bus=bus,
            cluster=FixedSlots(),
            store=store,
            objects=self.objects,
            tenants=Tenants(bus.client),
            stored=StoredBytes(bus.client, {self.cell: bus.client}, 16 << 30),
            lease_s=LEASE_S,
        )

    async def _nothing_open(self, bus: Bus) -> bool:
        cell, partition = self.cell, partition_of("acme")
        streams = [cell.env, cell.train, cell.jobs(partition), cell.adapters(partition), cell.scored(partition)]
        return not any([await bus.client.xlen(stream) for stream in streams])

    async def _check(self, bus: Bus, job: str, trainer: StandInTrainer) -> None:
        where = f"{self.fate}"
        total = STEPS * BATCH * GROUP
        assert await ledger_of(bus, job) == {"issued": total, "trained": total, "in_flight": 0}, where
        assert sorted({step.adapter.version for step in trainer.seen}) == list(range(STEPS)), where
        assert len({step.trajectories for step in trainer.seen}) == STEPS, where
        for version in range(STEPS + 1):
            assert await AdapterStore(self.objects).manifest(AdapterRef("acme", job, version)), where
        rows: Any = await bus.client.xrange(self.cell.events(job))
        texts = [fields[b"event"] for _, fields in rows]
        for text in (b"Step 1/2", b"Step 2/2", b"successfully completed"):
            assert sum(text in event for event in texts) == 1, where
        assert await bus.client.xlen(self.cell.dead) == 0, where


async def live(url: str, objects: Objects, fates: Iterable[Fate]) -> None:
    """Some at once, each in its own cell."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, fate: Fate) -> None:
        async with free:
            await Life(url, objects, Cell(f"life{number}"), fate).run()

    async with asyncio.TaskGroup() as group:
        for number, fate in enumerate(fates):
            group.create_task(one(number, fate))


async def test_every_command_of_an_owner_is_in_the_table(redis_url: str, objects: Objects) -> None:
    fate = Fate()
    await live(redis_url, objects, [fate])
    assert set(fate.seen) - SELDOM == set(OCCURRENCES)


def half_of(name: str, after: bool) -> list[int]:
    """Every second occurrence, the others for the other death: after a command is, but for its answer, before the next one."""
    occurrences = list(OCCURRENCES[name])
    return occurrences[after::2] or occurrences


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_owner_that_dies_at_a_command_of_any_kind_loses_nothing(
    redis_url: str, objects: Objects, after: bool
) -> None:
    fates = [Fate(at, name, after) for name in OCCURRENCES for at in half_of(name, after)]
    await live(redis_url, objects, fates)
    assert {fate.name for fate in fates if fate.dead} == set(OCCURRENCES)
    # Also at the first use of a script
    async with aioredis.Redis.from_url(redis_url) as client:
        await client.script_flush()
    first = Fate(1, "SCRIPT", after)
    await Life(redis_url, objects, Cell("first"), first).run()
    assert first.dead
