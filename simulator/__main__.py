"""Predicts what a run takes: the owner's own decisions under a virtual clock, with measured service times.

    python -m simulator --calibration calibration.json [--policy marlaas,synchronous] [--n 1,2,4,8,16,32]
                                  [--measured DIR] [--rollout 200 --env 200 --trainer 100] [--tenants 500] [--out DIR]

Prints one line for each policy and N, and on stderr how far it is. With `--measured`, a folder of measured runs (`run-*.json`, see
`simulator.calibration.PolicyRun`), the measured makespan stands next to the simulated one. The goal is 15 %.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manager_service.scheduling.policies import POLICIES, Policy, parse_policy
from simulator.calibration import Calibration, PolicyRun, read_calibration, read_runs, write
from simulator.report import Goal, Report, make_table, parser, positive, show
from simulator.world import simulate

GOAL = 0.15
"""Relative error of the makespan."""
COLUMNS: Mapping[str, Callable[[PolicyRun], float]] = {
    "makespan s": lambda run: run.makespan_s,
    "tokens/s": lambda run: run.tokens_per_s,
    "steps/s": lambda run: run.steps_per_s,
    "rollout %": lambda run: 100 * run.rollout_busy,
    "trainer %": lambda run: 100 * run.trainer_busy,
    "TTFS s": lambda run: run.ttfs_s.mean,
    "TPTS s": lambda run: run.tpts_s.mean,
    "Jain": lambda run: run.jain,
}
HEAD = ("run", *COLUMNS, "measured s", "error %", "took s")


def sized(calibration: Calibration, args: Any) -> Calibration:
    """The calibration with other numbers of workers, slots or steps, if they are given."""
    changes = {name: value for name in ("rollout", "env", "trainer", "trainer_slots") if (value := getattr(args, name))}
    size = msgspec.structs.replace(calibration.size, **changes)
    steps = {"num_steps": args.steps} if args.steps else {}
    workload = msgspec.structs.replace(calibration.workload, **steps)
    return msgspec.structs.replace(calibration, size=size, workload=workload)


def predict(calibration: Calibration, policy: Policy, n: int, tenants: int | None) -> PolicyRun:
    world = simulate(
        calibration,
        policy=policy,
        num_jobs=n,
        tenant_of=lambda number: f"tenant-{number % tenants if tenants else number}",
    )
    return world.figures(calibration.workload.name)


def matching(measured: list[PolicyRun], run: PolicyRun) -> PolicyRun | None:
    """The measured run of the same policy, workload, N and steps."""
    key = (run.policy, run.workload, run.n, run.steps)
    found = (m for m in measured if m.kind == "measured")
    return next((m for m in found if (m.policy, m.workload, m.n, m.steps) == key), None)


def line(run: PolicyRun, measured: PolicyRun | None, took_s: float) -> tuple[Any, ...]:
    error = None if measured is None else 100 * (run.makespan_s / measured.makespan_s - 1)
    values = (value(run) for value in COLUMNS.values())
    return (f"{run.workload} {run.policy} {run.n}", *values, measured and measured.makespan_s, error, took_s)


def absent(measured: Sequence[PolicyRun], folder: Path, workload: str) -> list[str]:
    """Reason why nothing measured stands next to the simulated runs."""
    names = sorted({run.workload for run in measured})
    if not names or workload in names:
        return []
    return [
        f"{folder} has no run of the workload {workload!r}, only of {', '.join(names)}: `--name` of "
        "simulator.calibrate sets the name in a calibration"
    ]


def numbers(text: str) -> list[int]:
    """Numbers of an option, comma-separated."""
    return [positive(part) for part in text.split(",")]


def options() -> argparse.ArgumentParser:
    result = parser(__doc__)
    result.add_argument("--calibration", type=Path, required=True, help="as simulator.calibrate writes it")
    result.add_argument("--measured", type=Path, metavar="DIR", help="of measured runs to compare with; default none")
    result.add_argument("--policy", default=",".join(POLICIES), help="comma-separated; default all: %(default)s")
    result.add_argument(
        "--n", type=numbers, default="1,2,4,8,16,32", help="numbers of jobs, comma-separated; default %(default)s"
    )
    result.add_argument("--tenants", type=positive, metavar="N", help="that share the jobs; default one for each job")
    result.add_argument("--steps", type=positive, metavar="N", help="of each job; default the calibration's")
    result.add_argument("--out", type=Path, metavar="DIR", help="write each run there, as run-*.json; default nowhere")
    for name in ("rollout", "env", "trainer"):
        result.add_argument(f"--{name}", type=positive, metavar="N", help="how many workers; default the calibration's")
    result.add_argument(
        "--trainer-slots", type=positive, metavar="N", help="steps that a trainer takes; default the calibration's"
    )
    return result


def main() -> None:
    args = options().parse_args()
    try:
        calibration = sized(read_calibration(args.calibration), args)
        measured = read_runs(args.measured, PolicyRun) if args.measured else []
        policies = {name: parse_policy(name) for name in str(args.policy).split(",")}
    except (OSError, ValueError) as error:
        sys.exit(f"simulate: {error}")
    notes = absent(measured, args.measured, calibration.workload.name)
    lines: list[tuple[Any, ...]] = []
    goals: list[Goal] = []
    runs: list[PolicyRun] = []
    for name, n in itertools.product(policies, list[int](args.n)):
        sys.stderr.write(f"{name}, N = {n} …\n")
        started = time.perf_counter()
        run = predict(calibration, policies[name], n, args.tenants)
        real = matching(measured, run)
        runs.append(run)
        lines.append(line(run, real, time.perf_counter() - started))
        if real is not None:
            error = abs(run.makespan_s / real.makespan_s - 1)
            goals.append(Goal(f"error, {name} {n}", 100 * error, 100 * GOAL, " %", more_is_better=False))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            write(run, args.out / f"run-{run.workload}-{name}-{n}-simulated.json")
    show(Report([make_table("Simulated", HEAD, lines)], msgspec.to_builtins(runs), goals, notes), args.json)


if __name__ == "__main__":
    main()
