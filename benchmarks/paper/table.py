"""The figures as tables, and the goals."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks._report import Goal, number
from benchmarks.paper.predict import Key, key_of
from benchmarks.paper.results import Measured
from manager_service.scheduling.policies import POLICIES
from simulator.calibration import PolicyRun

ERROR = 0.15
GOAL_JOBS = 32
"""Number of jobs for which the goals are set."""
NOISE = 0.2
"""Cores that others may use before a run says little."""
TIME_COLUMNS = (
    "run", "makespan s", "simul.", "err. %", "tokens/s", "steps/s", "TTFS s", "p95",
    "TPTS s", "p95", "Jain", "slowed", "worst",
)  # fmt: skip
ENGINE_COLUMNS = (
    "run", "rollout %", "useful", "trainer %", "useful", "idle %", "bottleneck %", "no core s", "others", "control s",
    "wasted",
)  # fmt: skip
LEGEND = {
    "(sum)": "`sequential` is not run for every N: there it is the sum of a measured run of fewer jobs",
    "simul.": "the makespan that `simulator` predicts; `err. %` is how far it is from the measured one",
    "TTFS": "from submission to the job's first turn at the rollout engine, mean",
    "TPTS": "from version to version, mean",
    "slowed": "a job's turnaround over that of the same job alone, mean",
    "worst": "the largest of these over that mean",
    "rollout %": "processor seconds in which the engine computes: forwards, sampling; `trainer %`: forwards, backwards, optimiser",
    "useful": "of them, for neither padding nor tokens that never ended in `trained`",
    "idle %": "share of both engines' time in which they do not compute, waiting for a core included",
    "bottleneck %": "useful share of the busier engine in the time in which it was not waiting for a core",
    "no core s": "seconds in which the engines' threads were ready, and others had the cores",
    "others": "cores that everybody else used meanwhile, in the mean: where it is not near 0, the run says little",
    "control s": "processor seconds of all processes beside computing",
    "wasted": "sampled tokens that were never trained",
}
"""Meaning of the columns."""
ORDER = list(POLICIES)


class Found:
    """Runs by workload, policy and N."""

    def __init__(self, runs: Iterable[Measured]) -> None:
        self.runs = {key_of(run): run for run in sorted(runs, key=_place)}

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _, _ in self.runs))

    def get(self, workload: str, policy: str, n: int) -> Measured | None:
        return self.runs.get((workload, policy, n))

    def alone(self, run: Measured) -> Measured | None:
        """The same job alone, under the same policy."""
        return self.get(run.workload, run.policy, 1)

    def duty(self, workload: str) -> float | None:
        """The trainer's busy share of the single-job baseline, in percent."""
        single = self.get(workload, "sequential", 1)
        return single and 100 * single.trainer_busy


def _place(run: Measured) -> tuple[str, int, int]:
    return run.workload, ORDER.index(run.policy), run.n


def named(run: Measured) -> str:
    return f"{run.workload} {run.policy} {run.n}" + (" (sum)" if run.kind == "summed" else "")


def time_lines(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = []
    for key, run in found.runs.items():
        simulated, alone = predicted.get(key), found.alone(run)
        slow = run.slowdowns(alone) if alone else None
        mean = sum(slow) / len(slow) if slow else None
        lines.append(
            (
                named(run), run.makespan_s, simulated and simulated.makespan_s,
                simulated and 100 * (simulated.makespan_s / run.makespan_s - 1), run.tokens_per_s, run.steps_per_s,
                run.ttfs_s.mean, run.ttfs_s.p95, run.tpts_s.mean, run.tpts_s.p95, run.jain,
                mean, max(slow) / mean if slow and mean else None,
            )
        )  # fmt: skip
    return lines


def engine_lines(found: Found) -> list[tuple[Any, ...]]:
    def percent(seconds: float, run: Measured) -> float:
        return 100 * seconds / run.makespan_s

    return [
        (
            named(run), percent(run.rollout.busy_s, run), percent(run.rollout.useful_s, run),
            percent(run.trainer.busy_s, run), percent(run.trainer.useful_s, run), 100 * run.idle,
            100 * run.bottleneck_useful, run.rollout.core_wait_s + run.trainer.core_wait_s, run.others, run.control_s,
            float(run.wasted_tokens),
        )
        for run in found.runs.values()
    ]  # fmt: skip


def duties(found: Found) -> list[tuple[Any, ...]]:
    """The trainer's busy share of one job alone, and the most by which any schedule's makespan can be lower."""
    both = [(workload, found.duty(workload)) for workload in found.workloads]
    return [(workload, duty, 100 - duty) for workload, duty in both if duty is not None]


def legend() -> list[str]:
    """A line for each column that does not explain itself."""
    return [f"    {column:<14}{meaning}" for column, meaning in LEGEND.items()]


def notes(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[str]:
    """Lines beneath the tables: the meaning of the columns, and how far the figures can be trusted."""
    result = [f"[dim]{line}[/]" for line in legend()]
    noisiest = max((run for run in found.runs.values() if run.kind == "measured"), key=lambda run: run.others)
    if noisiest.others > NOISE:
        result.append(
            f"[yellow]warning[/]  others used up to {number(noisiest.others)} cores ({named(noisiest)}): figures of such runs "
            "say little; measure on a quiet machine"
        )
    both = near(found, predicted)
    if both:
        result.append(f"simulator: {sum(both)} of {len(both)} makespans within {100 * ERROR:g} % of the measured")
    result += [
        f"{named(run)}: first answers after {number(statistics.median(answers))} s (median), {number(answers[-1])} s (longest)"
        for run in judged(found)
        if (answers := run.until_answers_s)
    ]
    if not judged(found):
        result.append(f"the goals are for N = {GOAL_JOBS} under marlaas, which was not run: `make bench-paper` runs it")
    return result


def judged(found: Found) -> list[Measured]:
    """The runs that the goals are for."""
    runs = [found.get(workload, "marlaas", GOAL_JOBS) for workload in found.workloads]
    return [run for run in runs if run is not None]


def goals(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[Goal]:
    runs = judged(found)
    result: list[Goal] = []
    for run in runs:
        result += own_goals(found, run)
        result += against_sequential(run, found.get(run.workload, "sequential", run.n))
        result += against_synchronous(run, found.get(run.workload, "synchronous", run.n))
    both = near(found, predicted)
    if runs and both:
        what = f"simulated makespans within {100 * ERROR:g} % of the measured"
        result.append(Goal(what, 100 * sum(both) / len(both), 100, " %"))
    return result


def own_goals(found: Found, run: Measured) -> list[Goal]:
    what, bottleneck = f"{run.workload}, N = {run.n}", run.bottleneck
    result = [
        Goal(f"{what}: the bottleneck's useful share", 100 * run.bottleneck_useful, 90, " %"),
        Goal(f"{what}: makespan over the bottleneck's work", run.makespan_s / bottleneck.busy_s, 1.15, more_is_better=False),
        Goal(f"{what}: Jain's index", run.jain, 0.95),
    ]  # fmt: skip
    if run.workload == "single" and (tokens := run.until_tokens_s):
        since = f"{what}: from submission to a job's first token"
        result += [
            Goal(f"{since}, median", statistics.median(tokens), 0.4, " s", more_is_better=False),
            Goal(f"{since}, longest", tokens[-1], 0.8, " s", more_is_better=False),
        ]
    alone = found.alone(run)
    if alone is not None:
        slow = run.slowdowns(alone)
        ttfs = run.ttfs_s.mean / alone.ttfs_s.mean
        result += [
            Goal(f"{what}: TTFS over that of N = 1", ttfs, 2, more_is_better=False),
            Goal(f"{what}: worst slowdown over the mean", max(slow) * len(slow) / sum(slow), 1.5, more_is_better=False),
        ]
    return result


def against_sequential(run: Measured, other: Measured | None) -> list[Goal]:
    if other is None or run.workload != "agentic":
        return []
    what = f"{run.workload}, N = {run.n}, against sequential"
    return [
        Goal(f"{what}: makespan lower by", 100 * (1 - run.makespan_s / other.makespan_s), 85, " %"),
        Goal(f"{what}: useful share of the engines", run.useful / other.useful, 4.3, " x"),
    ]


def against_synchronous(run: Measured, other: Measured | None) -> list[Goal]:
    if other is None:
        return []
    what = f"{run.workload}, N = {run.n}, against synchronous"
    tpts = Goal(f"{what}: mean TPTS", run.tpts_s.mean / other.tpts_s.mean, 1, " x", more_is_better=False)
    if run.workload == "single":
        return [tpts]
    return [tpts, Goal(f"{what}: makespan lower by", 100 * (1 - run.makespan_s / other.makespan_s), 30, " %")]


def near(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[bool]:
    """True for each simulated makespan that is near the measured one."""
    both = [(run, predicted[key]) for key, run in found.runs.items() if key in predicted]
    return [abs(simulated.makespan_s / run.makespan_s - 1) <= ERROR for run, simulated in both]
