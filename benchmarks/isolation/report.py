"""Writes the report in Markdown, which answers a referee's questions about shared training point by point from the runs."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._report import Goal, number
from benchmarks.isolation import findings
from benchmarks.isolation.findings import LEVEL, MARGIN, Bytes, Compared, Pair, Parting
from benchmarks.isolation.jobs import BROKEN, Job
from benchmarks.isolation.runs import MODES, STATISTICAL, Mode, Neighbour, Run, Settings
from benchmarks.isolation.statistics import holm
from simulator.calibration import jain


@dataclass(frozen=True, slots=True)
class Evidence:
    """Settings, runs and pairs from which the answers are made."""

    settings: Settings
    runs: Sequence[Run]
    pairs: Mapping[Mode, Sequence[Pair]]

    @classmethod
    def of(cls, settings: Settings, runs: Sequence[Run]) -> "Evidence":
        return cls(settings, runs, {mode: findings.pairs(runs, mode) for mode in MODES})

    @property
    def statistical(self) -> dict[Mode, Sequence[Pair]]:
        """The modes that were measured and are compared by tests."""
        return {mode: self.pairs[mode] for mode in STATISTICAL if self.pairs[mode]}

    @property
    def neighbours(self) -> list[Neighbour]:
        return [other for run in self.runs for other in run.others]

    @property
    def kills(self) -> list[str]:
        return [name for run in self.runs if run.mode == "deterministic" for name in run.kills]


TITLES: Mapping[Mode, str] = {
    "deterministic": "deterministic mode",
    "default": "default mode, float32",
    "bfloat16": "default mode, bfloat16",
}


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals(evidence: Evidence) -> list[Goal]:
    """Goals that the runs at hand can judge."""
    found: list[Goal] = []
    if exact := evidence.pairs["deterministic"]:
        differ = sum(row.num_versions - row.same for row in map(findings.same_bytes, exact))
        found.append(Goal("deterministic: versions whose bytes differ", differ, 0, more_is_better=False))
    for mode, pairs in evidence.statistical.items():
        found += rewards_goals(mode, pairs)
    failed = sum(job.status != "succeeded" for run in evidence.runs for job in run.jobs)
    return [*found, Goal("watched jobs that failed", failed, 0, more_is_better=False)]


def rewards_goals(mode: Mode, pairs: Sequence[Pair]) -> list[Goal]:
    by_job = findings.compared_by_job(pairs, findings.REWARD)
    pooled = findings.compare("", pairs, findings.REWARD)
    if pooled is None:
        return []
    found = [
        Goal(f"{mode}: p of a difference in final reward, all pairs", pooled.p, LEVEL),
        Goal(f"{mode}: the same for each job, the least, Holm", min(holm([row.p for row in by_job])), LEVEL),
    ]
    if not math.isnan(pooled.equal_p):
        what = f"{mode}: p of TOST, margin ± {MARGIN:g}, all pairs"
        found.append(Goal(what, pooled.equal_p, LEVEL, more_is_better=False))
    return found


# ---- the report -----------------------------------------------------------------------------------------------------


def report(evidence: Evidence, watched: Sequence[Job], command: str) -> str:
    sections = [introduction(evidence, watched, command), verdicts(evidence)]
    if evidence.pairs["deterministic"]:
        sections.append(exactness(evidence))
    for mode, pairs in evidence.statistical.items():
        sections += [convergence(evidence, mode, pairs), off_policy(mode, pairs), batching(mode, pairs)]
    if evidence.statistical:
        sections.append(fairness(evidence))
    sections += [interference(evidence), limits()]
    return "\n\n".join(sections) + "\n"


def introduction(evidence: Evidence, watched: Sequence[Job], command: str) -> str:
    s = evidence.settings
    loads = sorted(run.load for run in evidence.runs)
    rows = [(job.name, job.tenant, job.skill, job.reward, told(job)) for job in watched]
    return f"""# Is sharing harmless?

Made by `{command}` from {len(evidence.runs)} runs, at load averages of {loads[0]:.1f} to {loads[-1]:.1f}. Each of {len(watched)} jobs
trains alone, then among {s.num_jobs}: the {len(watched)}, each of a tenant of its own, and {s.num_jobs - len(watched)} others of
{-(-(s.num_jobs - len(watched)) // 3)} other tenants, which go on until the last watched job has ended. {len(BROKEN)} more jobs go wrong on
purpose. Alone and among others a job has the same seed, so that it draws the same items and the same random numbers: whatever
differs was done by sharing. Deterministic mode: {s.deterministic_steps} steps, one seed. Default mode, in float32 and with the base
model in bfloat16: {s.default_steps} steps, {seeds_told(evidence)}.

{table(("job", "tenant", "skill", "reward", "hyperparameters"), rows)}"""


def seeds_told(evidence: Evidence) -> str:
    counts = [f"{num_seeds(pairs)} seeds ({mode})" for mode, pairs in evidence.statistical.items()]
    return " and ".join(counts) or "not measured"


def num_seeds(pairs: Sequence[Pair]) -> int:
    return len({pair.seed for pair in pairs})


def told(job: Job) -> str:
    return ", ".join(f"{name} {value}" for name, value in job.hyper.items())


def verdicts(evidence: Evidence) -> str:
    rows = [(goal.what, *limits_of(goal), "reached" if goal.reached else "**missed**") for goal in goals(evidence)]
    return "## In short\n\n" + table(("goal", "measured", "wanted", ""), rows)


def limits_of(goal: Goal) -> tuple[str, str]:
    return number(goal.measured), f"{'≥' if goal.more_is_better else '≤'} {number(goal.limit)}"


def exactness(evidence: Evidence) -> str:
    rows = [findings.same_bytes(pair) for pair in evidence.pairs["deterministic"]]
    shapes = {run.sharing: run.workers for run in evidence.runs if run.mode == "deterministic"}
    killed = ", ".join(f"{name} {times}×" for name, times in Counter(evidence.kills).items()) or "nothing"
    lines = [(row.job, str(row.num_versions), str(row.same), f"`{row.last[:16]}`") for row in rows]
    return f"""## Does another tenant change a single bit of my adapter? (deterministic mode)

{exact_answer(rows)} Compared are the sha256 of the adapter's, the configuration's and the optimiser's file of every version, alone on
{workers(shapes["alone"])}, and among {evidence.settings.num_jobs} on {workers(shapes["among"])} with fused training, evaluations beside
it, and these ends of processes on the way: {killed}. {accompanied(evidence, "deterministic")}

{table(("job", "versions", "same bytes", "sha256 of the last adapter, alone"), lines)}"""


def accompanied(evidence: Evidence, mode: Mode) -> str:
    """Says how far neighbours really shared engine and trainer with the watched jobs."""
    shares = [run.accompanied for run in evidence.runs if run.mode == mode and run.accompanied]
    if not shares:
        return ""
    engine, trainer = (100 * float(np.mean([share[service] for share in shares])) for service in ("rollout", "trainer"))
    return f"""Other tenants' work was in the same worker at the same time for {engine:.0f} % of what the watched
jobs spent in rollout workers, and for {trainer:.0f} % of what they spent in trainers."""


def exact_answer(rows: Sequence[Bytes]) -> str:
    bad = [row.job for row in rows if row.same < row.num_versions]
    if not bad:
        return f"No: all {sum(row.num_versions for row in rows)} versions of {len(rows)} jobs are the same bytes."
    return f"**Yes, of {', '.join(bad)}.** This breaks invariant I8."


def convergence(evidence: Evidence, mode: Mode, found: Sequence[Pair]) -> str:
    by_job = findings.compared_by_job(found, findings.REWARD)
    adjusted = holm([row.p for row in by_job])
    jobs = [(*compared(row), number(p), number(row.spread)) for row, p in zip(by_job, adjusted, strict=True)]
    pooled = findings.compared_pooled(found)
    all_ps = holm([row.p for row in pooled])
    total = [(*compared(row), number(p)) for row, p in zip(pooled, all_ps, strict=True)]
    head = ("alone", "among", "difference, 95 %", "p", f"TOST p, ± {MARGIN:g}", "detectable", "p, Holm")
    tests = num_seeds(found)
    return f"""## Does sharing change how a job learns? ({TITLES[mode]})

{convergence_answer(pooled)} {accompanied(evidence, mode)}

![reward curves]({mode}_reward_curves.png)

![final reward]({mode}_final_reward.png)

Final reward is the mean of the last {findings.LAST_STEPS} steps' training rewards.

{table(("job", *head, "sd over seeds"), jobs)}

Over all pairs of job and seed:

{table(("figure", *head), total)}

{uncoupled_answer(found)}

How it is tested. A pair is one job with one seed, alone and among others. *p* is that of a sign-flip permutation test of the paired
differences (null hypothesis: sharing changes nothing; two-sided; {tests} seeds alone cannot give less than {2 / 2**tests:.3g} for one
job, which is why all pairs are also tested together), then adjusted by Holm. Because finding no difference proves no equality, *TOST*
(two one-sided t-tests) has the opposite null hypothesis, that the means differ by {MARGIN:g} or more: below {LEVEL:g} they are
equal within that margin, a twentieth of the reward's range. *Detectable*: the difference that a t-test of so many pairs finds in
80 % of the cases. *Sd over seeds*: how far two seeds of the job are apart without any sharing, the scale to judge by."""


def convergence_answer(pooled: Sequence[Compared]) -> str:
    row = next(row for row in pooled if row.label == findings.REWARD.label)
    changed = "a significant difference" if row.p < LEVEL else "no significant difference"
    equal = "equal within the margin" if row.equal_p < LEVEL else "not shown to be equal within the margin"
    return f"""The final reward shows {changed} (p = {number(row.p)} over {row.num} pairs), and the two are {equal}
(TOST p = {number(row.equal_p)}): {row.alone:.3f} alone, {row.among:.3f} among others, difference {interval(row)}."""


def uncoupled_answer(found: Sequence[Pair]) -> str:
    row = findings.compare("", findings.uncoupled(found), findings.REWARD)
    if row is None:
        return ""
    return f"""The two runs of a pair draw the same random numbers, which makes the comparison sharp. Without that help, each job alone
against its run among others with another seed, the seeds' luck is in the spread: the final rewards differ by {interval(row)}
(TOST p = {number(row.equal_p)}, detectable {number(row.detectable)})."""


def off_policy(mode: Mode, found: Sequence[Pair]) -> str:
    jobs = [job for pair in found for job in (pair.alone, pair.among)]
    steps = sum(len(job.steps) for job in jobs)
    stale = findings.stale_steps(jobs)
    distances = {name: findings.histogram_distance(own) for name, own in findings.by_job(found).items()}
    adjusted = holm([p for _, p in distances.values()])
    rows = [
        (name, number(distance), number(p), number(q))
        for (name, (distance, p)), q in zip(distances.items(), adjusted, strict=True)
    ]
    return f"""## Is training less on-policy when it is shared? ({TITLES[mode]})

{stale} of {steps} steps used a trajectory of another version than the one they trained: a job waits for its own trajectories only, so
sharing adds time, not staleness. What is left between the policy that samples and the one that trains is rounding; the figures
(`sampling_gap`, `sampling_kl`, `ess_share`, `clip_fraction`) are in the table above.

![divergence]({mode}_divergence.png)

## Do the rewards keep their distribution, and batches their size? ({TITLES[mode]})

Histograms of the rewards of two groups a step, over all seeds; their total variation distance, and the p of the sign-flip test over
seeds. The effective batch (rows with signal) is in the table above.

![reward histograms]({mode}_reward_histograms.png)

{table(("job", "distance", "p", "p, Holm"), rows)}"""


def batching(mode: Mode, found: Sequence[Pair]) -> str:
    parted = [findings.parting(pair) for pair in found]
    same = sum(pair.alone.sha256[-1] == pair.among.sha256[-1] for pair in found)
    first = [row.first_gradient for row in parted if not math.isnan(row.first_gradient)]
    return f"""## What does batching with strangers do to the numbers? ({TITLES[mode]})

Rows of other jobs in a batch change the order of sums, and with it last bits. The first step's gradient, whose trajectories are
those of version 0, differs in its norm by {number(max(first, default=math.nan))} (relative) at most, median
{number(float(np.median(first)) if first else math.nan)}. {first_steps(parted)} Of the kept trajectories
{100 * np.mean([row.same_samples for row in parted]):.1f} % have the same text to the end. {same} of {len(parted)} final adapters are the
same bytes; deterministic mode, which fixes shapes and order, makes all of them so."""


def first_steps(parted: Sequence[Parting]) -> str:
    """Says where the pairs' rewards part."""
    steps = [row.first_step for row in parted if row.first_step is not None]
    if not steps:
        return f"In none of {len(parted)} pairs did such a difference change the reward of any step: the samples are the same."
    return f"""Once such a difference moves a sampled token, the two runs are different draws from the same process: in {len(steps)} of
{len(parted)} pairs a step's reward differs, first at step {np.median(steps):.0f} (median)."""


def fairness(evidence: Evidence) -> str:
    slow = findings.slowdowns([pair for pairs in evidence.statistical.values() for pair in pairs])
    mean = float(np.mean(list(slow.values())))
    rows = [(name, f"{value:.1f}", f"{value / mean:.2f}") for name, value in slow.items()]
    index = jain([1 / value for value in slow.values()])
    return f"""## Who pays for sharing?

Time among {evidence.settings.num_jobs} over time alone, on the same workers, from submission to end. Each watched tenant has
one job and each other tenant three, all of one weight. Jain's index of the watched jobs' speeds relative to alone: {index:.3f}.

{table(("job", "slowdown", "of the mean"), rows)}"""


def interference(evidence: Evidence) -> str:
    names = [job.name for job in BROKEN]
    ends = Counter((o.name, o.status, o.error.split("\n")[0][:110]) for o in evidence.neighbours if o.name in names)
    rows = [(name, f"{count}× {status}", error) for (name, status, error), count in ends.items()]
    others = [other for other in evidence.neighbours if other.name not in names]
    gone = sum(other.status in ("failed", "cancelled") for other in others)
    failed = sum(job.status != "succeeded" for run in evidence.runs for job in run.jobs)
    return f"""## Does a neighbour's failure reach me?

{failed} of {sum(len(run.jobs) for run in evidence.runs)} watched jobs failed. Beside them, in every run among others:

{table(("neighbour", "ended", "why"), rows)}

Of the {len(others)} other neighbours {gone} failed or were cancelled before the watched jobs had ended; they made
{sum(other.steps for other in others):,} steps meanwhile."""


def limits() -> str:
    return """## What this does not show

- The base model is `tiny`, on CPUs. A GPU's kernels round in other places; `sampling_gap` and `ess_share` of every step say by how
  much, and beyond a bound importance weights are truncated.
- Deterministic mode holds for the embedded engine, and for strict versions (`max_staleness` 0).
- Rewards of the tasks are bounded by 1: differences near that ceiling are small for every system. The detectable differences say
  what could have been seen."""


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def compared(row: Compared) -> tuple[str, ...]:
    return (
        *(row.label, number(row.alone), number(row.among), interval(row)),
        *(number(row.p), number(row.equal_p), number(row.detectable)),
    )


def interval(row: Compared) -> str:
    half = "" if math.isnan(row.difference.half) else f" ± {row.difference.half:.2g}"
    return f"{row.difference.value:+.2g}{half}"


def workers(shape: dict[str, int]) -> str:
    return ", ".join(f"{count} {service}" for service, count in shape.items()) + " worker(s)"
