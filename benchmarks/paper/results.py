"""Figures of a run, how they follow from the measurements, and what the simulator predicts, calibrated for each workload on the telemetry
of one run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from manager_service.scheduling.policies import parse_policy
from simulator.calibration import Calibration, PolicyRun, Spread, jain
from simulator.fit import Recording, calibrate, deltas, read_recording, total
from simulator.world import simulate

CALIBRATED_ON = "marlaas"
MOST_JOBS = 8
"""The run that calibrates is the largest up to this, and of no more jobs than run at once: how many rows share a forward
decides what each costs."""

Key = tuple[str, str, int]
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
    idle: dict[str, float] = {}  # processor seconds a second of each process before the run, when nothing happens

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
    policy: str,
    workload: str,
    jobs: Sequence[JobFigures],
    growth: Growth,
    cpu_s: Mapping[str, float],
    idle: Mapping[str, float],
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
        idle=dict(idle),
    )


def key_of(run: PolicyRun) -> Key:
    return run.workload, run.policy, run.n


def recording_file(folder: Path, run: PolicyRun) -> Path:
    return folder / f"telemetry-{run.workload}-{run.policy}-{run.n}.msgpack"


def calibrates(policy: str, n: int) -> bool:
    """True if a run's telemetry is worth keeping."""
    return policy == CALIBRATED_ON and n <= MOST_JOBS


def calibration_of(recording: Recording, run: Measured, cores: int | None) -> Calibration:
    """Calibration with the processor seconds that manager and Redis used for a turn in the run; what they use while nothing happens
    stands apart."""
    turns = total(deltas(recording.reports, "rollout"))["turns"]
    waiting = {name: run.idle.get(name, 0.0) for name in ("manager", "redis")}
    control_s = sum(max(0.0, run.cpu_s[name] - idle * run.makespan_s) for name, idle in waiting.items())
    found = calibrate(recording, cores=cores, control_s=control_s / max(1.0, turns), name=run.workload)
    return msgspec.structs.replace(found, machine=msgspec.structs.replace(found.machine, idle=sum(waiting.values())))


def predictions(runs: Iterable[Measured], folder: Path, cores: int | None) -> Mapping[Key, PolicyRun]:
    """Simulated runs of every workload whose telemetry was kept."""
    found: dict[Key, PolicyRun] = {}
    runs = list(runs)
    for workload in dict.fromkeys(run.workload for run in runs):
        own = [run for run in runs if run.workload == workload]
        kept = [run for run in own if recording_file(folder, run).exists()]
        if not kept:
            continue
        calibrations: dict[int, Calibration] = {}
        smallest = min(kept, key=lambda run: run.n)
        for run in own:
            policy = parse_policy(run.policy)
            at_once = 1 if policy.one_job else run.n
            base = max((base for base in kept if base.n <= at_once), key=lambda base: base.n, default=smallest)
            if base.n not in calibrations:
                calibrations[base.n] = calibration_of(read_recording(recording_file(folder, base)), base, cores)
            found[key_of(run)] = simulate(calibrations[base.n], policy=policy, num_jobs=run.n).figures(workload)
    return found
