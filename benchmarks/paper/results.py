"""Figures of a run, and how they follow from the measurements. Nothing here runs or prints anything."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from simulator.calibration import PolicyRun, Spread, jain

Counters = Mapping[str, float]


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's first submission."""

    submitted_s: float
    first_s: float  # its first turn at the rollout engine
    token_s: float  # when the first of its tokens had been sampled
    versions_s: list[float]  # when each was committed; version 0 when it first sampled
    tokens: int  # prompt and sampled ones of its trained trajectories
    written: int  # of them, sampled

    @property
    def turnaround_s(self) -> float:
        return self.versions_s[-1] - self.submitted_s

    @property
    def step_times_s(self) -> list[float]:
        """Version to version."""
        return [later - at for at, later in pairwise(self.versions_s)]

    def later(self, seconds: float) -> "JobFigures":
        """The figures with times since a start that many seconds earlier."""
        times = {name: getattr(self, name) + seconds for name in ("submitted_s", "first_s", "token_s")}
        return msgspec.structs.replace(self, **times, versions_s=[at + seconds for at in self.versions_s])


class Engine(msgspec.Struct, frozen=True):
    """Seconds of the thread that computes, on a processor."""

    busy_s: float  # forward, backward, optimiser, sampling
    useful_s: float  # of them, for neither padding nor tokens that never ended in `trained`
    core_wait_s: float  # it was ready and had no core


class Measured(PolicyRun, frozen=True, kw_only=True):
    """A run, with the figures that a simulation does not have."""

    jobs: list[JobFigures]
    rollout: Engine
    trainer: Engine
    cpu_s: dict[str, float]  # of each process
    others: float = 0.0  # cores that everybody else on the machine used, in the mean

    @property
    def control_s(self) -> float:
        """Processor seconds of all processes beside those of the engines' computing."""
        return sum(self.cpu_s.values()) - self.rollout.busy_s - self.trainer.busy_s

    @property
    def bottleneck(self) -> Engine:
        return max(self.rollout, self.trainer, key=lambda engine: engine.busy_s)

    @property
    def useful(self) -> float:
        """Share of the two engines' time."""
        return (self.rollout.useful_s + self.trainer.useful_s) / (2 * self.makespan_s)

    @property
    def bottleneck_useful(self) -> float:
        """Useful share of the time in which the busier engine was not waiting for a core."""
        engine = self.bottleneck
        return engine.useful_s / max(self.makespan_s - engine.core_wait_s, engine.useful_s)

    @property
    def until_tokens_s(self) -> list[float]:
        """Seconds from each job's submission to its first sampled token, ascending."""
        return sorted(job.token_s - job.submitted_s for job in self.jobs)

    def slowdowns(self, alone: "Measured") -> list[float]:
        """Each job's turnaround over that of a job alone."""
        return [job.turnaround_s / alone.jobs[0].turnaround_s for job in self.jobs]


def rollout_engine(growth: Counters, *, written: int, core_wait_s: float) -> Engine:
    """`growth`: of the meter's counters. `written`: sampled tokens that were trained."""
    trained = min(1.0, written / max(1.0, growth["sampled_tokens"]))
    decode = growth["sampled_tokens"] / max(1.0, growth["decode_rows"])
    prefill = growth["prefill_tokens"] / max(1.0, growth["prefill_positions"])
    useful_s = trained * (growth["decode_s"] * decode + growth["prefill_s"] * prefill)
    return Engine(growth["decode_s"] + growth["prefill_s"], useful_s, core_wait_s)


def training_engine(growth: Counters, *, trained: int, core_wait_s: float) -> Engine:
    """`trained`: tokens of the batches whose versions were committed."""
    padding = growth["padding_tokens"] / max(1.0, growth["forward_tokens"])
    won = min(1.0, trained / max(1.0, growth["trained_tokens"]))
    return Engine(growth["compute_s"], growth["compute_s"] * (1 - padding) * won, core_wait_s)


def measured(
    jobs: Sequence[JobFigures], rollout: Engine, trainer: Engine, *, sampled_tokens: float, **known: Any
) -> Measured:
    """The run's figures from its jobs' and engines'. `known`: policy, workload, cpu_s, others."""
    makespan_s = max(job.versions_s[-1] for job in jobs)
    steps = [seconds for job in jobs for seconds in job.step_times_s]
    return Measured(
        kind="measured",
        training_queue="fused",
        n=len(jobs),
        steps=max(len(job.versions_s) for job in jobs) - 1,
        makespan_s=makespan_s,
        tokens_per_s=sum(job.tokens for job in jobs) / makespan_s,
        steps_per_s=len(steps) / makespan_s,
        rollout_busy=rollout.busy_s / makespan_s,
        trainer_busy=trainer.busy_s / makespan_s,
        ttfs_s=Spread.of([job.first_s - job.submitted_s for job in jobs]),
        tpts_s=Spread.of(steps),
        jain=jain([job.tokens / job.turnaround_s for job in jobs]),
        wasted_tokens=max(0, round(sampled_tokens) - sum(job.written for job in jobs)),
        jobs=list(jobs),
        rollout=rollout,
        trainer=trainer,
        **known,
    )
