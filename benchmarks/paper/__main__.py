"""Measures the figures of the MARLaaS paper: N jobs of different tenants, under each scheduling policy, on three workloads.

    make bench-paper                                          # the whole, up to an hour
    python -m benchmarks.paper --quick                        # N = 1 and 4, three policies, about five minutes
    python -m benchmarks.paper --jobs 1 8 --policies marlaas synchronous --workloads agentic --out FOLDER
    python -m benchmarks.paper --show FOLDER                  # tables, goals and pictures of results that are there already

One rollout worker and one trainer of one thread each, one env worker; engine, batching, training queue and concurrent tools are
the same under every policy. For each N the policies take turns, so that a change of the machine's load meets all of them.
Each run writes FOLDER/run-WORKLOAD-POLICY-N.json; figures as PNG beside them.

What the columns mean is printed beneath the tables. `simul.` is what `simulator` predicts, calibrated for each N on the
telemetry of the `marlaas` run of as many jobs, at most 8.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks._report import Report, console, empty, make_table, natural, positive, show, sweep_parser, write_json
from benchmarks.paper import table
from benchmarks.paper.measure import measure
from benchmarks.paper.predict import calibrates, predictions, recording_file
from benchmarks.paper.results import read, with_sums
from benchmarks.paper.workloads import WORKLOADS, Workload
from manager_service.scheduling.policies import POLICIES
from simulator.fit import write_recording

OUT = Path(".paper")
FULL, QUICK = (1, 2, 4, 8, 16, 32), (1, 4)
QUICK_POLICIES = ("sequential", "synchronous", "marlaas")
STEPS = 5
ONE_BY_ONE = {"single": (1, 4, 32), "agentic": (1, 4), "tail": (1, 4, 32)}
"""Number of jobs at which `sequential` is measured; its other values are sums."""


def plan(
    numbers: Sequence[int], policies: Sequence[str], workloads: Sequence[str], *, quick: bool = False
) -> Iterator[tuple[Workload, str, int]]:
    """Runs, in order."""
    for workload in workloads:
        for n in numbers:
            for policy in policies:
                if policy == "sequential" and (n not in ONE_BY_ONE[workload] or (quick and n > 1)):
                    continue
                yield WORKLOADS[workload], policy, n


def run(workload: Workload, policy: str, n: int, steps: int, folder: Path) -> None:
    found, recording = asyncio.run(measure(workload, policy, n, steps))
    write_json(found, folder / f"run-{workload.name}-{policy}-{n}.json")
    if calibrates(policy, n):
        write_recording(recording, recording_file(folder, found))


def report(folder: Path, cores: int | None, to: Path | None) -> None:
    try:
        measured = read(folder)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    runs = with_sums(measured, sorted({run.n for run in measured}))
    found, predicted = table.Found(runs), predictions(runs, folder, cores)
    tables = [
        make_table("Time", table.TIME_COLUMNS, table.time_lines(found, predicted)),
        make_table("Engines: shares of the makespan", table.ENGINE_COLUMNS, table.engine_lines(found)),
        make_table(
            "The single-job baseline", ("workload", "trainer's duty %", "limit of the reduction %"), table.duties(found)
        ),
    ]
    for each in tables:
        each.columns[0].no_wrap = True
    goals, notes = table.goals(found, predicted), table.notes(found, predicted)
    show(Report(tables, msgspec.to_builtins(runs), goals, notes), to)
    from benchmarks.paper import figures  # here: matplotlib takes a second, which those who draw nothing do without

    for path in figures.write(runs, folder):
        console.print(str(path))


def options() -> argparse.Namespace:
    given = sweep_parser("\n".join([__doc__ or "", *table.legend()]), OUT, "N = 1 and 4, three policies")
    given.add_argument("--jobs", type=positive, nargs="+", metavar="N", help="default: 1 2 4 8 16 32")
    given.add_argument("--policies", nargs="+", choices=list(POLICIES))
    given.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given.add_argument("--steps", type=positive, default=STEPS, help=f"of each job; default {STEPS}")
    given.add_argument(
        "--cores", type=natural, default=os.cpu_count(), help="for the simulator; see simulator.calibrate"
    )
    return given.parse_args()


def main() -> None:
    given = options()
    out = given.show or given.out or OUT
    numbers = given.jobs or (QUICK if given.quick else FULL)
    policies = given.policies or (QUICK_POLICIES if given.quick else list(POLICIES))
    if given.show is None:
        empty(out, "run-*.json", "telemetry-*.msgpack", "figure-*.png")
        for workload, policy, n in plan(numbers, policies, given.workloads, quick=given.quick):
            console.print(f"{workload.name}, {policy}, N = {n} …")
            run(workload, policy, n, given.steps, out)
    report(out, given.cores or None, given.json)


if __name__ == "__main__":
    main()
