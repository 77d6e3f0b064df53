"""The figures as a table, and the goals. Columns:

simul.     the makespan that `simulator` predicts
TTFS       from submission to the job's first turn at the rollout engine, mean; TPTS: from version to version, mean
slowed     a job's turnaround over that of the same job alone, mean; worst: the largest of these over that mean
rollout %  share of the makespan in which the engine computes, by processor seconds; trainer %: in which the trainer does
control s  processor seconds of all processes beside computing
wasted     sampled tokens that were never trained
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks._report import Goal
from benchmarks.paper.results import Key, Measured, key_of
from manager_service.scheduling.policies import POLICIES
from simulator.calibration import PolicyRun

ERROR = 0.15
GOAL_JOBS = 32
"""Number of jobs for which the goals are set."""
COLUMNS = (
    "run", "makespan s", "simul.", "tokens/s", "TTFS s", "p95", "TPTS s", "p95", "Jain", "slowed", "worst",
    "rollout %", "trainer %", "control s", "wasted",
)  # fmt: skip


class Found:
    """Runs by workload, policy and N."""

    def __init__(self, runs: Iterable[Measured]) -> None:
        order = list(POLICIES)
        ordered = sorted(runs, key=lambda run: (run.workload, order.index(run.policy), run.n))
        self.runs = {key_of(run): run for run in ordered}

    def alone(self, run: Measured) -> Measured | None:
        """The same job alone, under the same policy."""
        return self.runs.get((run.workload, run.policy, 1))

    @property
    def judged(self) -> list[Measured]:
        """The runs that the goals are for."""
        return [run for run in self.runs.values() if (run.policy, run.n) == ("marlaas", GOAL_JOBS)]


def line(found: Found, run: Measured, simulated: PolicyRun | None) -> tuple[Any, ...]:
    slow = run.slowdowns(alone) if (alone := found.alone(run)) else None
    mean = statistics.mean(slow) if slow else None
    return (
        f"{run.workload} {run.policy} {run.n}", run.makespan_s, simulated and simulated.makespan_s, run.tokens_per_s,
        run.ttfs_s.mean, run.ttfs_s.p95, run.tpts_s.mean, run.tpts_s.p95, run.jain,
        mean, max(slow) / mean if slow and mean else None,
        100 * run.rollout_busy, 100 * run.trainer_busy, run.control_s, float(run.wasted_tokens),
    )  # fmt: skip


def notes(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[str]:
    """Lines beneath the table."""
    both = near(found, predicted)
    result = [f"simulator: {sum(both)} of {len(both)} makespans within {100 * ERROR:g} % of the measured"]
    if not found.judged:
        result.append(f"the goals are for N = {GOAL_JOBS} under marlaas, which was not run: `make bench-paper` runs it")
    return result


def near(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[bool]:
    """True for each simulated makespan that is near the measured one."""
    both = [(run, predicted[key]) for key, run in found.runs.items() if key in predicted]
    return [abs(simulated.makespan_s / run.makespan_s - 1) <= ERROR for run, simulated in both]


def goals(found: Found) -> list[Goal]:
    result: list[Goal] = []
    for run in found.judged:
        what = f"{run.workload}, N = {run.n}"
        result.append(Goal(f"{what}: Jain's index", run.jain, 0.99))
        uneven = run.tpts_s.p95 / run.tpts_s.mean
        result.append(Goal(f"{what}: p95 of a step over its mean", uneven, 2, more_is_better=False))
        if alone := found.alone(run):
            slow, ttfs = run.slowdowns(alone), run.ttfs_s.mean / alone.ttfs_s.mean
            worst = max(slow) / statistics.mean(slow)
            result.append(Goal(f"{what}: TTFS over that of N = 1", ttfs, 2, more_is_better=False))
            result.append(Goal(f"{what}: worst slowdown over the mean", worst, 1.1, more_is_better=False))
        if run.workload == "agentic" and (one := found.runs.get((run.workload, "sequential", 1))):
            lower = 100 * (1 - run.makespan_s / (run.n * one.makespan_s))
            result.append(Goal(f"{what}: makespan lower than of as many jobs in turn by", lower, 85, " %"))
            result.append(Goal(f"{what}: busy share of the engines to a job's alone", run.busy / one.busy, 4.3, " x"))
        if other := found.runs.get((run.workload, "synchronous", run.n)):
            tpts = run.tpts_s.mean / other.tpts_s.mean
            result.append(Goal(f"{what}: mean TPTS to synchronous'", tpts, 1, " x", more_is_better=False))
            if run.workload != "single":
                lower = 100 * (1 - run.makespan_s / other.makespan_s)
                result.append(Goal(f"{what}: makespan lower than synchronous by", lower, 30, " %"))
    return result
