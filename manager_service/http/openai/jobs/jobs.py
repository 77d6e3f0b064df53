"""/v1/fine_tuning/jobs: create, list, retrieve, cancel, pause, resume."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from common.errors import NotFound
from manager_service.http.context import Api, Parts, Tenant
from manager_service.http.errors import COMMON, ApiError, conflict, declared
from manager_service.http.openai.jobs import integrations
from manager_service.http.openai.jobs.estimates import estimated_finish
from manager_service.http.openai.jobs.hyperparameters import described
from manager_service.http.openai.jobs.job_checks import build_spec
from manager_service.http.openai.jobs.submission import JobGiven
from manager_service.http.openai.paging import After, Limit, as_json, page, take, written, wrong_cursor
from manager_service.http.quota import check_quota, check_room, check_stored
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.schemas import HyperparameterObject, JobObject, Page
from manager_service.http.stores.job_store import JobRow, JobStore, Once
from manager_service.records.job_records import FINAL, JobSpec, JobState, Status
from manager_service.records.receivers import Receivers
from manager_service.records.sample_records import Kept
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], responses=COMMON, route_class=JsonRoute)

hyperparameters = APIRouter(prefix="/v1/fine_tuning/hyperparameters", tags=["jobs"], responses=COMMON)

POLL_S = 0.03
READ_AHEAD = 20
"""Jobs whose sizes are read at a time."""
PAGE_BYTES = 1 << 20
"""Bytes of one page, unless its first job has more: a grader's source has up to 240 KB."""

JobAction = Literal["cancel", "pause", "resume"]
ALLOWED: dict[JobAction, tuple[Status, ...]] = {
    "cancel": ("validating_files", "queued", "running", "paused"),
    "pause": ("validating_files", "queued", "running"),
    "resume": ("paused",),
}


@hyperparameters.get("")
async def list_hyperparameters(
    tenant: Tenant, method: Literal["reinforcement", "supervised"] = "reinforcement"
) -> Page[HyperparameterObject]:
    """All that a job of this method may be given, with defaults and limits."""
    found = described(supervised=method == "supervised")
    return page([HyperparameterObject(**each) for each in found], has_more=False)


@router.post("", responses=declared(409, 429))
async def create(
    api: Parts,
    tenant: Tenant,
    body: JobGiven,
    idempotency_key: Annotated[str | None, Header(max_length=512)] = None,
) -> JobObject:
    """Check everything, then queue the job. The same Idempotency-Key gives the same job."""
    store = JobStore(api)
    once = None if idempotency_key is None else Once(idempotency_key, _fingerprint(body))
    known = await store.known(tenant.id, once) if once else None
    if known is None:
        spec, now = await _checked(api, tenant, body), time.time()
        spec = msgspec.structs.replace(spec, created_at=int(now))
        known = await store.create(api.bases[spec.base_model], spec, score=now, once=once)
        if known is None:
            return shown(JobRow(api.bases[spec.base_model], spec, JobState()))
    assert once is not None
    return shown(await _first(store, tenant, known, once))


async def _checked(api: Api, tenant: TenantRecord, body: JobGiven) -> JobSpec:
    spec = await build_spec(api, tenant, body)
    base = api.bases[spec.base_model]
    await check_quota(base.redis, base.cell, tenant)
    await check_room(base.gauge)
    await check_stored(api.stored, tenant)
    if not spec.integrations:
        return spec
    keys = await Receivers(api.redis).keys(tenant.id)
    return msgspec.structs.replace(spec, notes=(*spec.notes, *integrations.kept_here(spec, keys)))


async def _first(store: JobStore, tenant: TenantRecord, known: str, once: Once) -> JobRow:
    """The job that the first request with this key made. Raises ApiError 409 if that one had another body."""
    job, _, fingerprint = known.partition(" ")
    if fingerprint != once.fingerprint:
        raise conflict("this Idempotency-Key was used with another body", code="idempotency_key_reused")
    return await store.find(tenant.id, job)


def _fingerprint(body: JobGiven) -> str:
    return hashlib.sha256(json.dumps(body.model_dump(), sort_keys=True).encode()).hexdigest()


@router.get("", response_model=Page[JobObject])
async def list_jobs(request: Request, api: Parts, tenant: Tenant, after: After = None, limit: Limit = 20) -> Response:
    """Newest first; fewer than `limit` if their methods are large. `metadata[key]=value` lists only jobs that carry it."""
    wanted, found, num_bytes = _metadata_filter(request), dict[str, bytes](), 0
    async for row in _rows(JobStore(api), tenant, after):
        if wanted.items() <= row.spec.metadata.items():
            if len(found) == limit:
                return written(found, has_more=True)
            following = as_json(shown(row))
            num_bytes += len(following)
            if found and num_bytes > PAGE_BYTES:
                return written(found, has_more=True)
            found[row.spec.id] = following
    return written(found, has_more=False)


async def _rows(store: JobStore, tenant: TenantRecord, after: str | None) -> AsyncIterator[JobRow]:
    entries = store.newest_first(tenant.id, await _known(store, tenant, after))
    while some := await take(entries, READ_AHEAD):
        async for row in store.rows(tenant.id, some):
            yield row


async def _known(store: JobStore, tenant: TenantRecord, after: str | None) -> str | None:
    """The cursor. Raises InvalidInput if it is no job of the tenant's."""
    if after is None:
        return None
    try:
        return (await store.find(tenant.id, after)).spec.id
    except NotFound as error:
        raise wrong_cursor(after) from error


def _metadata_filter(request: Request) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    return {key[9:-1]: value for key, value in pairs if key.startswith("metadata[") and key.endswith("]")}


@router.get("/{job_id}", responses=declared(404))
async def retrieve(api: Parts, tenant: Tenant, job_id: str) -> JobObject:
    return shown(await JobStore(api).find(tenant.id, job_id))


@router.post("/{job_id}/cancel", responses=declared(404, 409))
async def cancel(api: Parts, tenant: Tenant, job_id: str) -> JobObject:
    """Stop the job; its versions stay."""
    return await _command(api, tenant, job_id, "cancel")


@router.post("/{job_id}/pause", responses=declared(404, 409))
async def pause(api: Parts, tenant: Tenant, job_id: str) -> JobObject:
    """Free the workers; half-finished work is kept."""
    return await _command(api, tenant, job_id, "pause")


@router.post("/{job_id}/resume", responses=declared(404, 409))
async def resume(api: Parts, tenant: Tenant, job_id: str) -> JobObject:
    """Go on where the job was paused."""
    return await _command(api, tenant, job_id, "resume")


async def _command(api: Api, tenant: TenantRecord, job: str, action: JobAction) -> JobObject:
    """Ask the owner, and wait a little for it to act. Raises ApiError 409 in the wrong state."""
    store = JobStore(api)
    row = await store.find(tenant.id, job)
    if row.state.status not in ALLOWED[action]:
        raise _wrong_state(row, action)
    await store.send(row, action)
    deadline = time.monotonic() + api.limits.command_wait_s
    while time.monotonic() < deadline:
        now = await store.find(tenant.id, job)
        if now.state.epoch > row.state.epoch or now.state.status in FINAL:
            break
        await asyncio.sleep(POLL_S)
    return shown(await store.find(tenant.id, job))


def _wrong_state(row: JobRow, action: JobAction) -> ApiError:
    if row.state.status in FINAL:
        return conflict(f"the job has ended ({row.state.status}): there is nothing to {action}", code="wrong_job_state")
    possible = " or ".join(ALLOWED[action])
    return conflict(
        f"the job is {row.state.status}: {action} is possible while it is {possible}", code="wrong_job_state"
    )


def shown(row: JobRow) -> JobObject:
    spec, state = row.spec, row.state
    same = msgspec.structs.asdict(state) | msgspec.structs.asdict(spec)  # under the same names
    return JobObject.model_validate(
        same
        | {
            "estimated_finish": estimated_finish(row),
            "model": spec.model or spec.base_model,
            "fine_tuned_model": None if state.version < 1 or row.deleted else spec.tuned_model,
            "organization_id": spec.tenant,
            "hyperparameters": spec.method[spec.method["type"]]["hyperparameters"],
            "error": state.error and msgspec.structs.asdict(state.error),
            "integrations": [integrations.shown(one) for one in spec.integrations],
            "user_provided_suffix": spec.suffix or None,
            "num_steps": spec.hyper.num_steps,
            "stopped_early": state.stop and state.stop.reason,
            "first_eval_reward": state.first_eval,
            "last_eval_reward": state.last_eval,
            "dropped_events": state.kept.get("events", Kept()).dropped,
            "dropped_samples": state.kept.get("samples", Kept()).dropped,
        }
    )
