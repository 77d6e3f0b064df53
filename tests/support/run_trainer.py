"""A trainer of runs that computes hashes: the version after a step is the hash of the one before and of all that its gradient saw."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from common.bus.bus import Bus, Out
from common.bus.streams import GROUP_TRAINER, Cell
from common.errors import AlreadyExists
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest, update_of
from common.wire.messages import AdapterRef, AdapterUpdate, Failure, Init, Usage, WorkerReport
from common.wire.operations import Forget, Forgotten, OperationResult, Operations, OperationsDone, Outputs, RunOperation
from common.worker.handlers import Beat
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker, worker_id
from harness.standin import StandIn

WEIGHTS, CONFIG = PEFT_FILES


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
            identity = f"{message.id}/failed"
            update = AdapterUpdate(
                id=identity, **message.about(), adapter=message.adapter, batch=message.id, failure=failure
            )
            return [(stream, update)]
        if isinstance(message, Init):
            content = b"%d" % message.seed
            if message.source:
                content = (await self.store.read(message.source, (WEIGHTS,)))[WEIGHTS]
            manifest = await self._commit(message.adapter, content, message.id)
            return [(stream, update_of(manifest, message.about()))]
        if isinstance(message, Forget):
            if self.hold_forget:
                await self.hold_forget.wait()
            for version in message.versions:
                await self.store.drop_files(msgspec.structs.replace(message.adapter, version=version))
            for version in message.optimizers:
                await self.store.drop_optimizer(msgspec.structs.replace(message.adapter, version=version))
            if message.everything:
                await self.store.delete_job(message.tenant, message.job)
            return [(stream, Forgotten(id=f"{message.id}/done", **message.about(), forget=message.id))]
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
        adapter, held = message.adapter, message.first
        for operation in message.operations:
            failure = self.refuse(operation)
            if operation.action == "optim_step" and any(result.failure for result in results):
                failure = Failure("invalid", "the gradient is not whole")
            if failure is None and operation.action == "optim_step":
                files = await self.store.read(message.adapter, (WEIGHTS,))
                content = hashlib.sha256(files[WEIGHTS] + gradient + operation.payload).digest()
                await self._commit(message.adapter.next(), content, message.id)
                adapter, held = message.adapter.next(), 0
            elif operation.action == "forward_backward":
                gradient, held = gradient + operation.payload, held + 1
            if not operation.answered:
                outputs = msgspec.msgpack.encode(Outputs(metrics={"loss:sum": float(operation.seq)}))
                results.append(OperationResult(operation.seq, b"" if failure else outputs, failure))
        if held:
            self.gradients[message.adapter, held] = gradient
        return answer(adapter, results=results, held=held, holder=self.name, usage=Usage(trained_tokens=1))

    async def _commit(self, adapter: AdapterRef, content: bytes, batch: str) -> Manifest:
        manifest = Manifest(
            adapter=adapter,
            base_model=self.cell.base_model,
            attempt="",
            files={},
            parent=None,
            batch=batch,
            seed=0,
            next_group=0,
        )
        try:
            return await self.store.commit(manifest, {WEIGHTS: content, CONFIG: b"{}", OPTIMIZER_FILE: b"moments"})
        except AlreadyExists:
            found = await self.store.manifest(adapter)
            assert found is not None
            return found

    def report(self) -> WorkerReport:
        return WorkerReport(
            id=self.name,
            tenant="",
            job="",
            partition=0,
            service="trainer",
            pid=1,
            host="",
            state="idle",
            busy=0.0,
            base_model="tiny",
        )


@contextlib.asynccontextmanager
async def hashing_trainer(bus: Bus, store: AdapterStore, *, lease_s: float = 0.6) -> AsyncGenerator[HashingTrainer]:
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
