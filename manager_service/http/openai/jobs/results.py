"""The results of a job so far: /metrics, /checkpoints, /checkpoints/{version}/content, /ledger, /usage."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from starlette.responses import Response

from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON, declared
from manager_service.http.openai.adapter_content import ZIP, zip_of
from manager_service.http.openai.paging import After, Limit, page, wrong_cursor
from manager_service.http.openai.usage_routes import shown as shown_usage
from manager_service.http.schemas import CheckpointObject, CurvesObject, LedgerObject, Page, UsageObject
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.records.sample_records import CheckpointRecord, Kept

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"], responses={**COMMON, **declared(404)})

Version = Annotated[int, PathParameter(ge=0, le=99_999_999)]
MOST_READ = 8
"""Events that a point is the mean of: of a long job's stretches the rest is not read."""
LEFT_OUT = frozenset({"step", "version"})

CurveColumns = dict[str, list[float | None]]


@router.get("/checkpoints")
async def checkpoints(
    api: Parts, tenant: Tenant, job_id: str, after: After = None, limit: Limit = 10
) -> Page[CheckpointObject]:
    """One a version, from 1; newest first."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    before = None if after is None else _version_of(after, job_id)
    found = await store.read(row, lambda records: records.checkpoints(before=before, limit=limit + 1))
    return page([_shown(row, record) for record in found[:limit]], has_more=len(found) > limit)


def _version_of(checkpoint: str, job: str) -> int:
    """Reads the version in an id. Raises InvalidInput if it is not the id of a checkpoint of the job."""
    owner, _, version = checkpoint.rpartition("@")
    if owner != f"ftckpt-{job}" or not (version.isascii() and version.isdecimal() and len(version) <= 8):
        raise wrong_cursor(checkpoint, "is no checkpoint of this job")
    return int(version)


def _shown(row: JobRow, record: CheckpointRecord) -> CheckpointObject:
    return CheckpointObject(
        id=f"ftckpt-{row.spec.id}@{record.version}",
        created_at=record.created_at,
        fine_tuned_model_checkpoint=f"{row.spec.tuned_model}@{record.version}",
        fine_tuning_job_id=row.spec.id,
        step_number=record.version,
        metrics=record.metrics,
    )


@router.get("/checkpoints/{version}/content", response_class=Response, responses={200: ZIP})
async def checkpoint_content(api: Parts, tenant: Tenant, job_id: str, version: Version) -> Response:
    """`adapter_config.json` and `adapter_model.safetensors`, checked against their sha256."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    return await zip_of(api, row.base, await store.version(row, version))


@router.get("/ledger")
async def ledger(api: Parts, tenant: Tenant, job_id: str) -> LedgerObject:
    """The fate of every trajectory of the job, counted at one moment."""
    store = JobStore(api)
    counts = await store.read(await store.find(tenant.id, job_id), lambda records: records.ledger())
    return LedgerObject.model_validate({"fine_tuning_job_id": job_id, **counts})


@router.get("/usage")
async def usage(api: Parts, tenant: Tenant, job_id: str) -> UsageObject:
    """The job's usage so far."""
    store = JobStore(api)
    return shown_usage(job_id, await store.read(await store.find(tenant.id, job_id), lambda records: records.usage()))


# ---- curves -----------------------------------------------------------------------------------------------------------


@router.get("/metrics")
async def metrics(
    api: Parts, tenant: Tenant, job_id: str, points: Annotated[int, Query(ge=2, le=10_000)] = 500
) -> CurvesObject:
    """A curve of at most `points` points. Of a job with more steps each is the mean over the first few of its stretch."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    starts, stretch = _starts(row, points)
    read = min(stretch, MOST_READ)
    found = await store.read(row, lambda records: records.stretches(starts, read))
    told = [[event.data for event in events if "reward_mean" in event.data] for events in found]
    kept = [(steps, _means(steps)) for steps in told if steps]
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
