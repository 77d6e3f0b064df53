"""Simulates jobs of many bases on pools: operations are events, and production decides (`simulator.pool.places`).

    job: turns, tools ─► train ─► turns …          of each service a pool a size of workers; without a rollout pool rollouts run on the
                                                   job's own GPUs, as PlexRL's

A step's rollouts begin when at most `lag` steps before them are untrained: 0 is strict, 1 PlexRL's. What an operation takes varies about
its mean by a draw of (seed, job, step), the same under each placement. A job begins once its base has a place in each pool.
"""

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from common.pool.placement import PlacementRule
from simulator.clock import Clock
from simulator.pool.places import Costs, PoolOperation, PoolSize, ServicePool, WorkerSlice
from simulator.pool.trace import TraceJob

SIGMA = 0.3
"""Assumed spread of a step's time, of its logarithm."""


class Setup(NamedTuple):
    """The conditions under which a trace is run."""

    placement: PlacementRule
    trainers: dict[int, PoolSize]  # by the GPUs of a worker; {0: size}: one pool for jobs of all sizes
    rollouts: PoolSize | None = None  # None: each job's own GPUs
    costs: Costs = Costs()
    lag: int = 1
    sigma: float = SIGMA
    seed: int = 0

    @property
    def one_pool(self) -> bool:
        return 0 in self.trainers

    def trainer_of(self, job: TraceJob) -> int:
        return 0 if self.one_pool else job.shape.train


class EndedJob(NamedTuple):
    """A job that ended."""

    job: TraceJob
    started_s: float
    ended_s: float
    alone_s: float  # from its start to its end without others and openings

    @property
    def completion_s(self) -> float:
        return self.ended_s - self.job.at_s

    @property
    def slowdown(self) -> float:
        return (self.ended_s - self.started_s) / self.alone_s


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job's loop."""

    job: TraceJob
    factors: list[float]
    """Time of each step over the mean."""
    lag: int
    ended: Callable[["RunningJob"], None]
    rollouts: ServicePool | None
    trainer: ServicePool
    started_s: float = 0.0
    rolled: int = 0
    trained: int = 0
    _is_rolling: bool = False
    _turns: int = 0  # ended, of the step under way
    _is_training: bool = False

    @property
    def clock(self) -> Clock:
        return self.trainer.clock

    def go_on(self) -> None:
        """Asks for what may follow."""
        if not self._is_rolling and self.rolled < self.job.steps and self.rolled - self.trained <= self.lag:
            self._is_rolling, self._turns = True, 0
            self._roll()
        if not self._is_training and self.trained < self.rolled:
            self._is_training = True
            seconds = self.job.train_s * self.factors[self.trained]
            self.trainer.ask(PoolOperation(self.job.base, seconds, self.clock.now, self._trained))

    def _roll(self) -> None:
        seconds = self.job.rollout_s * self.factors[self.rolled] / self.job.turns
        if self.rollouts is None:
            self.clock.after(seconds, self._sampled)
        else:
            self.rollouts.ask(PoolOperation(self.job.base, seconds, self.clock.now, self._sampled))

    def _sampled(self) -> None:
        self.clock.after(self.job.tool_s / self.job.turns, self._answered)

    def _answered(self) -> None:
        self._turns += 1
        if self._turns < self.job.turns:
            self._roll()
        else:
            self.rolled, self._is_rolling = self.rolled + 1, False
            self.go_on()

    def _trained(self) -> None:
        self.trained, self._is_training = self.trained + 1, False
        if self.trained == self.job.steps:
            self.ended(self)
        else:
            self.go_on()


def factors_of(job: TraceJob, number: int, setup: Setup) -> list[float]:
    rng = random.Random(f"{setup.seed} {number}")
    return [math.exp(rng.gauss(0, setup.sigma) - setup.sigma**2 / 2) for _ in range(job.steps)]


def alone_s(job: TraceJob, factors: Sequence[float], lag: int) -> float:
    """The time of a job without others and openings."""
    rolled = trained = 0.0
    ends = [0.0]
    for number, factor in enumerate(factors):
        begin = max(rolled, ends[max(0, number - lag)])
        rolled = begin + job.rollout_s * factor + job.tool_s
        trained = max(rolled, trained) + job.train_s * factor
        ends.append(trained)
    return trained


@dataclass
class PoolCluster:
    """The pools, and the jobs on them."""

    setup: Setup
    keep_slices: bool = False
    clock: Clock = field(default_factory=Clock)
    ended: list[EndedJob] = field(default_factory=list[EndedJob])
    _running: dict[RunningJob, None] = field(default_factory=dict[RunningJob, None])
    _waiting: dict[int, deque[RunningJob]] = field(default_factory=lambda: defaultdict(deque))
    """Jobs whose base has no place, in order of arrival, by the GPUs that train them."""

    def __post_init__(self) -> None:
        self.trainers = {gpus: self._pool(f"trainer-{gpus}", size) for gpus, size in self.setup.trainers.items()}
        self.rollouts = self._pool("rollout", self.setup.rollouts) if self.setup.rollouts else None

    def _pool(self, name: str, size: PoolSize) -> ServicePool:
        return ServicePool(
            name, self.clock, size, self.setup.costs, self.setup.placement, [] if self.keep_slices else None
        )

    @property
    def slices(self) -> list[WorkerSlice]:
        return [each for pool in self.pools for each in pool.slices or ()]

    @property
    def pools(self) -> list[ServicePool]:
        return [*self.trainers.values(), *([self.rollouts] if self.rollouts else [])]

    def run(self, jobs: Sequence[TraceJob]) -> None:
        """Runs to the end of the last job. Raises RuntimeError if one waits for ever."""
        for number, job in enumerate(jobs):
            self.clock.at(job.at_s, lambda job=job, number=number: self._arrived(job, number))
        while len(self.ended) < len(jobs):
            if not self.clock.step():
                raise RuntimeError(f"{len(jobs) - len(self.ended)} jobs wait for ever")
        for pool in self.pools:
            pool.close_books()

    def _arrived(self, job: TraceJob, number: int) -> None:
        factors = factors_of(job, number, self.setup)
        gpus = self.setup.trainer_of(job)
        arrived = RunningJob(job, factors, self.setup.lag, self._ended, self.rollouts, self.trainers[gpus])
        waiting = self._waiting[gpus]
        waiting.append(arrived)
        if len(waiting) == 1 or any(running.job.base == job.base for running in self._running):
            self._settle(gpus)

    def _ended(self, ended: RunningJob) -> None:
        del self._running[ended]
        self.ended.append(
            EndedJob(ended.job, ended.started_s, self.clock.now, alone_s(ended.job, ended.factors, ended.lag))
        )
        for gpus in self.trainers if self.rollouts else (self.setup.trainer_of(ended.job),):
            self._settle(gpus)

    def _settle(self, gpus: int) -> None:
        """Gives the bases of one size places, and begins the jobs that waited for one."""
        trainer = self.trainers[gpus]
        waiting = self._waiting[gpus]
        able = list(islice(waiting, trainer.size.workers * trainer.size.host_bases))
        running = [each for each in self._running if each.trainer is trainer]
        places = trainer.give_places(_demand([*running, *able], lambda job: job.train_s))
        if self.rollouts:
            others = [each for each in self._running if each.trainer is not trainer]
            able = [each for each in able if places[each.job.base]]
            rolled = self.rollouts.give_places(_demand([*running, *others, *able], lambda job: job.rollout_s))
            places = {base: names for base, names in places.items() if rolled.get(base)}
        begun = [each for each in waiting if places.get(each.job.base)]
        for each in begun:
            waiting.remove(each)
            self._running[each] = None
            each.started_s = self.clock.now
        for each in begun:
            each.go_on()


def _demand(jobs: Iterable[RunningJob], seconds: Callable[[TraceJob], float]) -> dict[str, float]:
    """The share of one worker's time that the jobs of each base need."""
    found = dict[str, float]()
    for each in jobs:
        found[each.job.base] = found.get(each.job.base, 0.0) + seconds(each.job) / each.job.step_s
    return found
