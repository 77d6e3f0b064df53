"""Compares runs with each other: pure functions of runs.

Runs of default mode come in pairs: the same job with the same seed, alone and among others. Both draw the same items and the
same random numbers, so a pair differs by what sharing changes and by nothing else.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.isolation import statistics
from benchmarks.isolation.runs import JobRun, Metrics, Mode, Run, Sharing
from benchmarks.isolation.statistics import Floats, Mean

MARGIN = 0.05
"""Final rewards, between 0 and 1, that differ by less count as equal."""
LEVEL = 0.05
LAST_STEPS = 5
BINS = 10
"""Bins of a histogram of rewards over [0, 1]."""


@dataclass(frozen=True, slots=True)
class Pair:
    job: str
    seed: int
    alone: JobRun
    among: JobRun


def pairs(runs: Iterable[Run], mode: Mode) -> list[Pair]:
    """Complete pairs, by job in the order of the runs among others, then by seed."""
    listed = [run for run in runs if run.mode == mode]
    alone = {(run.seed, run.jobs[0].name): run.jobs[0] for run in listed if run.sharing == "alone"}
    among = sorted((run for run in listed if run.sharing == "among"), key=lambda run: run.seed)
    names = list(dict.fromkeys(job.name for run in among for job in run.jobs))
    return [
        Pair(name, run.seed, alone[run.seed, name], job)
        for name in names
        for run in among
        for job in run.jobs
        if job.name == name and (run.seed, name) in alone
    ]


def by_job(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    names = dict.fromkeys(pair.job for pair in found)
    return {name: [pair for pair in found if pair.job == name] for name in names}


def side(pair: Pair, sharing: Sharing) -> JobRun:
    return pair.alone if sharing == "alone" else pair.among


# ---- bytes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bytes:
    """Counts of a job's versions that are the same files alone and among others."""

    job: str
    seed: int
    num_versions: int
    """Compared, version 0 included."""
    same: int
    """Versions whose every file has the same sha256."""
    last: str
    """sha256 of the last adapter alone."""


ADAPTER = "adapter_model.safetensors"


def same_bytes(pair: Pair) -> Bytes:
    """A version that one side lacks is not the same."""
    both = zip(pair.alone.sha256, pair.among.sha256, strict=False)
    most = max(len(pair.alone.sha256), len(pair.among.sha256))
    return Bytes(pair.job, pair.seed, most, sum(a == b for a, b in both), pair.alone.sha256[-1].get(ADAPTER, ""))


# ---- figures of a job -----------------------------------------------------------------------------------------------


def mean_metric(name: str, last: int | None = None) -> Callable[[JobRun], float]:
    """The mean over (the last) steps that have the metric; nan if none has."""

    def figure(job: JobRun) -> float:
        values = [step[name] for step in job.steps[-last if last else None :] if step.get(name) is not None]
        return float(np.mean(values)) if values else math.nan

    return figure


def held_out(job: JobRun) -> float:
    """Mean sampled reward on held-out items at the end."""
    return max(job.evals.values(), key=lambda e: e["version"])["eval_reward_mean"] if job.evals else math.nan


def signal_share(job: JobRun) -> float:
    """Rows of a batch that can have a gradient: the effective batch."""
    shares = [step["num_signal_rows"] / step["num_rows"] for step in job.steps if step.get("num_rows")]
    return float(np.mean(shares)) if shares else math.nan


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is compared. `margin`: differences below it count as equal; None: no such claim is made."""

    label: str
    of: Callable[[JobRun], float]
    margin: float | None = None


REWARD = Figure(f"final reward (mean of the last {LAST_STEPS} steps)", mean_metric("reward_mean", LAST_STEPS), MARGIN)
FIGURES = (
    REWARD,
    Figure("reward on held-out items at the end", held_out, MARGIN),
    Figure("reward, mean over all steps", mean_metric("reward_mean"), MARGIN),
    Figure("sampling_gap: mean abs. log r a token", mean_metric("sampling_gap")),
    Figure("sampling_kl: KL(sampling, trained) a token", mean_metric("sampling_kl")),
    Figure("1 − ess_share: lost effective sample size", lambda job: 1 - mean_metric("ess_share")(job)),
    Figure("clip_fraction", mean_metric("clip_fraction")),
    Figure("staleness, versions", mean_metric("staleness")),
    Figure("share of rows with signal (effective batch)", signal_share),
    Figure("std of rewards", mean_metric("reward_std")),
    Figure("entropy a token", mean_metric("entropy")),
    Figure("gradient norm", mean_metric("grad_norm")),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure over pairs: means of both sides, the mean difference (among − alone), and the results of the tests."""

    label: str
    num: int
    alone: float
    among: float
    difference: Mean
    p: float
    """p of the sign-flip test."""
    equal_p: float
    """p of TOST; nan where no margin is claimed."""
    detectable: float
    """The difference that would have been found with a power of 80 %."""
    spread: float
    """Standard deviation of the values alone; for one job, the effect of another seed."""


def compare(label: str, found: Sequence[Pair], figure: Figure) -> Compared | None:
    """Compares a figure over pairs; None if no pair has it."""
    values = [(figure.of(pair.alone), figure.of(pair.among)) for pair in found]
    values = [(one, other) for one, other in values if not (math.isnan(one) or math.isnan(other))]
    if not values:
        return None
    differences = [other - one for one, other in values]
    return Compared(
        label=label,
        num=len(values),
        alone=float(np.mean([one for one, _ in values])),
        among=float(np.mean([other for _, other in values])),
        difference=statistics.mean_of(differences),
        p=statistics.sign_flip_p(np.array(differences)[:, None]),
        equal_p=math.nan if figure.margin is None else statistics.tost_p(differences, figure.margin),
        detectable=statistics.detectable(differences),
        spread=float(np.std([one for one, _ in values], ddof=1)) if len(values) > 1 else math.nan,
    )


def compared_by_job(found: Sequence[Pair], figure: Figure) -> list[Compared]:
    rows = [compare(name, own, figure) for name, own in by_job(found).items()]
    return [row for row in rows if row is not None]


def compared_pooled(found: Sequence[Pair]) -> list[Compared]:
    rows = [compare(figure.label, found, figure) for figure in FIGURES]
    return [row for row in rows if row is not None]


def uncoupled(found: Sequence[Pair]) -> list[Pair]:
    """Pairs each job alone with its run among others of the next seed: the means stay, and nothing is drawn in common, so that
    the spread includes the seeds' luck. A job of one seed has no such pair."""
    turned = [(own, own[1:] + own[:1]) for own in by_job(found).values() if len(own) > 1]
    return [
        Pair(one.job, one.seed, one.alone, other.among)
        for own, others in turned
        for one, other in zip(own, others, strict=True)
    ]


# ---- curves and histograms ------------------------------------------------------------------------------------------


def curve(jobs: Sequence[JobRun], metric: str) -> list[Mean]:
    """Mean and 95 % interval of each step over the runs that measured it, up to the last step that any run did."""
    columns = [
        [job.steps[i][metric] for job in jobs if i < len(job.steps) and job.steps[i].get(metric) is not None]
        for i in range(max((len(job.steps) for job in jobs), default=0))
    ]
    return [statistics.mean_of(values) if values else Mean(math.nan, math.nan) for values in columns]


def histogram(job: JobRun) -> Floats:
    """Shares of the kept trajectories' rewards in each bin, [BINS]. Zeros if there are none."""
    rewards = [sample.reward for sample in job.samples if sample.reward is not None]
    counts, _ = np.histogram(np.clip(rewards, 0, 1), BINS, (0.0, 1.0))
    return counts / max(1, len(rewards))


def mean_histogram(jobs: Sequence[JobRun]) -> Floats:
    return np.mean([histogram(job) for job in jobs], 0)


def histogram_distance(found: Sequence[Pair]) -> tuple[float, float]:
    """(total variation distance of the two mean histograms, p of the sign-flip test over seeds)."""
    differences_SK = np.array([histogram(pair.among) - histogram(pair.alone) for pair in found])
    return float(np.abs(differences_SK.mean(0)).sum()) / 2, statistics.sign_flip_p(differences_SK)


# ---- where two runs part --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parting:
    """Extent to which a pair of default mode is the same run."""

    first_gradient: float
    """Relative difference of the first gradient's norm: the same trajectories in other batches, rounding alone. nan: no signal."""
    first_step: int | None
    """First step whose rewards differ; None if there is none."""
    same_samples: float
    """Share of the kept trajectories with the same text."""


def parting(pair: Pair) -> Parting:
    both = list(zip(pair.alone.steps, pair.among.steps, strict=False))
    apart = (i for i, (one, other) in enumerate(both, 1) if one.get("reward_mean") != other.get("reward_mean"))
    texts = [{(s.step, s.group, s.sample): s.text for s in job.samples} for job in (pair.alone, pair.among)]
    shared = texts[0].keys() & texts[1].keys()
    same = sum(texts[0][key] == texts[1][key] for key in shared)
    return Parting(_first_gradient(*both[0]) if both else math.nan, next(apart, None), same / max(1, len(shared)))


def _first_gradient(one: Metrics, other: Metrics) -> float:
    if one.get("grad_norm") is None or other.get("grad_norm") is None:
        return math.nan
    return abs(one["grad_norm"] - other["grad_norm"]) / max(abs(one["grad_norm"]), 1e-12)


# ---- staleness, fairness --------------------------------------------------------------------------------------------


def stale_steps(jobs: Iterable[JobRun]) -> int:
    """Steps with a trajectory that another version than the trained one sampled."""
    return sum(step["sampled_versions"] not in ([step["step"] - 1], []) for job in jobs for step in job.steps)


def slowdowns(found: Sequence[Pair]) -> dict[str, float]:
    """Job -> seconds among others over seconds alone, mean over seeds."""
    return {
        name: float(np.mean([pair.among.seconds / pair.alone.seconds for pair in own]))
        for name, own in by_job(found).items()
    }
