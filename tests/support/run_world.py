"""An owner and trainers of runs on one bus, and a user who sends operations."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from common.bus.bus import Bus
from common.bus.streams import partition_of
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef, Failure, JobCommand, LoraSpec
from common.wire.operations import Action, LoadWeights, NameChange, Operation, OperationResult, Saved, SaveWeights
from harness.standin import FixedSlots
from manager_service.owner.owner import Owner
from manager_service.records.keys import JSON
from manager_service.records.run_records import Checkpoint, RunSpec, RunState, Sampler, run_of
from manager_service.records.tenants import Tenants
from tests.common.test_worker import length, until
from tests.support.run_trainer import WEIGHTS, HashingTrainer, hashing_trainer

LEASE_S = 0.6
TENANT = "acme"
SESSION = "ses-0123456789abcdef"
PARTITION = partition_of(TENANT)


class World:
    """An owner and trainers on one bus, and a user who sends operations."""

    partition = PARTITION

    def __init__(self, bus: Bus, objects: Objects) -> None:
        self.bus = bus
        self.objects = objects
        self.store = AdapterStore(objects)
        self.slots = FixedSlots()
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    def start_owner(self) -> None:
        owner = Owner(
            bus=self.bus,
            cluster=self.slots,
            store=self.store,
            objects=self.objects,
            tenants=Tenants(self.bus.client),
            lease_s=LEASE_S,
        )
        self._owner = asyncio.create_task(owner.run(self._stop))

    async def kill_owner(self) -> None:
        assert self._owner is not None
        self._owner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._owner

    @contextlib.asynccontextmanager
    async def trainer(self) -> AsyncGenerator[HashingTrainer]:
        """A trainer that is alive until the context ends."""
        async with hashing_trainer(self.bus, self.store, lease_s=LEASE_S) as trainer:
            report = trainer.report()
            self.slots.workers.append(report)
            try:
                yield trainer
            finally:
                self.slots.workers.remove(report)

    async def stop(self) -> None:
        self._stop.set()
        if self._owner:
            await self._owner

    # ---- a user -------------------------------------------------------------------------------------------------

    async def create(self, number: int = 0, session: str = SESSION, **changes: Any) -> str:
        run = run_of(f"{session}:train:{number}")
        assert run is not None
        spec = RunSpec(run, TENANT, session, "tiny", "tiny", LoraSpec(), seed=5, created_at=number, **changes)
        cell = self.bus.cell
        await self.bus.client.set(cell.session(session), "{}")
        await self.bus.client.hset(cell.run(run), mapping={"spec": JSON.encode(spec), **RunState().fields()})
        await self.bus.client.sadd(cell.active(PARTITION), run)
        command = JobCommand(id=f"{run}:0", tenant=TENANT, job=run, partition=PARTITION, action="create")
        await self.bus.publish([(cell.jobs(PARTITION), command)])
        return run

    async def send(self, run: str, *operations: tuple[int, Action], failure: Failure | None = None) -> None:
        for seq, action in operations:
            await self._publish(run, seq, action, f"{action} {seq}".encode(), failure)

    async def _publish(
        self, run: str, seq: int, action: Action, payload: bytes, failure: Failure | None = None
    ) -> None:
        operation = Operation(
            id=f"{run}:{seq}",
            tenant=TENANT,
            job=run,
            partition=PARTITION,
            seq=seq,
            action=action,
            payload=payload,
            tokens=10,
            failure=failure,
        )
        await self.bus.publish([(self.bus.cell.ops(PARTITION), operation)])

    async def save(self, run: str, seq: int, wanted: SaveWeights, action: Action = "save_for_sampler") -> Saved:
        payload = msgspec.msgpack.encode(wanted)
        await self._publish(run, seq, action, payload)
        return msgspec.msgpack.decode((await self.result(run, seq)).outputs, type=Saved)

    async def load(self, run: str, seq: int, source: AdapterRef) -> None:
        await self._publish(run, seq, "load", msgspec.msgpack.encode(LoadWeights("tinker://x", source)))

    async def change_name(self, run: str, known: Checkpoint, **to: Any) -> None:
        about: dict[str, Any] = {"tenant": TENANT, "job": run, "partition": PARTITION}
        about |= {"name": known.name, "version": known.version, "created_at": known.created_at}
        message = NameChange(id=f"{run}/{known.name}/{to}", **about, checkpoint=known.kind, **to)
        await self.bus.publish([(self.bus.cell.jobs(PARTITION), message)])

    async def result(self, run: str, seq: int) -> OperationResult:
        await until(lambda: self.has(run, seq))
        found: Any = await self.bus.client.hget(self.bus.cell.results(run), str(seq))
        return msgspec.msgpack.decode(found, type=OperationResult)

    async def has(self, run: str, seq: int) -> bool:
        return bool(await self.bus.client.hexists(self.bus.cell.results(run), str(seq)))

    async def failure(self, run: str, seq: int) -> str:
        failure = (await self.result(run, seq)).failure
        assert failure is not None
        return failure.reason

    async def state(self, run: str) -> RunState:
        return msgspec.json.decode(await self.bus.client.hget(self.bus.cell.run(run), "state") or b"", type=RunState)

    async def sampler(self, name: str) -> Sampler:
        return msgspec.json.decode(await self.bus.client.get(self.bus.cell.sampler(name)) or b"", type=Sampler)

    async def weights(self, run: str, version: int) -> bytes:
        return (await self.store.read(AdapterRef(TENANT, run, version), (WEIGHTS,)))[WEIGHTS]

    async def sent(self, run: str) -> bool:
        """Is a message of the run with a trainer?"""
        return (await self.state(run)).sent > 0

    async def open_operations(self, number: int) -> bool:
        return await length(self.bus, self.bus.cell.ops(PARTITION), number)
