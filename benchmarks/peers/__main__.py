"""Runs the same jobs on MARLaaS, on TRL and on SkyRL's Tinker server: wall time, processor time, memory, rewards.

    make bench-peers                                        # installs the peers in .peers, then the whole, about 40 minutes
    python -m benchmarks.peers --quick                      # N = 1 and 4, few steps
    python -m benchmarks.peers --jobs 1 8 --systems marlaas trl-1 --steps 10 --out FOLDER
    python -m benchmarks.peers --show FOLDER                # prints results that are there already
    python -m benchmarks.peers --base FOLDER --systems marlaas trl-1 --jobs 1 4      a pretrained base: sums, 2 steps to warm up and 8

A run is N jobs on one system, from the start of its first process until the last adapter lies on the disk as a file and its last
process has ended. For each N the systems take turns, so that a change of the machine's load meets all of them. Afterwards one and
the same judge loads every adapter into PEFT and answers the held-out items. Each run writes FOLDER/SYSTEM-N.json.

    TRL, one after another     GRPOTrainer, one process a job, up to N = 8
    TRL, two at once           the same, two processes at a time
    TRL, all at once           at N = 8: the memory of N processes
    SkyRL                      its Tinker server: one server on its JAX backend, N clients at once

"s/step" is the time in which any job was between the ends of its second and last steps, over the number of these steps.
In the table "×" is the figure over that of MARLaaS; "− ours" is the sampled reward less that of MARLaaS, mean over the jobs and its
standard error.
"""

import itertools
import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks._report import (
    Goal,
    Report,
    console,
    empty,
    make_table,
    positive,
    read_json,
    show,
    sweep_parser,
    write_json,
)
from benchmarks.peers import settings as files
from benchmarks.peers.judge import Score, score
from benchmarks.peers.measure import SYSTEMS, RunFailed, run
from benchmarks.peers.settings import SUM, Job, Row, Settings, of_base
from common.rng import permutation
from common.tasks.skills import SKILLS, Split, generate

OUT = Path(".peers/results")
FULL, QUICK = (1, 4, 8, 16), (1, 4)
QUICK_STEPS = 5
MOST_IN_TURN = 8
"""Jobs that TRL runs one after another, and all at once."""
SINGLE_TURN = tuple(name for name, skill in SKILLS.items() if not skill.needs_calculator)
"""`calc` is left out: its tool calls take several turns, for which each peer would need a loop of its own."""
WARM_UP = 2  # steps that do not count for the time of a step
COLUMNS = ("N", "system", "wall s", "×", "s/step", "×", "CPU s", "×", "peak MB", "×", "greedy", "sampled", "− ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One system with N jobs. `failed` says why there are no figures (zeros)."""

    system: str
    num_jobs: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    step_s: float | None = None
    before: Mapping[str, Score] = field(default_factory=dict[str, Score])
    after: Mapping[str, Score] = field(default_factory=dict[str, Score])
    failed: str = ""


# ---- jobs -----------------------------------------------------------------------------------------------------------


def make_jobs(num_jobs: int, skills: Sequence[str] = SINGLE_TURN) -> list[Job]:
    """The skills in turn, each job with a seed of its own."""
    skills = [skills[number % len(skills)] for number in range(num_jobs)]
    return [Job(f"{number:02d}-{skill}", skill, seed=number + 1) for number, skill in enumerate(skills)]


def items(job: Job, num: int, split: Split) -> list[Row]:
    """Questions of one split: of a skill of `tiny`, or of sums up to 40, of which the held-out ones have a sum divisible by 5."""
    if job.skill != SUM:
        return generate(job.skill, job.seed, num, split)
    pairs = itertools.product(range(2, 41), repeat=2)
    sums = [(a, b) for a, b in pairs if ((a + b) % 5 == 0) == (split == "held_out")]
    chosen = random.Random(job.seed).choices(sums, k=num)
    asked = [(f"What is {a} + {b}? Answer with the number only.", str(a + b)) for a, b in chosen]
    return [{"messages": [{"role": "user", "content": text}], "answer": answer} for text, answer in asked]


def drawn(rows: list[Row], seed: int, number: int) -> list[Row]:
    """The first `number` items that a job of MARLaaS draws: group g gets permutation(seed, epoch)[g mod n]."""
    n = len(rows)
    orders = [permutation(seed, epoch, n) for epoch in range(-(-number // n))]
    return [rows[int(orders[group // n][group % n])] for group in range(number)]


def write_data(folder: Path, jobs: list[Job], settings: Settings) -> None:
    files.write_json(folder / "settings.json", settings)
    for job in jobs:
        home = folder / job.name
        home.mkdir()
        files.write_json(home / "job.json", job)
        rows = items(job, settings.num_items, "train")
        files.write_rows(home / "items.jsonl", rows)
        files.write_rows(home / "drawn.jsonl", drawn(rows, job.seed, settings.num_steps * settings.batch_size))
        files.write_rows(home / "held_out.jsonl", items(job, settings.num_held_out, "held_out"))


def step_seconds(folder: Path, jobs: Sequence[Job]) -> float | None:
    """Seconds a step in which any job was at work on one that counts; None where nobody says when steps ended."""
    notes = [json.loads(file.read_text()) for job in jobs if (file := folder / job.name / "ends.json").exists()]
    total, until = 0.0, -math.inf
    for start, end in sorted((ends[WARM_UP - 1], ends[-1]) for ends in notes if len(ends) > WARM_UP):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    num = sum(max(0, len(ends) - WARM_UP) for ends in notes)
    return total / num if num else None


# ---- runs -----------------------------------------------------------------------------------------------------------


def plan(numbers: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Runs, in order."""
    for number in numbers:
        for name in names:
            if (name == "trl-1" and number > MOST_IN_TURN) or (name == "trl-all" and number != MOST_IN_TURN):
                continue
            yield number, name


def measure(name: str, num_jobs: int, settings: Settings, log: Path) -> Result:
    skills = SINGLE_TURN if settings.model == Settings().model else (SUM,)
    jobs, system, result = make_jobs(num_jobs, skills), SYSTEMS[name], Result(system=name, num_jobs=num_jobs)
    at_once = 1 if system.at_once is None else system.at_once or num_jobs
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, jobs, settings)
        try:
            cost = run(system.commands(folder, jobs), at_once=at_once, threads=settings.threads, log=log)
        except (RunFailed, FileNotFoundError) as error:
            return replace(result, failed=str(error))
        step_s = step_seconds(folder, jobs)
        rows = {job.name: files.read_rows(folder / job.name / "held_out.jsonl") for job in jobs}
        before = {name: score(settings, items) for name, items in rows.items()}
        after = {name: score(settings, items, folder / name / system.adapters) for name, items in rows.items()}
    return replace(result, **asdict(cost), step_s=step_s, before=before, after=after)


# ---- the report -----------------------------------------------------------------------------------------------------


def line(result: Result, ours: Result | None) -> list[str]:
    start = [str(result.num_jobs), SYSTEMS[result.system].label]
    if result.failed:
        return [*start, f"failed: {result.failed}", *[""] * (len(COLUMNS) - 3)]
    greedy, sampled = (
        f"{before:.2f}→{after:.2f}"
        for before, after in zip(*(np.mean(list(s.values()), 0) for s in (result.before, result.after)), strict=True)
    )
    costs = [
        (f"{cost:,.{digits}f}", f"{cost / base:.2f}" if base else "") if cost else ("", "")
        for name, digits in (("wall_s", 1), ("step_s", 2), ("cpu_s", 0), ("peak_mb", 0))
        for cost, base in [(getattr(result, name), getattr(ours, name, None))]
    ]
    middle, error = difference(ours, result) if ours and ours is not result else (math.nan, math.nan)
    compared = "" if math.isnan(middle) else f"{middle:+.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
    return [*start, *(cell for both in costs for cell in both), greedy, sampled, compared]


def difference(ours: Result, theirs: Result) -> tuple[float, float]:
    """(mean of theirs − ours of the sampled rewards over the jobs, its standard error); nan for a single job."""
    differences = [theirs.after[job][1] - ours.after[job][1] for job in ours.after]
    error = np.std(differences, ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return float(np.mean(differences)), float(error)


def goals(at: Mapping[str, Result]) -> list[Goal]:
    """Goals that are set for N = 8. `at`: its results that did not fail, by system."""
    ours, limits = at.get("marlaas"), {"trl-1": 4.0, "trl-2": 2.5, "skyrl": 5.0}
    found: list[Goal] = []
    if ours is None:
        return found
    for name, theirs in at.items():
        label = SYSTEMS[name].label
        if name in limits:
            found.append(Goal(f"N = 8: faster than {label}", theirs.wall_s / ours.wall_s, limits[name], " times"))
        if name == "trl-all":
            share = ours.peak_mb / theirs.peak_mb
            found.append(Goal("memory against 8 TRL processes", share, 1 / 3, " times", more_is_better=False))
        if theirs is not ours and (both := difference(ours, theirs))[1]:
            what = f"final reward, {label} − ours, in standard errors"
            found.append(Goal(what, abs(both[0]) / both[1], 3.0, more_is_better=False))
    return found


def report(results: list[Result], settings: Settings, to: Path | None) -> None:
    sound = {(result.num_jobs, result.system): result for result in results if not result.failed}
    ordered = sorted(results, key=lambda r: (r.num_jobs, list(SYSTEMS).index(r.system)))
    told = make_table(
        "Settings, the same on all sides", ("setting", "value"), [(k, str(v)) for k, v in asdict(settings).items()]
    )
    rows = [line(result, sound.get((result.num_jobs, "marlaas"))) for result in ordered]
    compared = make_table("Side by side", COLUMNS, rows)
    told.columns[1].justify = compared.columns[1].justify = "left"
    eight = {name: result for (number, name), result in sound.items() if number == MOST_IN_TURN}
    show(Report([told, compared], [asdict(result) for result in results], goals(eight)), to)


def main() -> None:
    options = sweep_parser(__doc__, OUT, f"N = 1 and 4, {QUICK_STEPS} steps")
    options.add_argument("--jobs", type=positive, nargs="+", metavar="N", help="default: 1 4 8 16")
    options.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    options.add_argument("--base", type=Path, metavar="FOLDER", help="of a pretrained base, for sums; default: `tiny`")
    options.add_argument("--steps", type=positive, help=f"of each job; default {Settings().num_steps}")
    given = options.parse_args()
    out = given.show or given.out or OUT
    settings = of_base(str(given.base.resolve())) if given.base else Settings()
    settings = replace(settings, num_steps=given.steps or (QUICK_STEPS if given.quick else settings.num_steps))
    if given.show is None:
        empty(out, "*-*.json", "*-*.log")
        for number, name in plan(given.jobs or (QUICK if given.quick else FULL), given.systems):
            console.print(f"{SYSTEMS[name].label}, N = {number} …")
            result = measure(name, number, settings, out / f"{name}-{number}.log")
            write_json(result, out / f"{name}-{number}.json")
    report(read_json(out, "*.json", Result), settings, given.json)


if __name__ == "__main__":
    main()
