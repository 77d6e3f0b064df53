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
    "run", "makespan s", "simul.", "err. %", "tokens/s", "TTFS s", "p95", "TPTS s", "p95", "Jain", "slowed", "worst",
)  # fmt: skip
ENGINE_COLUMNS = ("run", "rollout %", "useful", "trainer %", "useful", "bottleneck %", "others", "control s", "wasted")
LEGEND = {
    "simul.": "the makespan that `simulator` predicts; `err. %` is how far it is from the measured one",
    "TTFS": "from submission to the job's first turn at the rollout engine, mean",
    "TPTS": "from version to version, mean",
    "slowed": "a job's turnaround over that of the same job alone, mean; `worst`: the largest of these over that mean",
    "rollout %": "processor seconds in which the engine computes, of the makespan; `useful`: of them, neither padding nor wasted",
    "bottleneck %": "useful share of the busier engine in the time in which it was not waiting for a core",
    "others": "cores that everybody else used meanwhile, in the mean: where it is not near 0, the run says little",
    "control s": "processor seconds of all processes beside computing",
    "wasted": "sampled tokens that were never trained",
}
"""Meaning of the columns."""
ORDER = list(POLICIES)


class Found:
    """Runs by workload, policy and N."""

    def __init__(self, runs: Iterable[Measured]) -> None:
        ordered = sorted(runs, key=lambda run: (run.workload, ORDER.index(run.policy), run.n))
        self.runs = {key_of(run): run for run in ordered}

    def get(self, workload: str, policy: str, n: int) -> Measured | None:
        return self.runs.get((workload, policy, n))

    def alone(self, run: Measured) -> Measured | None:
        """The same job alone, under the same policy."""
        return self.get(run.workload, run.policy, 1)

    @property
    def judged(self) -> list[Measured]:
        """The runs that the goals are for."""
        return [run for run in self.runs.values() if (run.policy, run.n) == ("marlaas", GOAL_JOBS)]


def named(run: Measured) -> str:
    return f"{run.workload} {run.policy} {run.n}"


def time_line(found: Found, run: Measured, simulated: PolicyRun | None) -> tuple[Any, ...]:
    alone = found.alone(run)
    slow = run.slowdowns(alone) if alone else None
    mean = statistics.mean(slow) if slow else None
    return (
        named(run), run.makespan_s, simulated and simulated.makespan_s,
        simulated and 100 * (simulated.makespan_s / run.makespan_s - 1), run.tokens_per_s,
        run.ttfs_s.mean, run.ttfs_s.p95, run.tpts_s.mean, run.tpts_s.p95, run.jain,
        mean, max(slow) / mean if slow and mean else None,
    )  # fmt: skip


def engine_line(run: Measured) -> tuple[Any, ...]:
    seconds = (run.rollout.busy_s, run.rollout.useful_s, run.trainer.busy_s, run.trainer.useful_s)
    shares = [100 * each / run.makespan_s for each in seconds]
    return (named(run), *shares, 100 * run.bottleneck_useful, run.others, run.control_s, float(run.wasted_tokens))


def legend() -> list[str]:
    """A line for each column that does not explain itself."""
    return [f"    {column:<14}{meaning}" for column, meaning in LEGEND.items()]


def notes(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[str]:
    """Lines beneath the tables: the meaning of the columns, and how far the figures can be trusted."""
    result = [f"[dim]{line}[/]" for line in legend()]
    noisiest = max(found.runs.values(), key=lambda run: run.others)
    if noisiest.others > NOISE:
        result.append(
            f"[yellow]warning[/]  others used up to {number(noisiest.others)} cores ({named(noisiest)}): figures of such runs "
            "say little; measure on a quiet machine"
        )
    if both := near(found, predicted):
        result.append(f"simulator: {sum(both)} of {len(both)} makespans within {100 * ERROR:g} % of the measured")
    if not found.judged:
        result.append(f"the goals are for N = {GOAL_JOBS} under marlaas, which was not run: `make bench-paper` runs it")
    return result


def near(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[bool]:
    """True for each simulated makespan that is near the measured one."""
    both = [(run, predicted[key]) for key, run in found.runs.items() if key in predicted]
    return [abs(simulated.makespan_s / run.makespan_s - 1) <= ERROR for run, simulated in both]


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals(found: Found, predicted: Mapping[Key, PolicyRun]) -> list[Goal]:
    result: list[Goal] = []
    for run in found.judged:
        result += own_goals(found, run)
        if run.workload == "agentic" and (one := found.get(run.workload, "sequential", 1)):
            lower = 100 * (1 - run.makespan_s / (run.n * one.makespan_s))
            result.append(Goal("agentic: makespan lower than of as many jobs in turn by", lower, 85, " %"))
            result.append(Goal("agentic: useful share to that of a job alone", run.useful / one.useful, 4.3, " x"))
        if other := found.get(run.workload, "synchronous", run.n):
            tpts = run.tpts_s.mean / other.tpts_s.mean
            result.append(Goal(f"{run.workload}: mean TPTS to synchronous'", tpts, 1, " x", more_is_better=False))
            if run.workload != "single":
                lower = 100 * (1 - run.makespan_s / other.makespan_s)
                result.append(Goal(f"{run.workload}: makespan lower than synchronous by", lower, 30, " %"))
    both = near(found, predicted)
    if found.judged and both:
        what = f"simulated makespans within {100 * ERROR:g} % of the measured"
        result.append(Goal(what, 100 * sum(both) / len(both), 100, " %"))
    return result


def own_goals(found: Found, run: Measured) -> list[Goal]:
    what, over = f"{run.workload}, N = {run.n}", run.makespan_s / run.bottleneck.busy_s
    result = [
        Goal(f"{what}: the bottleneck's useful share", 100 * run.bottleneck_useful, 90, " %"),
        Goal(f"{what}: makespan over the bottleneck's work", over, 1.15, more_is_better=False),
        Goal(f"{what}: Jain's index", run.jain, 0.95),
    ]
    if run.workload == "single" and (tokens := run.until_tokens_s):
        since = f"{what}: from submission to a job's first token"
        result.append(Goal(f"{since}, median", statistics.median(tokens), 0.4, " s", more_is_better=False))
        result.append(Goal(f"{since}, longest", tokens[-1], 0.8, " s", more_is_better=False))
    if alone := found.alone(run):
        slow, ttfs = run.slowdowns(alone), run.ttfs_s.mean / alone.ttfs_s.mean
        worst = max(slow) / statistics.mean(slow)
        result.append(Goal(f"{what}: TTFS over that of N = 1", ttfs, 2, more_is_better=False))
        result.append(Goal(f"{what}: worst slowdown over the mean", worst, 1.5, more_is_better=False))
    return result
