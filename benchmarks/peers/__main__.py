"""Runs the same jobs on MARLaaS, on TRL and on SkyRL's Tinker server: wall time, processor time, memory, rewards.

    make bench-peers                                        # installs the peers in .peers, then the whole, about 40 minutes
    python -m benchmarks.peers --quick                      # N = 1 and 4, few steps
    python -m benchmarks.peers --jobs 1 8 --systems marlaas trl-1 --steps 10 --out FOLDER
    python -m benchmarks.peers --show FOLDER                # prints results that are there already

A run is N jobs on one system, from the start of its first process until the last adapter lies on the disk as a file and
its last process has ended. For each N the systems take turns, so that a change of the machine's load meets all of them.
Afterwards one and the same judge loads every adapter into PEFT and answers the held-out items. Each run writes
FOLDER/SYSTEM-N.json.

    TRL, one after another     GRPOTrainer, one process a job. N = 16 is twice N = 8, and marked so
    TRL, two at once           the same, two processes at a time
    TRL, all at once           at the largest N up to 8: the memory of N processes
    SkyRL                      its Tinker server: one server on its JAX backend, N clients at once

The second table's "×" is the figure over that of MARLaaS; "− ours" is the sampled reward less that of MARLaaS, mean over
the jobs and its standard error.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path

from benchmarks._report import Report, console, empty, make_table, positive, show, sweep_parser
from benchmarks.peers import results
from benchmarks.peers.data import make_jobs, write_data
from benchmarks.peers.evaluate import Judge
from benchmarks.peers.measure import RunFailed, run
from benchmarks.peers.results import Result, Scores
from benchmarks.peers.settings import Job, Settings, read_rows, table
from benchmarks.peers.systems import BASELINE, SYSTEMS, System, environment

OUT = Path(".peers/results")
LIMIT_S = 1800.0
FULL, QUICK = (1, 4, 8, 16), (1, 4)
QUICK_STEPS = 5
MOST_ALL_AT_ONCE = 8
MOST_IN_TURN = 8


def plan(numbers: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, System]]:
    """Runs, in order."""
    largest = max((n for n in numbers if n <= MOST_ALL_AT_ONCE), default=0)
    for number in numbers:
        for name in names:
            if name == "trl-1" and number > MOST_IN_TURN and any(n <= MOST_IN_TURN for n in numbers):
                continue
            if name == "trl-all" and number != largest:
                continue
            yield number, SYSTEMS[name]


def measure(system: System, num_jobs: int, settings: Settings, judge: Judge, logs: Path) -> Result:
    jobs = make_jobs(num_jobs)
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), logs / f"{system.name}-{num_jobs}.log"
        write_data(folder, jobs, settings)
        result = Result(system=system.name, num_jobs=num_jobs)
        try:
            cost = run(
                system.commands(folder, jobs),
                at_once=system.width(num_jobs),
                environment=environment(settings),
                log=log,
                limit_s=LIMIT_S,
            )
        except (RunFailed, FileNotFoundError) as error:
            return replace(result, failed=str(error))
        before, after = scores(system, folder, jobs, judge)
        return replace(result, **asdict(cost), before=before, after=after)


def scores(system: System, folder: Path, jobs: Sequence[Job], judge: Judge) -> tuple[Scores, Scores]:
    """Scores of the base model, and of the adapters."""
    rows = {job.name: read_rows(folder / job.name / "held_out.jsonl") for job in jobs}
    before = {name: astuple(judge.base(name, items)) for name, items in rows.items()}
    after = {name: astuple(judge.score(items, folder / name / system.adapters)) for name, items in rows.items()}
    return before, after


def with_multiples(measured: list[Result], numbers: Sequence[int]) -> list[Result]:
    """Adds the runs of TRL one after another that are sums of a measured one."""
    in_turn = [r for r in measured if r.system == "trl-1" and not r.failed]
    if not in_turn:
        return measured
    most = max(in_turn, key=lambda r: r.num_jobs)
    return measured + [results.multiple(most, n) for n in numbers if n > most.num_jobs]


def report(found: list[Result], settings: Settings, to: Path | None) -> None:
    systems = make_table("Settings, the same on all sides", ("setting", "value"), table(settings))
    systems.columns[1].justify, systems.columns[1].no_wrap = "left", False
    compared = make_table("Side by side", results.COLUMNS, results.lines(found))
    compared.columns[1].justify = "left"
    show(Report([systems, compared], [asdict(result) for result in found], results.goals(found)), to)


def options() -> argparse.Namespace:
    given = sweep_parser(__doc__, OUT, f"N = 1 and 4, {QUICK_STEPS} steps")
    given.add_argument("--jobs", type=positive, nargs="+", metavar="N", help="default: 1 4 8 16")
    given.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    given.add_argument("--steps", type=positive, help=f"of each job; default {Settings().num_steps}")
    return given.parse_args()


def main() -> None:
    given = options()
    out = given.show or given.out or OUT
    settings = replace(Settings(), num_steps=given.steps or (QUICK_STEPS if given.quick else Settings().num_steps))
    numbers = given.jobs or (QUICK if given.quick else FULL)
    if given.show is None:
        empty(out, "*-*.json", "*-*.log")
        judge = Judge(settings)
        for number, system in plan(numbers, given.systems):
            console.print(f"{system.label}, N = {number} …")
            results.write(out, measure(system, number, settings, judge, out))
    found = results.read(out)
    assert any(result.system == BASELINE for result in found), "nothing to compare with"
    report(with_multiples(found, sorted({result.num_jobs for result in found})), settings, given.json)


if __name__ == "__main__":
    main()
