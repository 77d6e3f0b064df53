"""Puts results side by side, and keeps them as files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks._report import Goal, read_json, write_json
from benchmarks.peers.systems import BASELINE, SYSTEMS

Scores = Mapping[str, tuple[float, float]]
"""Job -> mean reward on its held-out items: greedy, sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One system with N jobs. `failed` says why there are no figures (zeros); `sum_of` is the N that was measured if this one is a
    multiple of it."""

    system: str
    num_jobs: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    load: float = 0.0
    before: Scores = field(default_factory=dict[str, tuple[float, float]])
    after: Scores = field(default_factory=dict[str, tuple[float, float]])
    failed: str = ""
    sum_of: int = 0

    def mean_after(self, kind: int) -> float:
        return mean(score[kind] for score in self.after.values())

    def mean_before(self, kind: int) -> float:
        return mean(score[kind] for score in self.before.values())


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def multiple(measured: Result, num_jobs: int) -> Result:
    """Cost of `num_jobs` jobs one after another, computed from fewer. Memory is that of one job; rewards are left out."""
    factor = num_jobs / measured.num_jobs
    return replace(
        measured,
        num_jobs=num_jobs,
        wall_s=measured.wall_s * factor,
        cpu_s=measured.cpu_s * factor,
        before={},
        after={},
        sum_of=measured.num_jobs,
    )


def difference(ours: Scores, theirs: Scores, kind: int) -> tuple[float, float]:
    """(mean of theirs − ours over the jobs of both, its standard error); the error is nan for fewer than two jobs."""
    differences = [theirs[job][kind] - ours[job][kind] for job in ours if job in theirs]
    middle, n = mean(differences), len(differences)
    if n < 2:
        return middle, math.nan
    return middle, math.sqrt(sum((d - middle) ** 2 for d in differences) / (n - 1) / n)


# ---- as a table -----------------------------------------------------------------------------------------------------

COLUMNS = ("N", "system", "wall s", "×", "CPU s", "×", "peak MB", "×", "greedy", "sampled", "− ours")


def lines(results: Sequence[Result]) -> list[list[str]]:
    """One a result, in the order of `COLUMNS`."""
    ours = {result.num_jobs: result for result in results if result.system == BASELINE and not result.failed}
    ordered = sorted(results, key=lambda r: (r.num_jobs, list(SYSTEMS).index(r.system)))
    return [line(result, ours.get(result.num_jobs)) for result in ordered]


def line(result: Result, ours: Result | None) -> list[str]:
    label = SYSTEMS[result.system].label
    if result.failed:
        return [str(result.num_jobs), label, f"failed: {result.failed}", *[""] * (len(COLUMNS) - 3)]
    mark = f" (from N = {result.sum_of})" if result.sum_of else ""
    return [
        str(result.num_jobs),
        label + mark,
        f"{result.wall_s:.1f}",
        ratio(result.wall_s, ours and ours.wall_s),
        f"{result.cpu_s:.0f}",
        ratio(result.cpu_s, ours and ours.cpu_s),
        f"{result.peak_mb:,.0f}",
        ratio(result.peak_mb, ours and ours.peak_mb),
        change(result, 0),
        change(result, 1),
        compared(result, ours),
    ]


def ratio(value: float, ours: float | None) -> str:
    return "" if not ours else f"{value / ours:.2f}"


def change(result: Result, kind: int) -> str:
    return f"{result.mean_before(kind):.2f}→{result.mean_after(kind):.2f}" if result.after else ""


def compared(result: Result, ours: Result | None) -> str:
    """The difference of the sampled rewards."""
    if ours is None or result is ours or not result.after or not ours.after:
        return ""
    middle, error = difference(ours.after, result.after, 1)
    return f"{middle:+.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def goals(results: Sequence[Result], num_jobs: int = 8) -> list[Goal]:
    """Goals that are set for N = 8, as far as they were measured."""
    at = {r.system: r for r in results if r.num_jobs == num_jobs and not r.failed}
    ours = at.get(BASELINE)
    if ours is None:
        return []
    limits = {"trl-1": 4.0, "trl-2": 2.5, "skyrl": 5.0}
    found = [
        Goal(f"N = {num_jobs}: faster than {SYSTEMS[name].label}", at[name].wall_s / ours.wall_s, limit, " times")
        for name, limit in limits.items()
        if name in at
    ]
    if "trl-all" in at:
        share = ours.peak_mb / at["trl-all"].peak_mb
        found.append(Goal(f"memory against {num_jobs} TRL processes", share, 1 / 3, " times", more_is_better=False))
    for name in at.keys() - {BASELINE}:
        middle, error = difference(ours.after, at[name].after, 1)
        if error:
            what = f"final reward, {SYSTEMS[name].label} − ours, in standard errors"
            found.append(Goal(what, abs(middle) / error, 3.0, more_is_better=False))
    return found


# ---- as files -------------------------------------------------------------------------------------------------------


def write(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / f"{result.system}-{result.num_jobs}.json")


def read(folder: Path) -> list[Result]:
    """Every result in the folder."""
    return read_json(folder, "*.json", Result)
