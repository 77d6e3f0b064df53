"""Asks whether sharing is harmless: runs each of eight jobs alone and among 32, in three modes, and writes a report.

    make bench-isolation                               # the whole, in .isolation
    make bench-isolation ARGS=--quick                  # two jobs among four, few steps
    python -m benchmarks.isolation --mode default --out FOLDER
    python -m benchmarks.isolation --show FOLDER       # the report of runs that are there already

    deterministic    10 steps, one seed: sha256 of every version's files, alone on one worker of each kind, and among 32 on
                     several, with fused training and workers killed on the way
    default          20 steps, five seeds: rewards, divergence from the sampling policy, effective batch
    bfloat16         the same with the base model in bfloat16, as on a GPU: ten thousand times coarser than float32

Each run is one JSON in FOLDER. Runs that are there already are kept, so that a measurement that was stopped goes on; the folder
refuses runs of other settings. The last thing written is FOLDER/report.md.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._report import Report, console, show, sweep_parser
from benchmarks.isolation import measure, runs
from benchmarks.isolation.jobs import WATCHED, background
from benchmarks.isolation.report import Evidence, goals, report
from benchmarks.isolation.runs import MODES, Mode, Run, Settings
from common.errors import InvalidInput

OUT, QUICK_OUT = Path(".isolation"), Path(".isolation/quick")
QUICK = Settings(num_watched=2, num_jobs=4, deterministic_steps=2, default_steps=2, num_seeds=1)


async def measure_all(folder: Path, settings: Settings, modes: Sequence[Mode]) -> None:
    """Measures what is missing in the folder."""
    watched, beside = WATCHED[: settings.num_watched], background(settings.num_jobs - settings.num_watched)
    for mode in modes:
        steps = settings.num_steps(mode)
        for seed in settings.seeds(mode):
            missing = [n for n, job in enumerate(watched) if not has(folder, mode, "alone", seed, job.name)]
            if missing:
                async with measure.tenants(mode, alone=True) as theirs:
                    for n in missing:
                        keep(folder, await measure.alone(theirs, mode, seed, n, watched[n], steps))
            if not has(folder, mode, "among", seed):
                async with measure.tenants(mode, alone=False) as theirs:
                    keep(folder, await measure.among(theirs, mode, seed, watched, beside, steps))


def has(folder: Path, mode: Mode, sharing: runs.Sharing, seed: int, job: str = "") -> bool:
    return (folder / runs.file_name(mode, sharing, seed, job)).exists()


def keep(folder: Path, run: Run) -> None:
    runs.write(folder, run)
    console.print(f"{run.mode}, {run.sharing}, seed {run.seed}: {', '.join(job.name for job in run.jobs)}")


def main() -> None:
    options = sweep_parser(__doc__, OUT, f"two jobs among four, few steps, in {QUICK_OUT}")
    options.add_argument("--mode", choices=MODES, help="only this one")
    given = options.parse_args()
    folder = given.show or given.out or (QUICK_OUT if given.quick else OUT)
    try:
        if given.show is None:
            settings = QUICK if given.quick else Settings()
            runs.open_folder(folder, settings)
            asyncio.run(measure_all(folder, settings, [given.mode] if given.mode else MODES))
        evidence = Evidence.of(*runs.read(folder))
    except InvalidInput as error:
        sys.exit(f"error: {error}")
    (folder / "report.md").write_text(report(evidence))
    console.print(f"the report: {folder / 'report.md'}\n")
    found = goals(evidence)
    show(Report([], {goal.what: goal.measured for goal in found}, found), given.json)


if __name__ == "__main__":
    main()
