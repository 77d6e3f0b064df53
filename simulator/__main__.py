"""Predicts what a run takes: the owner's own decisions under a virtual clock, with measured service times.

    python -m simulator --calibration calibration.json [--policy marlaas,synchronous] [--n 1,2,4,8,16,32]
                                  [--measured DIR] [--rollout 200 --env 200 --trainer 100] [--tenants 500] [--out DIR]
    python -m simulator --calibration simulator/assumed_8b.json --policy marlaas --n 32 --steps 3 --rollout 200 --env 50 --trainer 32 \
                                  --adapter-mb 700 --weights store,relay    # how long a new version takes to reach all workers
    python -m simulator --calibration simulator/assumed_8b.json --policy marlaas --n 32 --rollout 64 --least 1 --pool fixed,empty,repack

Prints one line for each policy and N, and on stderr how far it is. With `--measured`, a folder of measured runs (`run-*.json`, see
`simulator.calibration.PolicyRun`), the measured makespan stands next to the simulated one. The goal is 15 %.

The second table is of the rollout workers: trained tokens for each second of a worker that is held, seconds held, later turns that met
their keys and values, and the time from a version's announcement until the last worker that loads it ahead has it.
assumed_8b.json is not measured: a base of 8B on an H100 each, 64 answers of 500 tokens (median; sigma 1) a step.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from manager_service.scheduling.policies import POLICIES, Policy, parse_policy
from simulator.calibration import Calibration, PolicyRun, Size, read_calibration, read_runs, write
from simulator.report import Goal, Report, above_zero, make_table, parser, positive, show
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
WORKERS_HEAD = ("run", "tokens/held s", "held s", "met %", "spread s", "p95", "versions/s")
SIZES = ("rollout", "env", "trainer", "trainer_slots", "rollout_slots", "lora_slots", "start_s", "lease_s", "kills_s", "own_streams")
WEIGHTS = {"store": {"relay": False}, "relay": {"relay": True}}
"""How versions reach workers: each reads the store, or they pass them on."""
POOLS = {"fixed": {"least_rollout": 0}, "empty": {"repack": False}, "repack": {"repack": True}}
"""Rollout workers: always all; those that turns want, and only empty ones stop; any stops whose rows the others can hold."""


class Case(NamedTuple):
    """One line of the tables."""

    policy: str
    n: int
    weights: str
    pool: str

    @property
    def is_special(self) -> bool:
        return (self.weights, self.pool) != ("store", "fixed")

    def of(self, size: Size) -> Size:
        return msgspec.structs.replace(size, **WEIGHTS[self.weights], **POOLS[self.pool])


def sized(calibration: Calibration, args: Any) -> Calibration:
    """The calibration with other numbers of workers, slots or steps, or another way of working, if they are given."""
    changes = {name: value for name in SIZES if (value := getattr(args, name))}
    for name in ("adapter", "store", "link"):
        if megabytes := getattr(args, f"{name}_mb"):
            changes[f"{name}_bytes" if name == "adapter" else f"{name}_bytes_per_s"] = 1e6 * megabytes
    size = msgspec.structs.replace(calibration.size, least_rollout=args.least, **changes)
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


def line(name: str, run: PolicyRun, measured: PolicyRun | None, took_s: float) -> tuple[Any, ...]:
    error = None if measured is None else 100 * (run.makespan_s / measured.makespan_s - 1)
    values = (value(run) for value in COLUMNS.values())
    return (name, *values, measured and measured.makespan_s, error, took_s)


def workers_line(name: str, run: PolicyRun) -> tuple[Any, ...]:
    spread = (run.spread_s.mean, run.spread_s.p95) if run.spread_s else (None, None)
    return (name, run.tokens_per_held_s, run.held_s, 100 * run.met, *spread, run.steps_per_s)


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


def times(text: str) -> tuple[float, ...]:
    """Seconds of an option, comma-separated."""
    return tuple(map(above_zero, text.split(",")))


def chosen(names: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Reads some of these names, comma-separated."""

    def read(text: str) -> list[str]:
        if wrong := [part for part in text.split(",") if part not in names]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(names)}")
        return text.split(",")

    return read


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
    _add_workers(result.add_argument_group("rollout workers"))
    return result


def _add_workers(group: Any) -> None:
    group.add_argument("--rollout-slots", type=positive, metavar="N", help="of each; default the calibration's")
    group.add_argument("--lora-slots", type=positive, metavar="N", help="adapters that each computes at once; default all")
    group.add_argument("--own-streams", action="store_true", help="later turns go back to who has their keys and values")
    group.add_argument("--start-s", type=above_zero, metavar="S", help="until a new worker reads; default 0")
    group.add_argument("--kills-s", type=times, metavar="S", help="times at which one is killed, comma-separated")
    group.add_argument("--lease-s", type=above_zero, metavar="S", help="until others have its turns; default 10")
    group.add_argument("--weights", type=chosen(WEIGHTS), default="store", help="store, relay or both; default %(default)s")
    group.add_argument("--adapter-mb", type=above_zero, metavar="MB", help="of a version; default 0: nothing travels")
    group.add_argument("--store-mb", type=above_zero, metavar="MB", help="a second, of the store; default 80")
    group.add_argument("--link-mb", type=above_zero, metavar="MB", help="a second, of each worker; default 20")
    group.add_argument("--pool", type=chosen(POOLS), default="fixed", help="some of fixed,empty,repack; default %(default)s")
    group.add_argument("--least", type=positive, default=1, metavar="N", help="workers of a pool; default %(default)s")


def cases(args: Any) -> list[Case]:
    return list(itertools.starmap(Case, itertools.product(str(args.policy).split(","), args.n, args.weights, args.pool)))


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
    workers: list[tuple[Any, ...]] = []
    goals: list[Goal] = []
    runs: list[PolicyRun] = []
    for case in cases(args):
        name = f"{case.policy} {case.n}" + (f" {case.weights} {case.pool}" if case.is_special else "")
        sys.stderr.write(f"{name} …\n")
        started = time.perf_counter()
        changed = msgspec.structs.replace(calibration, size=case.of(calibration.size))
        run = predict(changed, policies[case.policy], case.n, args.tenants)
        real = matching(measured, run)
        runs.append(run)
        lines.append(line(name, run, real, time.perf_counter() - started))
        workers.append(workers_line(name, run))
        if real is not None:
            error = abs(run.makespan_s / real.makespan_s - 1)
            goals.append(Goal(f"error, {name}", 100 * error, 100 * GOAL, " %", more_is_better=False))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            write(run, args.out / f"run-{run.workload}-{name.replace(' ', '-')}-simulated.json")
    tables = [make_table("Simulated", HEAD, lines), make_table("Rollout workers", WORKERS_HEAD, workers)]
    show(Report(tables, msgspec.to_builtins(runs), goals, notes), args.json)


if __name__ == "__main__":
    main()
