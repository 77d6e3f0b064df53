"""The owner's decisions in a world without Redis, workers or a clock: what is sent out comes back in any order."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.bus.streams import Cell
from common.tasks.environments import SUPERVISED
from common.wire.messages import AdapterUpdate, Init, Start, TrainStep, Usage
from harness.standin import FixedSlots, StandInEnv
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.records.job_records import JobSpec, JobState
from manager_service.scheduling.allocator import Allocator
from manager_service.scheduling.members import MemberTable
from manager_service.scheduling.policies import MARLAAS, Policy

CELL = Cell("tiny")


@dataclass
class World:
    """Jobs, the Allocator that decides, and what is under way. `turn` lets one thing happen."""

    rng: random.Random
    policy: Policy = MARLAAS
    cluster: FixedSlots = field(default_factory=lambda: FixedSlots(rollout=8, trainer=1, env=8))
    jobs: MemberTable[Job] = field(default_factory=MemberTable[Job])
    in_env: list[Any] = field(default_factory=list)  # scored trajectories that still wait for their grader
    examples: list[Any] = field(default_factory=list)  # of supervised jobs' steps, with env workers
    on_its_way: list[Any] = field(default_factory=list)
    issued: Counter[str] = field(default_factory=Counter)  # job -> groups for training
    started: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    ends: tuple[str, ...] = ("succeeded",)  # how jobs may end
    entries: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.cluster, self.policy)

    def add(self, spec: JobSpec) -> Job:
        job = Job(CELL, spec, JobState(), Items(), Items([b"{}"] * spec.num_eval_items))
        job.queue(self.now, Changes())
        self.jobs.add(job)
        return job

    @property
    def open_work(self) -> int:
        return sum(job.num_waiting for job in self.jobs.values())

    @property
    def training(self) -> set[str]:
        return {name for name, job in self.jobs.items() if job.state.training}

    def turn(self) -> None:
        self.now += 1
        changes = {number: Changes() for number in range(16)}
        if self.in_env and self.rng.random() < 0.3:
            self.on_its_way.append(self.in_env.pop(self.rng.randrange(len(self.in_env))))
        if self.examples and self.rng.random() < 0.5:
            self._deliver(self.examples.pop(self.rng.randrange(len(self.examples))), changes)
        if self.on_its_way:
            self._deliver(self.on_its_way.pop(self.rng.randrange(len(self.on_its_way))), changes)
        self.allocator.follow(self.jobs, self.now)
        self.allocator.env_backlog = len(self.in_env) + len(self.examples)
        self.allocator.decide(self.now, changes)
        for change in changes.values():
            self.started += [job for job, event in change.events if event.message == "Job started"]
            for _, message in change.published:
                self._send(message)

    def run(self, turns: int = 20_000) -> None:
        """Runs until every job has succeeded."""
        for _ in range(turns):
            self.turn()
            if not self.jobs:
                return
        raise AssertionError({name: job.state for name, job in self.jobs.items()})

    def _deliver(self, message: Any, changes: dict[int, Changes]) -> None:
        job = self.jobs[message.job]
        change = changes[job.partition]
        self.entries += 1
        if isinstance(message, AdapterUpdate):
            job.on_adapter(message, self.now, change)
        else:
            job.on_scored(f"{self.entries}-0", message, change)
        job.advance(self.now, change)
        assert job.open.decided == {number for number, group in job.open.groups.items() if group.decided}
        assert job.open.num_in_groups == sum(len(group.waiting) for group in job.open.groups.values())
        if job.settled:
            assert job.state.status in self.ends, job.state
            self.jobs.remove(job.id)
        else:
            self.jobs.touch(job.id)
        self.allocator.charge(change)

    def _send(self, message: Any) -> None:
        match message:
            case Start():
                self.issued[message.job] += 1
                scored = [StandInEnv(CELL).scored(message, sample) for sample in message.samples]
                if message.env.name == SUPERVISED and message.purpose == "train":  # no rollout worker has seen it
                    self.examples += [msgspec.structs.replace(one, usage=Usage()) for one in scored]
                    return
                for trajectory in scored:
                    (self.in_env if self.rng.random() < 0.5 else self.on_its_way).append(trajectory)
            case Init() | TrainStep():
                if isinstance(message, TrainStep):
                    self.trained.append(message.job)
                self.on_its_way.append(_update(message))
            case _:
                pass


def _update(message: Init | TrainStep) -> AdapterUpdate:
    return AdapterUpdate(
        id=f"{message.id}/done",
        **message.about(),
        adapter=message.adapter if isinstance(message, Init) else message.adapter.next(),
        batch=message.id,
        usage=Usage(trained_tokens=10, train_s=0.1),
    )
