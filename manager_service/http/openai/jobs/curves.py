"""GET /v1/fine_tuning/jobs/{id}/metrics: the figures of all steps as columns, in as few points as a curve needs."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON, declared
from manager_service.http.schemas import CurvesObject
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.records.sample_records import EventRecord, Kept

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], responses={**COMMON, **declared(404)})

MOST_READ = 8
"""Events that a point is the mean of: of a long job's stretches the rest is not read."""
LEFT_OUT = frozenset({"step", "version"})

CurveColumns = dict[str, list[float | None]]


@router.get("/{job_id}/metrics")
async def metrics(
    api: Parts, tenant: Tenant, job_id: str, points: Annotated[int, Query(ge=2, le=10_000)] = 500
) -> CurvesObject:
    """A curve of at most `points` points. Of a job with more steps each is the mean over the first few of its stretch."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    starts, stretch = _starts(row, points)
    read = min(stretch, MOST_READ)
    found = await store.read(row, lambda records: records.stretches(starts, read))
    kept = [(steps, _means(steps)) for steps in map(_steps, found) if steps]
    events = [event for events in found for event in events]
    return CurvesObject(
        fine_tuning_job_id=job_id,
        step=[int(steps[-1]["step"]) for steps, _ in kept],
        metrics=_columns([means for _, means in kept]),
        evaluations=[event.data for event in events if "eval_n" in event.data],
        steps_a_point=stretch,
        last_event=str(row.state.num_events) if row.state.num_events else None,
    )


def _starts(row: JobRow, points: int) -> tuple[list[int], int]:
    """The first event of each stretch, and its length."""
    first, last = row.state.kept.get("events", Kept()).dropped + 1, row.state.num_events
    stretch = max(1, math.ceil((last + 1 - first) / points))
    return list(range(first, last + 1, stretch)), stretch


def _steps(events: Iterable[EventRecord]) -> list[dict[str, Any]]:
    """The figures of those events that tell of a step."""
    return [event.data for event in events if "reward_mean" in event.data]


def _means(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of every figure, over the steps that have it."""
    names = {name for step in steps for name in step} - LEFT_OUT
    values = {name: [step[name] for step in steps if _is_number(step.get(name))] for name in names}
    return {name: math.fsum(found) / len(found) for name, found in values.items() if found}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _columns(points: Sequence[dict[str, float]]) -> CurveColumns:
    names = sorted({name for point in points for name in point})
    return {name: [point.get(name) for point in points] for name in names}
