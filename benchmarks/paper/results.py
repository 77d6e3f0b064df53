"""Figures of a run, and how they follow from the measurements. Nothing here runs or prints anything."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from simulator.calibration import PolicyRun, Spread, jain

Growth = Mapping[str, Mapping[str, float]]
"""Service -> the growth of its worker's counters in the run."""


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's first submission."""

    submitted_s: float
    versions_s: list[float]  # when each was committed; version 0 when its first turn was at the rollout engine
    tokens: int  # prompt and sampled ones of its trained trajectories
    written: int  # of them, sampled

    @property
    def turnaround_s(self) -> float:
        return self.versions_s[-1] - self.submitted_s

    @property
    def step_times_s(self) -> list[float]:
        """Version to version."""
        return [later - at for at, later in pairwise(self.versions_s)]


class Measured(PolicyRun, frozen=True, kw_only=True):
    """A run, with the figures that a simulation does not have."""

    jobs: list[JobFigures]
    cpu_s: dict[str, float]  # of each process

    @property
    def busy(self) -> float:
        """Share of the two engines' time."""
        return (self.rollout_busy + self.trainer_busy) / 2

    @property
    def control_s(self) -> float:
        """Processor seconds of all processes beside those of the engines' computing."""
        return sum(self.cpu_s.values()) - 2 * self.busy * self.makespan_s

    def slowdowns(self, alone: "Measured") -> list[float]:
        """Each job's turnaround over that of a job alone."""
        return [job.turnaround_s / alone.jobs[0].turnaround_s for job in self.jobs]


def measured(
    policy: str, workload: str, jobs: Sequence[JobFigures], growth: Growth, cpu_s: Mapping[str, float]
) -> Measured:
    makespan_s = max(job.versions_s[-1] for job in jobs)
    steps = [seconds for job in jobs for seconds in job.step_times_s]
    rollout = growth["rollout"]
    return Measured(
        kind="measured",
        policy=policy,
        workload=workload,
        n=len(jobs),
        steps=max(len(job.versions_s) for job in jobs) - 1,
        makespan_s=makespan_s,
        tokens_per_s=sum(job.tokens for job in jobs) / makespan_s,
        steps_per_s=len(steps) / makespan_s,
        rollout_busy=(rollout["decode_s"] + rollout["prefill_s"]) / makespan_s,
        trainer_busy=growth["trainer"]["compute_s"] / makespan_s,
        ttfs_s=Spread.of([job.versions_s[0] - job.submitted_s for job in jobs]),
        tpts_s=Spread.of(steps),
        jain=jain([job.tokens / job.turnaround_s for job in jobs]),
        wasted_tokens=max(0, round(rollout["sampled_tokens"]) - sum(job.written for job in jobs)),
        jobs=list(jobs),
        cpu_s=dict(cpu_s),
    )
