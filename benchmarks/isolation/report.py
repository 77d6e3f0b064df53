"""Compares the runs, and writes the report in Markdown, which answers a referee's questions about shared training.

Runs come in pairs: the same job with the same seed, alone and among others. Both draw the same items and the same random numbers,
so a pair differs by what sharing changes and by nothing else.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._report import Goal, number
from benchmarks.isolation import statistics
from benchmarks.isolation.jobs import BROKEN
from benchmarks.isolation.runs import MODES, JobRun, Mode, Run, Settings
from common.errors import InvalidInput
from simulator.calibration import jain

MARGIN = 0.05
"""Final rewards, between 0 and 1, that differ by less count as equal."""
LEVEL = 0.05
LAST_STEPS = 5
Figure = Callable[[JobRun], float]


@dataclass(frozen=True, slots=True)
class Pair:
    job: str
    seed: int
    alone: JobRun
    among: JobRun

    @property
    def same_versions(self) -> int:
        """Versions whose every file has the same sha256. One that a side lacks is not the same."""
        return sum(one == other for one, other in zip(self.alone.sha256, self.among.sha256, strict=False))

    @property
    def num_versions(self) -> int:
        """Version 0 included."""
        return max(len(self.alone.sha256), len(self.among.sha256))


@dataclass(frozen=True, slots=True)
class Evidence:
    settings: Settings
    runs: Sequence[Run]
    pairs: Mapping[Mode, Sequence[Pair]]

    @classmethod
    def of(cls, settings: Settings, runs: Sequence[Run]) -> "Evidence":
        """Raises InvalidInput if there is nothing to compare."""
        pairs: dict[Mode, Sequence[Pair]] = {mode: pairs_of(runs, mode) for mode in MODES}
        if not any(pairs.values()):
            raise InvalidInput("no job was measured alone and among others: run the benchmark to its end")
        return cls(settings, runs, pairs)

    @property
    def failed(self) -> int:
        return sum(job.status != "succeeded" for run in self.runs for job in run.jobs)


def pairs_of(runs: Sequence[Run], mode: Mode) -> list[Pair]:
    """Complete pairs, by job, then by seed."""
    alone = {(run.seed, run.jobs[0].name): run.jobs[0] for run in runs if (run.mode, run.sharing) == (mode, "alone")}
    among = [run for run in runs if (run.mode, run.sharing) == (mode, "among")]
    found = [(run.seed, job) for run in among for job in run.jobs if (run.seed, job.name) in alone]
    return sorted((Pair(j.name, seed, alone[seed, j.name], j) for seed, j in found), key=lambda p: (p.job, p.seed))


# ---- figures --------------------------------------------------------------------------------------------------------


def mean_metric(name: str, last: int = 0) -> Figure:
    """The mean over (the last) steps that have the metric; nan if none has."""

    def figure(job: JobRun) -> float:
        values = [step[name] for step in job.steps[-last:] if step.get(name) is not None]
        return float(np.mean(values)) if values else math.nan

    return figure


def signal_share(job: JobRun) -> float:
    """Rows of a batch that can have a gradient: the effective batch."""
    shares = [step["num_signal_rows"] / step["num_rows"] for step in job.steps if step.get("num_rows")]
    return float(np.mean(shares)) if shares else math.nan


REWARD = mean_metric("reward_mean", LAST_STEPS)
FIGURES: Mapping[str, Figure] = {
    f"final reward (mean of the last {LAST_STEPS} steps)": REWARD,
    "reward on held-out items at the end": lambda job: math.nan if job.held_out is None else job.held_out,
    "share of rows with signal (effective batch)": signal_share,
    **{
        name: mean_metric(name)
        for name in ("sampling_gap", "sampling_kl", "ess_share", "clip_fraction", "entropy", "grad_norm")
    },
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure over pairs: means, the mean difference with its standard error (nan for a single pair), p of the sign-flip test."""

    alone: float
    among: float
    differences: list[float]
    p: float

    @property
    def cells(self) -> tuple[str, ...]:
        error = statistics.standard_error(self.differences)
        shown = f"{np.mean(self.differences):+.2g}" + ("" if math.isnan(error) else f" ± {error:.2g}")
        return (number(self.alone), number(self.among), shown, number(self.p))

    @property
    def equal_p(self) -> float:
        return statistics.tost_p(self.differences, MARGIN)


def compare(pairs: Sequence[Pair], figure: Figure) -> Compared | None:
    """None if no pair has the figure."""
    values = [(figure(pair.alone), figure(pair.among)) for pair in pairs]
    values = [both for both in values if not any(map(math.isnan, both))]
    if not values:
        return None
    differences = [among - alone for alone, among in values]
    alone, among = np.mean(values, axis=0).tolist()
    return Compared(alone, among, differences, statistics.sign_flip_p(differences))


def by_job(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    return {name: [pair for pair in pairs if pair.job == name] for name in dict.fromkeys(pair.job for pair in pairs)}


def goals(evidence: Evidence) -> list[Goal]:
    """Goals that the runs at hand can judge."""
    found: list[Goal] = []
    for mode, pairs in evidence.pairs.items():
        pooled = compare(pairs, REWARD)
        if mode == "deterministic" and pairs:
            differ = sum(pair.num_versions - pair.same_versions for pair in pairs)
            found.append(Goal(f"{mode}: versions whose bytes differ", differ, 0, more_is_better=False))
        elif pooled:
            jobs = [row.p for own in by_job(pairs).values() if (row := compare(own, REWARD))]
            found.append(Goal(f"{mode}: p of a difference in final reward", pooled.p, LEVEL))
            found.append(Goal(f"{mode}: the same for each job, the least, Holm", min(statistics.holm(jobs)), LEVEL))
            what = f"{mode}: p of TOST, margin ± {MARGIN:g}"
            found.append(Goal(what, pooled.equal_p, LEVEL, more_is_better=False))
    return [*found, Goal("watched jobs that failed", evidence.failed, 0, more_is_better=False)]


# ---- the report -----------------------------------------------------------------------------------------------------


def report(evidence: Evidence) -> str:
    s, rows = evidence.settings, goals(evidence)
    verdicts = [(goal.what, number(goal.measured), "reached" if goal.reached else "**missed**") for goal in rows]
    sections = [
        f"# Is sharing harmless?\n\nEach of {s.num_watched} jobs trains alone, then among {s.num_jobs} and {len(BROKEN)} that go "
        "wrong on purpose. Alone and among others a job has the same seed: whatever differs was done by sharing.",
        table(("goal", "measured", ""), verdicts),
        *(section(mode, pairs) for mode, pairs in evidence.pairs.items() if pairs),
        interference(evidence),
    ]
    return "\n\n".join(sections) + "\n"


def section(mode: Mode, pairs: Sequence[Pair]) -> str:
    """The answers of one mode's runs."""
    same, versions = sum(pair.same_versions for pair in pairs), sum(pair.num_versions for pair in pairs)
    steps = [step for pair in pairs for job in (pair.alone, pair.among) for step in job.steps]
    stale = sum(step["sampled_versions"] not in ([step["step"] - 1], []) for step in steps)
    slow = {
        name: float(np.mean([p.among.seconds / p.alone.seconds for p in own])) for name, own in by_job(pairs).items()
    }
    head = ("alone", "among", "difference ± standard error", "p")
    pooled = [(name, *row.cells) for name, figure in FIGURES.items() if (row := compare(pairs, figure))]
    jobs = [
        (name, *row.cells, number(row.equal_p)) for name, own in by_job(pairs).items() if (row := compare(own, REWARD))
    ]
    answer = "No" if same == versions else "**Yes, which breaks invariant I8**" if mode == "deterministic" else "Yes"
    return f"""## {mode.capitalize()} mode, {len(pairs)} pairs of job and seed

- Does another tenant change a bit of my adapter? {answer}: {same} of {versions} versions are the same bytes.
- Is training less on-policy? {stale} of {len(steps)} steps used another version's trajectory.
- Who pays? A job takes {min(slow.values()):.1f} to {max(slow.values()):.1f} times as long as alone; Jain's index of the speeds
  relative to alone is {jain([1 / value for value in slow.values()]):.3f}.

Does sharing change how a job learns? *p* is that of a sign-flip permutation test of the paired differences; *TOST* below {LEVEL:g}
says that they are equal within the margin.

{table(("figure, all pairs", *head), pooled)}

{table(("final reward of", *head, f"TOST p, ± {MARGIN:g}"), jobs)}"""


def interference(evidence: Evidence) -> str:
    broken = [job.name for job in BROKEN]
    others = [job for run in evidence.runs for job in run.others]
    ends = Counter((o.name, o.status, o.error.split("\n")[0][:110]) for o in others if o.name in broken)
    rows = [(name, f"{count}× {status}", error) for (name, status, error), count in ends.items()]
    sound = [job for job in others if job.name not in broken]
    killed = Counter(name for run in evidence.runs for name in run.kills)
    return f"""## Does a neighbour's failure reach me?

{evidence.failed} watched jobs failed. Processes that were killed meanwhile:
{", ".join(f"{name} {times}×" for name, times in killed.items()) or "none"}. {len(sound)} sound neighbours made
{sum(job.num_steps for job in sound):,} steps, and {sum(job.status in ("failed", "cancelled") for job in sound)} of them failed.

{table(("neighbour", "ended", "why"), rows)}"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
