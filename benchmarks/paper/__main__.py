"""Measures the figures of the MARLaaS paper: N jobs of different tenants, under each scheduling policy, on three workloads.

    make bench-paper                                          # the whole, up to an hour
    python -m benchmarks.paper --quick                        # N = 1 and 4, three policies, about five minutes
    python -m benchmarks.paper --jobs 1 8 --policies marlaas synchronous --workloads agentic --out FOLDER
    python -m benchmarks.paper --show FOLDER                  # tables and goals of results that are there already

One rollout worker and one trainer of one thread each, one env worker; engine, batching, training queue and concurrent tools are
the same under every policy. For each N the policies take turns, so that a change of the machine's load meets all of them.
Each run writes FOLDER/run-WORKLOAD-POLICY-N.json, with the times at which each job's versions were committed (`versions_s`).

table.py says what the columns mean. `simul.` is what `simulator` predicts, calibrated for each N on the
telemetry of the `marlaas` run of as many jobs, at most 8.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks._report import Report, console, empty, make_table, positive, show, sweep_parser, write_json
from benchmarks.paper import table
from benchmarks.paper.measure import measure
from benchmarks.paper.results import Measured, calibrates, predictions, recording_file
from benchmarks.paper.workloads import WORKLOADS, Workload
from manager_service.scheduling.policies import POLICIES
from simulator.calibration import read_runs
from simulator.fit import write_recording

OUT = Path(".paper")
FULL, QUICK = (1, 2, 4, 8, 16, 32), (1, 4)
QUICK_POLICIES = ("sequential", "synchronous", "marlaas")
STEPS = 5
MOST_IN_TURN = 4
"""Jobs up to which `sequential` is measured: more take as many times as long."""


def plan(
    numbers: Sequence[int], policies: Sequence[str], workloads: Sequence[str]
) -> Iterator[tuple[Workload, str, int]]:
    """Runs, in order."""
    for workload in workloads:
        for n in numbers:
            for policy in policies:
                if policy != "sequential" or n <= MOST_IN_TURN:
                    yield WORKLOADS[workload], policy, n


def run(workload: Workload, policy: str, n: int, steps: int, folder: Path) -> None:
    found, recording = asyncio.run(measure(workload, policy, n, steps))
    write_json(found, folder / f"run-{workload.name}-{policy}-{n}.json")
    if calibrates(policy, n):
        write_recording(recording, recording_file(folder, found))


def report(folder: Path, to: Path | None) -> None:
    try:
        runs = read_runs(folder, Measured)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    found, predicted = table.Found(runs), predictions(runs, folder, os.cpu_count())
    lines = [table.line(found, run, predicted.get(key)) for key, run in found.runs.items()]
    shown = make_table("N jobs under each policy", table.COLUMNS, lines)
    shown.columns[0].no_wrap = True
    show(Report([shown], msgspec.to_builtins(runs), table.goals(found), table.notes(found, predicted)), to)


def main() -> None:
    options = sweep_parser(__doc__, OUT, "N = 1 and 4, three policies")
    options.add_argument("--jobs", type=positive, nargs="+", metavar="N", help="default: 1 2 4 8 16 32")
    options.add_argument("--policies", nargs="+", choices=list(POLICIES))
    options.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--steps", type=positive, default=STEPS, help=f"of each job; default {STEPS}")
    given = options.parse_args()
    out = given.show or given.out or OUT
    numbers = given.jobs or (QUICK if given.quick else FULL)
    policies = given.policies or (QUICK_POLICIES if given.quick else list(POLICIES))
    if given.show is None:
        empty(out, "run-*.json", "telemetry-*.msgpack")
        for workload, policy, n in plan(numbers, policies, given.workloads):
            console.print(f"{workload.name}, {policy}, N = {n} …")
            run(workload, policy, n, given.steps, out)
    report(out, given.json)


if __name__ == "__main__":
    main()
