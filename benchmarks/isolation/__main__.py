"""Asks whether sharing is harmless: runs each of eight jobs alone and among 32, in three modes, and writes a report with figures.

    make bench-isolation                               # the whole, in .isolation
    make bench-isolation ARGS=--quick                  # two jobs among eight, two seeds, few steps
    python -m benchmarks.isolation --mode default --out FOLDER
    python -m benchmarks.isolation --show FOLDER       # the report of runs that are there already

    deterministic    10 steps, one seed: sha256 of every version's files, alone on one worker of each kind, and among 32 on
                     several, with fused training and workers killed on the way
    default          20 steps, five seeds: rewards, divergence from the sampling policy, effective sample size, histograms
    bfloat16         the same with the base model in bfloat16, as on a GPU: ten thousand times coarser than float32

Each run is one JSON in FOLDER. Runs that are there already are kept, so that a measurement that was stopped goes on; the
folder refuses runs of other settings. The last thing written is FOLDER/report.md with its figures.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._report import Report, console, show, sweep_parser
from benchmarks.isolation import measure, runs
from benchmarks.isolation.jobs import WATCHED, Job, background
from benchmarks.isolation.report import Evidence, goals, report
from benchmarks.isolation.runs import MODES, STATISTICAL, Mode, Run, Settings
from common.errors import InvalidInput

OUT, QUICK_OUT = Path(".isolation"), Path(".isolation/quick")
QUICK = Settings(
    num_watched=2, num_jobs=8, deterministic_steps=4, default_steps=6, num_seeds=2, num_held_out=16, eval_samples=2
)


async def measure_all(folder: Path, settings: Settings, modes: Sequence[Mode]) -> None:
    """Measures what is missing in the folder."""
    watched = WATCHED[: settings.num_watched]
    for mode in modes:
        for seed in settings.seeds(mode):
            await measure_alone(folder, settings, mode, seed, watched)
            await measure_among(folder, settings, mode, seed, watched)


async def measure_alone(folder: Path, settings: Settings, mode: Mode, seed: int, watched: Sequence[Job]) -> None:
    missing = [
        (place, job)
        for place, job in enumerate(watched)
        if not (folder / runs.file_name(mode, "alone", seed, job.name)).exists()
    ]
    if not missing:
        return
    async with measure.tenants(measure.scene(mode, alone=True)) as theirs:
        for place, job in missing:
            keep(folder, await measure.alone(theirs, mode, seed, place, job, settings))


async def measure_among(folder: Path, settings: Settings, mode: Mode, seed: int, watched: Sequence[Job]) -> None:
    if not (folder / runs.file_name(mode, "among", seed, "")).exists():
        beside = background(settings.num_jobs - len(watched))
        async with measure.tenants(measure.scene(mode, alone=False)) as theirs:
            keep(folder, await measure.among(theirs, mode, seed, watched, beside, settings))


def keep(folder: Path, run: Run) -> None:
    runs.write(folder, run)
    names = ", ".join(job.name for job in run.jobs)
    console.print(f"{run.mode}, {run.sharing}, seed {run.seed}: {names} … {run.wall_s:.0f} s")


def write_report(folder: Path, command: str) -> Evidence:
    """Raises InvalidInput if there is nothing to compare."""
    from benchmarks.isolation import figures  # here: matplotlib takes a second, which those who draw nothing do without

    settings = runs.read_settings(folder)
    evidence = Evidence.of(settings, runs.read(folder))
    if not any(evidence.pairs.values()):
        raise InvalidInput(f"{folder} has no job that was measured alone and among others")
    for mode in STATISTICAL:
        if evidence.pairs[mode]:
            figures.draw_all(folder, mode, evidence.pairs[mode], settings.num_jobs)
    (folder / "report.md").write_text(report(evidence, WATCHED[: settings.num_watched], command))
    return evidence


def options() -> argparse.Namespace:
    given = sweep_parser(__doc__, OUT, f"two jobs among eight, two seeds, few steps, in {QUICK_OUT}")
    given.add_argument("--mode", choices=MODES, help="only this one")
    return given.parse_args()


def main() -> None:
    given = options()
    folder = given.show or given.out or (QUICK_OUT if given.quick else OUT)
    try:
        if given.show is None:
            settings = QUICK if given.quick else Settings()
            runs.open_folder(folder, settings)
            asyncio.run(measure_all(folder, settings, [given.mode] if given.mode else MODES))
        evidence = write_report(folder, f"make bench-isolation{' ARGS=--quick' if given.quick else ''}")
    except InvalidInput as error:
        sys.exit(f"error: {error}")
    console.print(f"the report: {folder / 'report.md'}\n")
    found = goals(evidence)
    show(Report([], {goal.what: goal.measured for goal in found}, found), given.json)


if __name__ == "__main__":
    main()
