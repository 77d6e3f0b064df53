"""Stand-in workers: real worker loops and real messages around handlers that compute next to nothing."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from common.bus.bus import Bus, Out
from common.bus.streams import Cell, partition_of
from common.errors import AlreadyExists
from common.store.adapters import AdapterStore, Manifest, update_of
from common.store.objects import Objects
from common.wire.messages import (
    AdapterRef,
    AdapterUpdate,
    EnvSpec,
    Failure,
    Init,
    JobCommand,
    LoraSpec,
    LossSpec,
    OptimSpec,
    Sampling,
    ScoredTrajectory,
    Start,
    TrainStep,
    TrajectoryRef,
    TurnRequest,
    Usage,
    WorkerReport,
    turn_id,
)
from common.wire.operations import Forget, Forgotten
from common.wire.transcript import shown, wrote
from common.worker.handlers import Beat, Handler
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker, worker_id
from manager_service.records.file_records import file_path
from manager_service.records.job_records import Hyper, JobSpec, JobState
from manager_service.records.keys import JSON

RewardOf = Callable[[Start, int], float | Failure]
Action = Literal["create", "pause", "resume", "cancel"]


def default_reward(start: Start, sample: int) -> float:
    return float((start.group + sample) % 2)


class StandIn:
    """Answers, beside results, as every handler here does: work goes back as it was, and nothing fails."""

    def hand_back(self, message: Any) -> list[Out] | None:
        return None

    def failed(self, message: Any, failure: Failure) -> list[Out]:
        return []


@dataclass
class StandInEnv(StandIn):
    """Start in, scored trajectories out: rollout and env in one."""

    cell: Cell
    reward: RewardOf = default_reward
    delay_s: float = 0.0
    seen: list[Start] = field(default_factory=list)

    def park(self, message: Start) -> list[Out]:
        return []

    def drop(self, message: Start) -> list[Out]:
        return []

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        self.seen.append(message)
        await asyncio.sleep(self.delay_s)
        return self._answers(message)

    def scored(self, start: Start, sample: int) -> ScoredTrajectory:
        outcome = self.reward(start, sample)
        failure = outcome if isinstance(outcome, Failure) else None
        ref = TrajectoryRef(start.purpose, start.seed, start.group, sample, start.attempt)
        return ScoredTrajectory(
            id=turn_id(start.job, ref, start.adapter.version, 0),
            tenant=start.tenant,
            job=start.job,
            partition=start.partition,
            epoch=start.epoch,
            adapter=start.adapter,
            trajectory=ref,
            transcript=shown([1]) + wrote([2, 3], [-0.5, -0.5]),
            num_prompt=1,
            reward=None if isinstance(outcome, Failure) else outcome,
            stop_reason="failed" if failure else "stop",
            num_turns=1,
            output_text="x",
            usage=Usage(prompt_tokens=1, sampled_tokens=2),
            failure=failure,
        )

    def failed(self, message: Start, failure: Failure) -> list[Out]:
        return self._answers(message)

    def _answers(self, start: Start) -> list[Out]:
        return [(self.cell.scored(start.partition), self.scored(start, sample)) for sample in start.samples]


@dataclass
class StandInTrainer(StandIn):
    """Commits versions of one byte each, unless `files` says otherwise; the commit protocol is the real one."""

    cell: Cell
    store: AdapterStore
    seen: list[TrainStep] = field(default_factory=list)
    refuse: Callable[[TrainStep], Failure | None] = lambda step: None
    files: dict[str, bytes] = field(default_factory=lambda: {"adapter_model.safetensors": b"1"})

    async def __call__(self, message: Init | TrainStep | Forget, beat: Beat) -> list[Out]:
        if isinstance(message, Forget):
            return [(self.cell.adapters(message.partition), await forgotten(self.store, message))]
        target = message.adapter if isinstance(message, Init) else message.adapter.next()
        if isinstance(message, TrainStep):
            self.seen.append(message)
            if failure := self.refuse(message):
                return [self._refused(message, failure)]
            if message.untrained:
                await self._commit(message.adapter, f"{message.job}/init", message.seed)
        manifest = await self._commit(target, message.id, message.seed)
        return [(self.cell.adapters(message.partition), update_of(manifest, message.about()))]

    async def _commit(self, target: AdapterRef, batch: str, seed: int) -> Manifest:
        metrics = {"reward_mean": 0.5, "reward_std": 0.5, "loss": 0.0}
        more: dict[str, Any] = {"batch": batch, "seed": seed, "metrics": metrics, "usage": Usage(trained_tokens=10)}
        return await commit(self.store, self.cell.base_model, target, self.files, **more)

    def _refused(self, message: Init | TrainStep, failure: Failure) -> Out:
        target = message.adapter if isinstance(message, Init) else message.adapter.next()
        return self.cell.adapters(message.partition), refused(message, target, failure)

    def failed(self, message: Init | TrainStep, failure: Failure) -> list[Out]:
        return [self._refused(message, failure)]


async def commit(
    store: AdapterStore,
    base: str,
    target: AdapterRef,
    files: dict[str, bytes],
    *,
    batch: str,
    seed: int = 0,
    **more: Any,
) -> Manifest:
    """The manifest of a version, which is made unless it is there."""
    about: dict[str, Any] = {"adapter": target, "base_model": base, "batch": batch, "seed": seed, **more}
    try:
        return await store.commit(Manifest(attempt="", files={}, parent=None, next_group=0, **about), files)
    except AlreadyExists:
        found = await store.manifest(target)
        assert found is not None
        return found


async def forgotten(store: AdapterStore, message: Forget) -> Forgotten:
    """The answer of a trainer that has deleted what it was asked to."""
    for versions, delete in ((message.versions, store.drop_files), (message.optimizers, store.drop_optimizer)):
        for version in versions:
            await delete(msgspec.structs.replace(message.adapter, version=version))
    if message.everything:
        await store.delete_job(message.tenant, message.job)
    return Forgotten(id=f"{message.id}/done", **message.about(), forget=message.id)


def refused(message: Init | TrainStep, target: AdapterRef, failure: Failure) -> AdapterUpdate:
    """A trainer's answer that it makes no version."""
    about: dict[str, Any] = {"id": f"{message.id}/failed", **message.about()}
    return AdapterUpdate(**about, adapter=target, batch=message.id, failure=failure)


NUM_PROMPT, NUM_TOKENS = 24, 64
"""Lengths of the trajectories of `OneTurnEnv` and `OneTurnRollout`."""
PROMPT = shown(np.arange(NUM_PROMPT))
ANSWERED = PROMPT + wrote(np.arange(NUM_PROMPT, NUM_TOKENS), np.linspace(-2, 0, NUM_TOKENS)[NUM_PROMPT:])


@dataclass(slots=True)
class OneTurnEnv(StandIn):
    """Start in, a turn request for each sample out."""

    cell: Cell

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        return [(self.cell.rollout, self.turn(message, sample)) for sample in message.samples]

    def turn(self, start: Start, sample: int) -> TurnRequest:
        ref = TrajectoryRef(start.purpose, start.seed, start.group, sample, start.attempt)
        return TurnRequest(
            **start.about(),
            id=turn_id(start.job, ref, start.adapter.version, 0),
            adapter=start.adapter,
            untrained=start.untrained,
            trajectory=ref,
            turn=0,
            transcript=PROMPT,
            sampling=Sampling(),
        )


@dataclass(slots=True)
class OneTurnRollout(StandIn):
    """A turn request in, the scored trajectory out, so that no env need grade it. `seconds`: how long one takes."""

    cell: Cell
    seconds: Callable[[], float] = lambda: 0.0
    num: int = 0  # answered

    async def __call__(self, message: TurnRequest, beat: Beat) -> list[Out]:
        if seconds := self.seconds():
            await asyncio.sleep(seconds)
        self.num += 1
        return [(self.cell.scored(message.partition), self.scored(message))]

    def scored(self, message: TurnRequest) -> ScoredTrajectory:
        return ScoredTrajectory(
            **message.about(),
            id=message.id,
            adapter=message.adapter,
            trajectory=message.trajectory,
            transcript=ANSWERED,
            num_prompt=NUM_PROMPT,
            reward=float(message.trajectory.sample % 2),
            stop_reason="stop",
            num_turns=1,
            output_text="42",
        )


@dataclass(frozen=True)
class FixedSlots:
    """Stands in for the cluster's telemetry."""

    rollout: int = 64
    trainer: int = 1
    env: int = 64
    trainers: int = 1  # that have these slots
    reports: list[WorkerReport] = field(default_factory=list[WorkerReport])

    def workers(self) -> list[WorkerReport]:
        return self.reports

    def working(self, service: str | None = None) -> list[WorkerReport]:
        return [worker for worker in self.reports if service in (None, worker.service)]

    def refusals(self, services: Sequence[str]) -> str:
        return ""

    def waits_for(self, job: str) -> str:
        return ""

    def slots(self, service: str) -> int:
        return {"rollout": self.rollout, "trainer": self.trainer, "env": self.env}[service]

    def num_workers(self, service: str) -> int:
        return self.trainers if service == "trainer" else 1

    def kv_tokens(self) -> int | None:
        return None

    def lora_slots(self) -> dict[str, int]:
        return {}

    def least_kv_tokens(self) -> int | None:
        return self.kv_tokens()

    def sampling_gap_bound(self) -> float:
        return 0.001


def stand_in_worker(
    bus: Bus, service: str, inbox: Inbox, handler: Handler, *, slots: int = 8, lease_s: float = 1.0
) -> Worker:
    reporter = Reporter(worker_id(service), service, bus.cell.base_model, About(slots=slots))
    return Worker(bus, handler, [inbox], reporter, lease_s=lease_s)


def job_spec(job: str = "job-a", tenant: str = "acme", *, created_at: int = 0, **hyper: object) -> JobSpec:
    values: dict[str, object] = {"batch_size": 4, "group_size": 4, "num_steps": 3, **hyper}
    return JobSpec(
        id=job,
        tenant=tenant,
        base_model="tiny",
        created_at=created_at or int(time.time()),
        seed=7,
        method={},
        env=EnvSpec("single_turn", {}),
        hyper=Hyper(lora=LoraSpec(), loss=LossSpec(), optim=OptimSpec(1e-3), **values),  # type: ignore[arg-type]
        num_items=0,
    )


async def held_out(objects: Objects, spec: JobSpec, num: int) -> JobSpec:
    """The job, with a file of so many items for its evaluations."""
    rows = (b'{"messages":[{"role":"user","content":"item %d"}]}\n' % number for number in range(num))
    await objects.write(file_path(spec.tenant, "file-held-out"), b"".join(rows))
    return msgspec.structs.replace(spec, validation_file="file-held-out", num_eval_items=num)


async def create_job(bus: Bus, spec: JobSpec, state: JobState | None = None) -> None:
    """Creates a job as the API's script does."""
    cell, partition = bus.cell, partition_of(spec.tenant)
    record: dict[Any, Any] = {"spec": JSON.encode(spec), "state": JSON.encode(state or JobState())}
    await bus.client.hset(cell.job(spec.id), mapping=record)
    await bus.client.sadd(cell.active(partition), spec.id)
    await command(bus, spec, "create")


async def command(bus: Bus, spec: JobSpec, action: Action) -> None:
    message = job_command(spec, action)
    await bus.publish([(bus.cell.jobs(message.partition), message)])


def job_command(spec: JobSpec, action: Action = "create") -> JobCommand:
    partition = partition_of(spec.tenant)
    return JobCommand(id=f"{spec.id}/{action}", tenant=spec.tenant, job=spec.id, partition=partition, action=action)


async def state_of(bus: Bus, job: str) -> JobState:
    return msgspec.json.decode(await bus.client.hget(bus.cell.job(job), "state") or b"", type=JobState)


async def ledger_of(bus: Bus, job: str) -> dict[str, int]:
    """The counts, in_flight measured in the same moment."""
    async with bus.client.pipeline(transaction=True) as pipe:
        pipe.hgetall(bus.cell.ledger(job))
        pipe.hlen(bus.cell.open(job))
        counts, in_flight = await pipe.execute()
    return {**{k.decode(): int(v) for k, v in counts.items()}, "in_flight": in_flight}


def balanced(ledger: dict[str, int]) -> bool:
    """Checks I7."""
    settled = sum(ledger.get(n, 0) for n in ("trained", "filtered", "stale", "failed", "cancelled", "in_flight"))
    return ledger.get("issued", 0) == settled


async def until_status(bus: Bus, job: str, *statuses: str, seconds: float = 60.0) -> JobState:
    async with asyncio.timeout(seconds):
        while True:
            state = await state_of(bus, job)
            if state.status in statuses:
                return state
            await asyncio.sleep(0.02)
