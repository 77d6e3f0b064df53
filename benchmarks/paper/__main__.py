"""The figures of the MARLaaS paper: N jobs of different tenants, under each scheduling policy, on three workloads.

    make bench-paper                                          # the whole, up to an hour
    python -m benchmarks.paper --quick                        # N = 1 and 4, three policies, about five minutes
    python -m benchmarks.paper --jobs 1 8 --policies marlaas synchronous --workloads agentic --out FOLDER
    python -m benchmarks.paper --show FOLDER                  # tables, goals and pictures of results that are there already

One rollout worker and one trainer of one thread each, one env worker; engine, batching, training queue and concurrent tools are
the same under every policy. For each N the policies take turns, so that a change of the machine's load meets all of them.
Each run writes FOLDER/run-WORKLOAD-POLICY-N.json; figures as PNG beside them.

    busy      processor seconds of the thread that computes: forwards, sampling; forwards, backwards, optimiser
    useful    of them, for neither padding nor tokens that never ended in `trained`
    TTFS      from submission to the job's first turn at the rollout engine
    TPTS      from version to version
    slowed    a job's turnaround over that of the same job alone, mean; `worst` over that mean
    idle      share of both engines' time in which they do not compute, waiting for a core included
    bottleneck  useful share of the busier engine in the time in which it was not waiting for a core
    no core   seconds in which the engines' threads were ready, and others had the cores
    others    cores that everybody else used meanwhile, in the mean: where it is not near 0, the run says little
    control   processor seconds of all processes beside computing
    (sum)     `sequential` is not run for every N: there it is the sum of a measured run of fewer jobs

`simul.` is the makespan that `benchmarks.simulator` predicts, calibrated on the telemetry of one `marlaas` run per workload.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks._report import console, make_table, parser, show
from benchmarks.paper import figures, table
from benchmarks.paper.measure import measure
from benchmarks.paper.predict import calibrates, predictions, recording_file
from benchmarks.paper.results import read, with_sums
from benchmarks.paper.workloads import WORKLOADS, Workload
from benchmarks.simulator.calibration import write
from benchmarks.simulator.fit import write_recording
from manager_service.policies import POLICIES

OUT = Path(".paper")
FULL, QUICK = (1, 2, 4, 8, 16, 32), (1, 4)
QUICK_POLICIES = ("sequential", "synchronous", "marlaas")
STEPS = 5
ONE_BY_ONE = {"single": (1, 4, 32), "agentic": (1, 4), "tail": (1, 4, 32)}
"""Where `sequential` is measured; its other values are sums."""


def plan(
    numbers: Sequence[int], policies: Sequence[str], workloads: Sequence[str], *, quick: bool = False
) -> Iterator[tuple[Workload, str, int]]:
    """What is run, in order."""
    for workload in workloads:
        for n in numbers:
            for policy in policies:
                if policy == "sequential" and (n not in ONE_BY_ONE[workload] or (quick and n > 1)):
                    continue
                yield WORKLOADS[workload], policy, n


def run(workload: Workload, policy: str, n: int, steps: int, folder: Path) -> None:
    found, recording = asyncio.run(measure(workload, policy, n, steps))
    write(found, folder / f"run-{workload.name}-{policy}-{n}.json")
    if calibrates(policy, n):
        write_recording(recording, recording_file(folder, found))


def report(folder: Path, cores: int | None, to: Path | None) -> None:
    measured = read(folder)
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
    show(tables, msgspec.to_builtins(runs), table.goals(found, predicted), to)
    for path in figures.write(runs, folder):
        console.print(str(path))


def options() -> argparse.Namespace:
    given = parser(__doc__)
    given.add_argument("--quick", action="store_true", help="N = 1 and 4, three policies")
    given.add_argument("--jobs", type=int, nargs="+", metavar="N", help="default: 1 2 4 8 16 32")
    given.add_argument("--policies", nargs="+", choices=list(POLICIES))
    given.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given.add_argument("--steps", type=int, default=STEPS, help=f"of each job; default {STEPS}")
    given.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="for the simulator; see benchmarks.simulator.calibrate"
    )
    given.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"of the results; default {OUT}")
    given.add_argument("--show", type=Path, metavar="FOLDER", help="report what is in this folder, run nothing")
    return given.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, as after Ctrl-C
    given = options()
    numbers = given.jobs or (QUICK if given.quick else FULL)
    policies = given.policies or (QUICK_POLICIES if given.quick else list(POLICIES))
    if given.show is None:
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        for workload, policy, n in plan(numbers, policies, given.workloads, quick=given.quick):
            console.print(f"{workload.name}, {policy}, N = {n} …")
            run(workload, policy, n, given.steps, given.out)
    report(given.show or given.out, given.cores or None, given.json)


if __name__ == "__main__":
    main()
