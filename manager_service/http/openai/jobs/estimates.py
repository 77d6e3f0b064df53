"""Estimates the needs of a job: before it starts, and while it runs.

Before: tokens by the files' prompts, and answers as long as those of the tenant's jobs that are most like it; seconds by the speed of
the cell's workers when they were busy, as if they worked only for this job.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastapi import APIRouter

from common.wire.messages import WorkerReport
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.openai.jobs.job_checks import build_spec
from manager_service.http.openai.jobs.submission import JobGiven
from manager_service.http.openai.paging import take
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.schemas import EstimateObject
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.records.file_records import FileRecord
from manager_service.records.job_records import MAX_DRAWN, JobSpec, steps_left
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], responses=COMMON, route_class=JsonRoute)

NEWEST = 20
"""Jobs of the tenant among which those like a new one are looked for."""
UNKNOWN_PROMPT = 64
"""Tokens of a prompt that an environment makes."""
LEAST_BUSY_S = 1.0
"""Busy seconds of workers whose speed says something."""


class Tokens(NamedTuple):
    """Tokens of one trajectory."""

    prompt: float
    whole: float  # with what is sampled
    most: float


@router.post("/estimate")
async def estimate(api: Parts, tenant: Tenant, body: JobGiven) -> EstimateObject:
    """Check a job as if it were created, and say what it would need. Nothing is created."""
    spec = await build_spec(api, tenant, body)
    base = api.bases[spec.base_model]
    like = [] if spec.is_supervised else await _jobs_like(api, tenant, spec)
    files = [
        await api.files.get(tenant.id, file) if file else None for file in (spec.training_file, spec.validation_file)
    ]
    length = _mean_length(like)
    trained, measured = (_tokens(base, spec, file, length) for file in files)
    return _estimate(spec, trained, measured, base.cluster.working(), len(like))


async def _jobs_like(api: Api, tenant: TenantRecord, spec: JobSpec) -> list[JobRow]:
    """The tenant's newest jobs on this base model that trained on the same file; if there is none, with such an environment."""
    store = JobStore(api)
    entries = await take(store.newest_first(tenant.id), NEWEST)
    known = [
        row
        async for row in store.rows(tenant.id, entries)
        if row.spec.base_model == spec.base_model and row.spec.env.name == spec.env.name and row.state.version > 0
    ]
    same = [row for row in known if spec.training_file and row.spec.training_file == spec.training_file]
    return same or known


def _mean_length(rows: Sequence[JobRow]) -> float | None:
    """Tokens of a trajectory, the prompt included; None: not known."""
    trajectories = sum(row.state.version * row.spec.hyper.batch_size * row.spec.hyper.group_size for row in rows)
    return sum(row.state.trained_tokens for row in rows) / trajectories if trajectories else None


def _tokens(base: Base, spec: JobSpec, file: FileRecord | None, length: float | None) -> Tokens:
    """`length`: of trajectories that are like this file's."""
    mean, longest = float(UNKNOWN_PROMPT), float(UNKNOWN_PROMPT)
    if file and base.name in file.longest:
        longest = file.longest[base.name]
        mean = file.tokens[base.name] / file.num_items if base.name in file.tokens else longest
    if spec.is_supervised:
        return Tokens(mean, mean, longest)
    hyper, context = spec.hyper, spec.hyper.max_context or base.tokenizer.context
    turns = 1 if spec.env.name == "single_turn" else hyper.max_turns
    most = min(longest + turns * hyper.max_tokens, context)
    expected = min(mean + turns * hyper.max_tokens, context) if length is None else length
    return Tokens(mean, max(mean, min(expected, most)), most)


def num_evaluated(spec: JobSpec) -> int:
    """Answers, or examples, in all evaluations of a job that ends with its last step."""
    hyper = spec.hyper
    between = range(hyper.eval_interval, hyper.num_steps, hyper.eval_interval) if hyper.eval_interval else ()
    return (2 + len(between)) * spec.num_eval_items * (1 if spec.is_supervised else hyper.eval_samples + 1)


def _estimate(
    spec: JobSpec, trained: Tokens, measured: Tokens, workers: Sequence[WorkerReport], num_like: int
) -> EstimateObject:
    hyper, num_measured = spec.hyper, num_evaluated(spec)
    num_trained = hyper.num_steps * hyper.batch_size * hyper.group_size
    sampled = 0.0
    if not spec.is_supervised:
        sampled = num_trained * (trained.whole - trained.prompt) + num_measured * (measured.whole - measured.prompt)
    read = 1 if spec.is_supervised else 2  # a supervised example is only trained on, another is sampled too
    step = read * trained.whole * num_trained / hyper.num_steps
    tokens = step * hyper.num_steps + num_measured * measured.whole
    drawn = MAX_DRAWN if hyper.dynamic_sampling else 1
    most = num_trained * trained.most * (read - 1) * drawn + num_trained * trained.most + num_measured * measured.most
    limit = hyper.max_tokens_total
    return EstimateObject(
        num_steps=hyper.num_steps,
        num_trajectories=num_trained,
        num_evaluated=num_measured,
        sampled_tokens=round(sampled),
        trained_tokens=round(num_trained * trained.whole),
        tokens=round(tokens),
        max_tokens=round(most),
        steps_within_limit=None if limit is None else min(hyper.num_steps, int(limit // step)),
        seconds=seconds_for(sampled, num_trained * trained.whole, workers),
        num_like=num_like,
    )


def seconds_for(sampled: float, trained: float, workers: Sequence[WorkerReport]) -> float | None:
    """None: no worker that this needs has been busy so far."""
    total = 0.0
    for service, counter, amount in (("rollout", "sampled_tokens", sampled), ("trainer", "trained_tokens", trained)):
        if not amount:
            continue
        speed = _tokens_per_s((worker.counters for worker in workers if worker.service == service), counter)
        if not speed:
            return None
        total += amount / speed
    return round(total, 1)


def _tokens_per_s(counters: Iterable[dict[str, float]], counter: str) -> float:
    """The speed of all workers together; 0: not known."""
    return sum(
        counted.get(counter, 0.0) / counted["busy_s"]
        for counted in counters
        if counted.get("busy_s", 0.0) >= LEAST_BUSY_S
    )


def estimated_finish(row: JobRow) -> int | None:
    """Seconds since 1970 at which a running job ends at the speed of its last steps, without its last evaluation; None: not known."""
    state, now = row.state, time.time()
    if state.status != "running" or state.step_s is None or state.stepped_at is None:
        return None
    left = steps_left(row.spec, state)
    if not left:
        return int(now)
    return int(max(state.stepped_at + state.step_s, now) + (left - 1) * state.step_s)
