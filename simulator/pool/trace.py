"""Traces: what jobs came when, as JSON lines; drawn from a seed, or taken from logs of public clusters.

    {"at_s": 12.5, "tenant": "t3", "base": "b1", "shape": {"rollout": 8, "train": 16}, "steps": 90, "rollout_s": 240, "train_s": 60,
     "tool_s": 20}

`at_s`: since the trace began; `rollout_s`, `train_s`, `tool_s`: of one step alone, the means; `shape`: GPUs. `turns`, 1 unless given:
parts of its rollouts, with tools after each.

The columns of the logs, as their publishers describe them (github.com/InternLM/AcmeTrace, S-Lab-System-Group/HeliosData,
msr-fiddle/philly-traces):

    Acme, Helios    CSV with user, gpu_num, submit_time (a date), duration (s)
    Philly          JSON, a list of {user, submitted_time, attempts: [{start_time, end_time, detail: [{gpus}]}]}; or a CSV made of it with
                    the columns above, or user, num_gpus, submitted_time, run_time

Of them arrivals, users, numbers of GPUs and durations are taken. The shape of the RL job in it is drawn, as for drawn traces: these logs
know none. Left out are jobs with fewer than two GPUs or shorter than ten minutes, which are no training of this kind.
"""

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

DAY_S = 86_400.0
LEAST_S, LEAST_GPUS = 600.0, 2
TENANTS, BASES = 24, 8
ALIASES = {
    "user": ("user",),
    "gpus": ("gpu_num", "num_gpus"),
    "at": ("submit_time", "submitted_time"),
    "seconds": ("duration", "run_time"),
}
"""Columns by what they hold."""


class JobShape(msgspec.Struct, frozen=True):
    """GPUs of a job: its own for rollouts, and those of the pool worker that trains it."""

    rollout: int
    train: int


SHAPES = {"7B": JobShape(8, 16), "30B": JobShape(80, 128), "235B": JobShape(32, 96)}
"""PlexRL's. Of training GPUs: TP x PP x DP, with EP for 30B. Rollout GPUs follow from its limits, T / 2 (R + T)."""
SHARES = {"7B": 0.6, "30B": 0.25, "235B": 0.15}
"""Assumed shares of jobs in a drawn trace."""
STEP_S = {"7B": 300.0, "30B": 600.0, "235B": 1200.0}
"""Assumed medians of a step's rollouts."""


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a trace."""

    at_s: float
    tenant: str
    base: str
    shape: JobShape
    steps: int
    rollout_s: float
    train_s: float
    tool_s: float = 0.0
    turns: int = 1
    """Parts of a step's rollouts, each with its part of the tools' time after it."""

    @property
    def step_s(self) -> float:
        """The mean time of a strict step alone."""
        return self.rollout_s + self.tool_s + self.train_s

    def __post_init__(self) -> None:
        times = (self.at_s, self.rollout_s, self.train_s, self.tool_s)
        if min(self.steps, self.turns, self.shape.train) < 1 or self.shape.rollout < 0 or self.train_s <= 0:
            raise ValueError("steps, turns, shape.train and train_s must be above 0")
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in times):
            raise ValueError("at_s, rollout_s, train_s and tool_s must be 0 or more")


def draw(seed: int, *, days: float, jobs_per_day: float) -> list[TraceJob]:
    """A trace with bursts of arrivals and a few long jobs: gaps and durations are log-normal; tenants and bases follow Zipf's law."""
    rng = random.Random(f"trace {seed}")
    found: list[TraceJob] = []
    at_s = 0.0
    while True:
        at_s += _log_normal(rng, mean=DAY_S / jobs_per_day, sigma=1.5)
        if at_s >= days * DAY_S:
            return found
        size = rng.choices(list(SHARES), list(SHARES.values()))[0]
        seconds = _log_normal(rng, mean=12 * 3600.0, sigma=1.2)
        tenant = f"t{_zipf(rng, TENANTS)}"
        found.append(_job(rng, at_s, tenant, SHAPES[size], seconds, STEP_S[size]))


def _job(rng: random.Random, at_s: float, tenant: str, shape: JobShape, seconds: float, median_s: float) -> TraceJob:
    """A job that takes about so many seconds alone. Training takes 0.25 of the rollouts' time in the median: a bubble of 80 %."""
    rollout_s = median_s * math.exp(rng.gauss(0, 0.4))
    train_s = rollout_s * 0.25 * math.exp(rng.gauss(0, 0.3))
    tool_s = 20 * math.exp(rng.gauss(0, 0.8)) if rng.random() < 0.4 else 0.0
    steps = max(1, round(seconds / (rollout_s + tool_s + train_s)))
    base = f"b{_zipf(rng, BASES)}-{shape.train}"
    return TraceJob(
        at_s=at_s,
        tenant=tenant,
        base=base,
        shape=shape,
        steps=steps,
        rollout_s=rollout_s,
        train_s=train_s,
        tool_s=tool_s,
    )


def _log_normal(rng: random.Random, *, mean: float, sigma: float) -> float:
    return mean * math.exp(rng.gauss(0, sigma) - sigma * sigma / 2)


def _zipf(rng: random.Random, num: int) -> int:
    weights = list(accumulate(1 / rank for rank in range(1, num + 1)))
    return rng.choices(range(num), cum_weights=weights)[0]


# ---- files ----------------------------------------------------------------------------------------------------------


def write_trace(jobs: Iterable[TraceJob], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(job) + b"\n" for job in jobs))


def read_trace(path: Path, *, seed: int, days: float) -> list[TraceJob]:
    """The jobs of a file's first days, in order of arrival. `seed`: of what a cluster's log lacks. Raises ValueError, naming the line, for
    what is neither a trace nor a known log, and OSError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        jobs = _own(text) if text.lstrip().startswith("{") else _of_log(text, seed)
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from error
    begin = min((job.at_s for job in jobs), default=0.0)
    found = (msgspec.structs.replace(job, at_s=job.at_s - begin) for job in jobs if job.at_s - begin < days * DAY_S)
    if ordered := sorted(found, key=lambda job: job.at_s):
        return ordered
    raise ValueError(f"{path} has no job of {LEAST_GPUS} GPUs or more that took {LEAST_S:g} s or more")


def _own(text: str) -> list[TraceJob]:
    jobs: list[TraceJob] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            jobs += [msgspec.json.decode(line, type=TraceJob)] if line.strip() else []
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from error
    return jobs


def _of_log(text: str, seed: int) -> list[TraceJob]:
    rng = random.Random(f"log {seed}")
    rows = _philly(text) if text.lstrip().startswith("[") else _rows(text)
    jobs: list[TraceJob] = []
    for user, gpus, at_s, seconds in sorted(rows, key=lambda row: row[2]):
        if gpus >= LEAST_GPUS and seconds >= LEAST_S:
            train = 1 << int(math.log2(max(1, gpus * 3 // 4)))
            jobs.append(_job(rng, at_s, user, JobShape(gpus - train, train), seconds, median_s=300.0))
    return jobs


def _rows(text: str) -> Iterator[tuple[str, int, float, float]]:
    """(user, GPUs, time of arrival, seconds) of each row of a CSV."""
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or ()
    columns = {what: next((name for name in names if name in header), None) for what, names in ALIASES.items()}
    if lacking := [" or ".join(ALIASES[what]) for what, name in columns.items() if name is None]:
        raise ValueError(f"no JSON lines, and no CSV with the column {lacking[0]}; it has {', '.join(header)[:200]}")
    for number, row in enumerate(reader, 2):
        user, gpus, at, seconds = (row[columns[what] or ""] for what in ALIASES)
        if gpus and at and seconds:  # a job that never ran has no duration
            try:
                yield user, int(_finite(gpus)), _time(at), _finite(seconds)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _philly(text: str) -> Iterator[tuple[str, int, float, float]]:
    """The same of Philly's JSON. A job's attempts count together; one that never ran, or whose log has holes, is left out."""
    jobs: list[Mapping[str, Any]] = json.loads(text)
    for job in jobs:
        attempts = [each for each in job["attempts"] if each.get("start_time") and each.get("end_time")]
        gpus = max((sum(len(host["gpus"]) for host in each.get("detail", ())) for each in attempts), default=0)
        seconds = sum(_time(each["end_time"]) - _time(each["start_time"]) for each in attempts)
        if attempts and job["submitted_time"] not in (None, "None"):
            yield job["user"], gpus, _time(job["submitted_time"]), seconds


def _time(text: str) -> float:
    """Seconds since 1970 of a date or of a number. One without a zone counts as UTC's."""
    try:
        return _finite(text)
    except ValueError:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _finite(text: str) -> float:
    """Raises ValueError."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text!r} is no number")
    return number
