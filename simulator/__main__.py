"""Predicts what a run takes: the owner's own decisions under a virtual clock, with measured service times.

    python -m simulator --calibration calibration.json [--policy marlaas,synchronous] [--n 1,2,4,8,16,32]
                                  [--measured DIR] [--rollout 200 --env 200 --trainer 100] [--tenants 500]
    python -m simulator --calibration simulator/assumed_8b.json --policy marlaas --n 32 --rollout 200 --env 50 --trainer 32 --steps 3 \
                                  --set adapter_bytes=7e8 --with relay=true    # how long a version takes to reach all workers
    python -m simulator --calibration simulator/assumed_8b.json --policy marlaas --n 32 --rollout 64 \
                                  --with least_rollout=1 --with least_rollout=1 repack=true    # a pool that follows its turns

Prints one line for each policy and N, and again for each `--with`; on stderr how far it is. `--set` and `--with` change fields of `Size`,
which simulator/calibration.py explains: deaths, LoRA slots, own streams, links, pools. With `--measured`, a folder of measured runs
(`run-*.json`, see `simulator.calibration.PolicyRun`), the measured makespan stands next to the simulated one. The goal is 15 %.

The second table is of the rollout workers: trained tokens for each second of a worker that is held, seconds held, later turns that met
their keys and values, and the time from a version's announcement until the last worker that loads it ahead has it.
assumed_8b.json is not measured: a base of 8B on a GPU for each worker, 64 answers of 500 tokens (median; sigma 1) a step.
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
from simulator.calibration import Calibration, PolicyRun, Size, read_calibration, read_runs
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
WORKERS_HEAD = ("run", "tokens/held s", "held s", "met %", "spread s", "p95", "versions/s")
SizeChanges = Sequence[tuple[str, Any]]
"""Fields of `Size`, and their values."""


def sized(calibration: Calibration, args: Any) -> Calibration:
    """The calibration with other numbers of workers, slots or steps, if they are given."""
    changes = {name: value for name in ("rollout", "env", "trainer") if (value := getattr(args, name))}
    steps = {"num_steps": args.steps} if args.steps else {}
    workload = msgspec.structs.replace(calibration.workload, **steps)
    return changed(msgspec.structs.replace(calibration, workload=workload), [*changes.items(), *args.set])


def changed(calibration: Calibration, settings: SizeChanges) -> Calibration:
    return msgspec.structs.replace(calibration, size=msgspec.structs.replace(calibration.size, **dict(settings)))


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


def setting(text: str) -> tuple[str, Any]:
    """A field of `Size` and its value, from `name=value`."""
    name, _, value = text.partition("=")
    if name not in Size.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with one of {', '.join(Size.__struct_fields__)}")
    try:
        return name, getattr(
            msgspec.convert({name: value.split(",") if name == "kills_s" else value}, Size, strict=False), name
        )
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


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
    for name in ("rollout", "env", "trainer"):
        result.add_argument(f"--{name}", type=positive, metavar="N", help="how many workers; default the calibration's")
    result.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help="of every line")
    result.add_argument(
        "--with", type=setting, nargs="+", action="append", default=[[]], metavar="NAME=VALUE", dest="variants",
        help="of further lines, one for each policy and N; may come several times",
    )  # fmt: skip
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
    workers: list[tuple[Any, ...]] = []
    goals: list[Goal] = []
    runs: list[PolicyRun] = []
    for policy, n, variant in itertools.product(policies, list[int](args.n), list[SizeChanges](args.variants)):
        name = " ".join([calibration.workload.name, policy, str(n), *(f"{field}={value}" for field, value in variant)])
        sys.stderr.write(f"{name} …\n")
        started = time.perf_counter()
        run = predict(changed(calibration, variant), policies[policy], n, args.tenants)
        real = matching(measured, run)
        runs.append(run)
        lines.append(line(name, run, real, time.perf_counter() - started))
        workers.append(workers_line(name, run))
        if real is not None:
            error = abs(run.makespan_s / real.makespan_s - 1)
            goals.append(Goal(f"error, {name}", 100 * error, 100 * GOAL, " %", more_is_better=False))
    tables = [make_table("Simulated", HEAD, lines), make_table("Rollout workers", WORKERS_HEAD, workers)]
    show(Report(tables, msgspec.to_builtins(runs), goals, notes), args.json)


if __name__ == "__main__":
    main()
