"""The figures as tables, and the goals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks._report import Goal
from benchmarks.paper.predict import Key, key_of
from benchmarks.paper.results import Measured
from benchmarks.simulator.calibration import Run
from manager_service.policies import POLICIES

ERROR = 0.15
TIME_COLUMNS = (
    "run", "makespan s", "simul.", "err. %", "tokens/s", "steps/s", "TTFS s", "p95",
    "TPTS s", "p95", "Jain", "slowed", "worst",
)  # fmt: skip
ENGINE_COLUMNS = (
    "run", "rollout %", "useful", "trainer %", "useful", "idle %", "bottleneck %", "no core s", "others", "control s",
    "wasted",
)  # fmt: skip
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

    def largest(self, workload: str, policy: str) -> int:
        """Its largest N; 0: it did not run."""
        return max((n for w, p, n in self.runs if (w, p) == (workload, policy)), default=0)

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


def time_lines(found: Found, predicted: Mapping[Key, Run]) -> list[tuple[Any, ...]]:
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
    """The trainer's busy share of one job alone, one after another, and what any schedule's makespan is lower by at most."""
    both = [(workload, found.duty(workload)) for workload in found.workloads]
    return [(workload, duty, 100 - duty) for workload, duty in both if duty is not None]


def goals(found: Found, predicted: Mapping[Key, Run]) -> list[Goal]:
    result: list[Goal] = []
    for workload in found.workloads:
        n = found.largest(workload, "marlaas")
        run = found.get(workload, "marlaas", n)
        if run is not None and n > 1:
            result += own_goals(found, run)
            result += against_sequential(run, found.get(workload, "sequential", n))
            result += against_synchronous(run, found.get(workload, "synchronous", n))
    return result + errors(found, predicted)


def own_goals(found: Found, run: Measured) -> list[Goal]:
    what, bottleneck = f"{run.workload}, N = {run.n}", run.bottleneck
    result = [
        Goal(f"{what}: the bottleneck's useful share", 100 * run.bottleneck_useful, 90, " %"),
        Goal(f"{what}: makespan over the bottleneck's work", run.makespan_s / bottleneck.busy_s, 1.15, more_is_better=False),
        Goal(f"{what}: Jain's index", run.jain, 0.95),
    ]  # fmt: skip
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


def errors(found: Found, predicted: Mapping[Key, Run]) -> Sequence[Goal]:
    """How many of the simulator's makespans are near the measured ones."""
    both = [(run, predicted[key]) for key, run in found.runs.items() if key in predicted]
    near = [1.0 for run, simulated in both if abs(simulated.makespan_s / run.makespan_s - 1) <= ERROR]
    if not both:
        return []
    return [
        Goal(f"simulated makespans within {100 * ERROR:g} % of the measured", 100 * len(near) / len(both), 100, " %")
    ]
