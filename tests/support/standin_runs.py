"""A stand-in for the owner of partitions and for trainers: it answers the operations of runs, in the order of their numbers.

It computes nothing: the log-prob of a position is -0.5, the loss is the number of positions. What it does with numbers, versions,
names and failures is what an owner does.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.bus.bus import Bus
from common.bus.deliveries import fetched
from common.bus.streams import GROUP_MANAGER, NUM_PARTITIONS, OWNER
from common.cancellation import cancel_all
from common.wire.messages import AdapterRef, Failure, JobCommand, f32
from common.wire.operations import (
    Forward,
    LoadWeights,
    Operation,
    OperationResult,
    OperationsAnswered,
    Outputs,
    Saved,
    SaveWeights,
)
from manager_service.records.keys import JSON
from manager_service.records.run_records import SAVES, USED_S, Checkpoint, RunSpec, RunState, Sampler

KEEP_S = 60.0


@dataclass
class HeldRun:
    state: RunState
    spec: RunSpec
    waiting: dict[int, Operation] = field(default_factory=dict[int, Operation])
    samplers: list[Sampler] = field(default_factory=list[Sampler])


@dataclass
class StandInRuns:
    """Answers one operation at a time. While `going` is not set, it takes none."""

    bus: Bus
    going: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Operation] = field(default_factory=list[Operation])
    created: list[RunSpec] = field(default_factory=list[RunSpec])
    refuses: str = ""  # why no run is created
    runs: dict[str, HeldRun] = field(default_factory=dict[str, HeldRun])

    async def run(self) -> None:
        cell = self.bus.cell
        streams = [name for p in range(NUM_PARTITIONS) for name in (cell.jobs(p), cell.ops(p))]
        for stream in streams:
            await self.bus.ensure_group(stream, GROUP_MANAGER)
        while True:
            await self.going.wait()
            for unread in await self.bus.read(streams, GROUP_MANAGER, OWNER, count=64, block_ms=20):
                delivery = await fetched(unread)
                if isinstance(delivery.message, JobCommand):
                    await self._create(delivery.message.job)
                elif isinstance(delivery.message, Operation):
                    await self._take(delivery.message)

    async def _hold(self, run: str) -> HeldRun:
        if run not in self.runs:
            record: Any = await self.bus.client.hget(self.bus.cell.run(run), "spec")
            self.runs[run] = HeldRun(RunState(), msgspec.json.decode(record, type=RunSpec))
        return self.runs[run]

    async def _create(self, run: str) -> None:
        held = await self._hold(run)
        self.created.append(held.spec)
        held.state.status, held.state.version = "ready", 0
        if self.refuses:
            held.state.status, held.state.version = "failed", -1
        result = OperationResult(0, failure=Failure("invalid", self.refuses) if self.refuses else None)
        await self.bus.client.hset(self.bus.cell.results(run), "0", msgspec.msgpack.encode(result))
        await self._write(held)
        await self._tell(held, [0])

    async def _take(self, operation: Operation) -> None:
        held = await self._hold(operation.job)
        if operation.seq >= held.state.head:
            held.waiting[operation.seq] = operation
        while held.state.head in held.waiting:
            await self._answer(held, held.waiting.pop(held.state.head))

    async def _answer(self, held: HeldRun, operation: Operation) -> None:
        self.seen.append(operation)
        key, state = self.bus.cell.results(held.spec.id), held.state
        result = _result(held, operation)
        state.head += 1
        await self.bus.client.hset(key, str(operation.seq), msgspec.msgpack.encode(result))
        await self._write(held)
        await self._tell(held, [operation.seq])

    async def _write(self, held: HeldRun) -> None:
        cell, run = self.bus.cell, held.spec.id
        await self.bus.client.hset(cell.run(run), mapping=held.state.fields())
        for sampler in held.samplers:
            await self.bus.client.set(cell.sampler(sampler.id), JSON.encode(sampler), ex=sampler.keep_s)
        if held.state.version >= 0:
            await self.bus.client.hset(cell.versions(run), str(held.state.version), "1")

    async def _tell(self, held: HeldRun, seqs: list[int]) -> None:
        run, tenant = held.spec.id, held.spec.tenant
        message = OperationsAnswered(
            id=f"{run}/answered/{seqs[0]}", tenant=tenant, job=run, partition=0, seqs=tuple(seqs)
        )
        await self.bus.broadcast(self.bus.cell.done, message, keep_s=KEEP_S)


def _result(held: HeldRun, operation: Operation) -> OperationResult:
    seq, state = operation.seq, held.state
    if operation.failure is not None:
        state.failed_at = seq if operation.action == "forward_backward" else state.failed_at
        return OperationResult(seq, failure=operation.failure)
    if operation.action == "optim_step":
        if state.failed_at is not None:
            failed, state.failed_at = state.failed_at, None
            return OperationResult(seq, failure=Failure("invalid", f"operation {failed} of this step failed"))
        state.version += 1
        return _outputs(seq, Outputs(metrics={"version": float(state.version), "grad_norm": 1.0}))
    if operation.action in ("forward", "forward_backward"):
        data = msgspec.msgpack.decode(operation.payload, type=Forward).data
        logprobs = tuple(f32([-0.5] * len(datum.tokens)) for datum in data)
        return _outputs(seq, Outputs(logprobs, {"loss:sum": float(sum(len(datum.tokens) for datum in data))}))
    if operation.action == "load":
        load = msgspec.msgpack.decode(operation.payload, type=LoadWeights)
        state.version += 1
        return OperationResult(seq, msgspec.msgpack.encode(Saved(state.version, load.path)))
    if operation.action == "unload":
        state.status = "ended"
        return OperationResult(seq)
    return _saved(held, operation)


def _outputs(seq: int, outputs: Outputs) -> OperationResult:
    return OperationResult(seq, msgspec.msgpack.encode(outputs))


def _saved(held: HeldRun, operation: Operation) -> OperationResult:
    asked, state = msgspec.msgpack.decode(operation.payload, type=SaveWeights), held.state
    if asked.sampler:
        adapter = AdapterRef(held.spec.tenant, held.spec.id, state.version)
        state.inflight = state.version if asked.inflight else state.inflight
        held.samplers.append(
            Sampler(asked.sampler, held.spec.tenant, held.spec.asked_model, USED_S, adapter, asked.inflight)
        )
    else:
        state.checkpoints.append(Checkpoint(SAVES[operation.action], asked.name, state.version, created_at=0))
    saved = Saved(state.version, asked.name, asked.sampler)
    return OperationResult(operation.seq, msgspec.msgpack.encode(saved))


@asynccontextmanager
async def standing_in(bus: Bus, **settings: Any) -> AsyncGenerator[StandInRuns]:
    owner = StandInRuns(bus, **settings)
    owner.going.set()
    task = asyncio.create_task(owner.run())
    try:
        yield owner
    finally:
        await cancel_all([task])
