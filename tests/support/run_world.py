"""An owner and trainers of runs on one bus, and a user who sends operations. The trainers compute hashes: the version after a step is
the hash of the one before and of all that its gradient saw.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.bus.bus import Bus, Out
from common.bus.streams import GROUP_TRAINER, Cell, partition_of
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest, update_of
from common.wire.messages import AdapterRef, Failure, Init, JobCommand, LoraSpec, Usage
from common.wire.operations import (
    Action,
    Forget,
    LoadWeights,
    NameChange,
    Operation,
    OperationResult,
    Operations,
    OperationsDone,
    Outputs,
    RunOperation,
    Saved,
    SaveWeights,
)
from common.worker.handlers import Beat
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker, worker_id
from harness.standin import StandIn, commit, forgotten, refused
from manager_service.records.keys import JSON
from manager_service.records.run_records import Checkpoint, RunSpec, RunState, Sampler, run_of
from tests.common.test_worker import length, until
from tests.manager.test_api_cluster import report
from tests.support.api_server import ApiServer
from tests.support.owning import System

WEIGHTS, CONFIG = PEFT_FILES
TENANT = "acme"
SESSION = "ses-0123456789abcdef"
PARTITION = partition_of(TENANT)


@dataclass(slots=True)
class HashingTrainer(StandIn):
    cell: Cell
    store: AdapterStore
    name: str
    gradients: dict[tuple[AdapterRef, int], bytes] = field(default_factory=dict[tuple[AdapterRef, int], bytes])
    seen: list[Operations] = field(default_factory=list[Operations])
    refuse: Callable[[RunOperation], Failure | None] = lambda operation: None
    gives_up: bool = False
    """Stretches fail as a whole, and their gradients go."""
    refuses_init: bool = False
    hold: asyncio.Event | None = None
    """While it is there and not set, nothing is answered."""
    hold_forget: asyncio.Event | None = None
    """While it is there and not set, no version is deleted."""

    async def __call__(self, message: Init | Operations | Forget, beat: Beat) -> list[Out]:
        if self.hold:
            await self.hold.wait()
        stream = self.cell.adapters(message.partition)
        if isinstance(message, Init) and self.refuses_init:
            failure = Failure("invalid", "no such layer")
            return [(stream, refused(message, message.adapter, failure))]
        if isinstance(message, Init):
            content = b"%d" % message.seed
            if message.source:
                content = (await self.store.read(message.source, (WEIGHTS,)))[WEIGHTS]
            manifest = await self._commit(message.adapter, content, message.id)
            return [(stream, update_of(manifest, message.about()))]
        if isinstance(message, Forget):
            if self.hold_forget:
                await self.hold_forget.wait()
            return [(stream, await forgotten(self.store, message))]
        self.seen.append(message)
        return [(stream, await self._done(message))]

    async def _done(self, message: Operations) -> OperationsDone:
        def answer(adapter: AdapterRef, **fields: object) -> OperationsDone:
            about = {**message.about(), "id": f"{message.id}/done", "attempt": message.attempt}
            return msgspec.convert({**about, "adapter": adapter, "kind": "OperationsDone", **fields}, OperationsDone)

        if self.gives_up:
            given_up = Failure("infrastructure", "given up")
            results = [OperationResult(one.seq, failure=given_up) for one in message.operations if not one.answered]
            return answer(message.adapter, results=results, holder=self.name)
        gradient = self.gradients.pop((message.adapter, message.first), b"") if message.first else b""
        if message.first and not gradient:
            return answer(message.adapter, absent=True)
        results: list[OperationResult] = []
        adapter, held, size = message.adapter, message.first, (0, 0)
        for operation in message.operations:
            failure = self.refuse(operation)
            if operation.action == "optim_step" and any(result.failure for result in results):
                failure = Failure("invalid", "the gradient is not whole")
            if failure is None and operation.action == "optim_step":
                files = await self.store.read(message.adapter, (WEIGHTS,))
                content = hashlib.sha256(files[WEIGHTS] + gradient + operation.payload).digest()
                size = (await self._commit(message.adapter.next(), content, message.id)).size
                adapter, held = message.adapter.next(), 0
            elif operation.action == "forward_backward":
                gradient, held = gradient + operation.payload, held + 1
            if not operation.answered:
                outputs = msgspec.msgpack.encode(Outputs(metrics={"loss:sum": float(operation.seq)}))
                results.append(OperationResult(operation.seq, b"" if failure else outputs, failure))
        if held:
            self.gradients[message.adapter, held] = gradient
        more = {"held": held, "holder": self.name, "usage": Usage(trained_tokens=1), "size": size}
        return answer(adapter, results=results, **more)

    async def _commit(self, adapter: AdapterRef, content: bytes, batch: str) -> Manifest:
        files = {WEIGHTS: content, CONFIG: b"{}", OPTIMIZER_FILE: b"moments"}
        return await commit(self.store, self.cell.base_model, adapter, files, batch=batch)


@contextlib.asynccontextmanager
async def hashing_trainer(bus: Bus, store: AdapterStore, *, lease_s: float) -> AsyncGenerator[HashingTrainer]:
    """A worker that trains until the context ends; then it is gone without a goodbye."""
    name = worker_id("trainer")
    handler = HashingTrainer(bus.cell, store, name)
    inboxes = [Inbox(stream, GROUP_TRAINER, at_once=1) for stream in (bus.cell.trainer(name), bus.cell.train)]
    reporter = Reporter(name, "trainer", bus.cell.base_model, About(slots=1))
    worker = Worker(bus, handler, inboxes, reporter, lease_s=lease_s)
    task = asyncio.create_task(worker.run(asyncio.Event()))
    try:
        yield handler
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class World(System):
    """An owner and trainers on one bus, and a user who sends operations."""

    partition = PARTITION

    @contextlib.asynccontextmanager
    async def hashing_trainer(self) -> AsyncGenerator[HashingTrainer]:
        """A trainer that is alive until the context ends."""
        async with hashing_trainer(self.bus, self.store, lease_s=self.lease_s) as trainer:
            alive = report(trainer.name, "trainer")
            self.slots.reports.append(alive)
            try:
                yield trainer
            finally:
                self.slots.reports.remove(alive)

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
            await self.publish(run, seq, action, f"{action} {seq}".encode(), failure)

    async def publish(self, run: str, seq: int, action: Action, payload: bytes, failure: Failure | None = None) -> None:
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
        await self.publish(run, seq, action, payload)
        return msgspec.msgpack.decode((await self.result(run, seq)).outputs, type=Saved)

    async def load(self, run: str, seq: int, source: AdapterRef) -> None:
        await self.publish(run, seq, "load", msgspec.msgpack.encode(LoadWeights("tinker://x", source)))

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


@contextlib.asynccontextmanager
async def owned_runs(server: ApiServer) -> AsyncGenerator[HashingTrainer]:
    """Runs behind the API of a test: the real owner, and a trainer that computes hashes."""
    world = World(server.bus, server.api.objects, lease_s=1.0, tenants=server.api.tenants)
    world.start_owner()
    try:
        async with world.hashing_trainer() as trainer:
            yield trainer
    finally:
        await world.stop()
