"""The results of a job so far: /checkpoints, /checkpoints/{version}/content, /ledger, /usage, /samples."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from starlette.responses import Response

from common.errors import InvalidInput, NotFound
from common.messages import AdapterRef
from common.spelling import quoted
from manager_service.api.adapters import ZIP, zip_of
from manager_service.api.context import Parts, Tenant
from manager_service.api.errors import COMMON, declared
from manager_service.api.job_store import JobRow, JobStore
from manager_service.api.paging import After, Limit, page
from manager_service.api.reading.tasks import Spell
from manager_service.api.schemas import (
    CheckpointObject,
    ConversationObject,
    LedgerObject,
    Page,
    SampleObject,
    TurnObject,
    UsageObject,
)
from manager_service.api.usage import shown as shown_usage
from manager_service.jobs.retention import has_version
from manager_service.records import CheckpointRecord, SampleRecord, Written

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"], responses={**COMMON, **declared(404)})

Version = Annotated[int, PathParameter(ge=0, le=99_999_999)]
Number = Annotated[int, PathParameter(ge=0, lt=2**53)]
BYTES_A_TOKEN = 4
"""By which the work of spelling tokens is estimated."""


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
        raise InvalidInput(
            f"after: {quoted(checkpoint)} is no checkpoint of this job", param="after", code="invalid_cursor"
        )
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


@router.get(
    "/checkpoints/{version}/content",
    response_class=Response,
    responses={200: ZIP},
)
async def checkpoint_content(api: Parts, tenant: Tenant, job_id: str, version: Version) -> Response:
    """`adapter_config.json` and `adapter_model.safetensors`, checked against their sha256."""
    row = await JobStore(api).find(tenant.id, job_id)
    if row.deleted or not has_version(row.spec, row.state, version):
        raise NotFound(f"the job has no version {version}")
    return await zip_of(api, row.base, AdapterRef(tenant.id, job_id, version))


@router.get("/ledger")
async def ledger(api: Parts, tenant: Tenant, job_id: str) -> LedgerObject:
    """The fate of every trajectory of the job, counted at one moment."""
    store = JobStore(api)
    counts = await store.read(await store.find(tenant.id, job_id), lambda records: records.ledger())
    return LedgerObject.model_validate({"fine_tuning_job_id": job_id, **counts})


@router.get("/usage")
async def usage(api: Parts, tenant: Tenant, job_id: str) -> UsageObject:
    """What the job has used so far."""
    store = JobStore(api)
    return shown_usage(job_id, await store.read(await store.find(tenant.id, job_id), lambda records: records.usage()))


@router.get("/samples", response_model=Page[SampleObject])
async def samples(
    api: Parts,
    tenant: Tenant,
    job_id: str,
    version: Annotated[
        int | None, Query(ge=0, le=99_999_999, description="The version that was trained on them; the newest if absent")
    ] = None,
) -> Response:
    """Texts and rewards of two groups a step."""
    store = JobStore(api)
    found = await store.read(await store.find(tenant.id, job_id), lambda records: records.samples(version))
    return Response(_page_of_samples(found), media_type="application/json")


@router.get("/samples/{step}/{group}/{sample}")
async def conversation(
    api: Parts, tenant: Tenant, job_id: str, step: Version, group: Number, sample: Number
) -> ConversationObject:
    """A sample as it was written: turn by turn, token by token. `step`: as `version` in the list of samples."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    encoded = await store.read(row, lambda records: records.samples(step))
    records = await asyncio.to_thread(msgspec.json.decode, encoded, type=list[SampleRecord])
    found = next((one for one in records if (one.group, one.sample) == (group, sample)), None)
    if found is None:
        raise NotFound(f"step {step} kept no sample {sample} of group {group}")
    written = found.written or Written([], [], [])
    asked = Spell(row.base.name, written.tokens)
    spelt: list[str] = await api.helpers.do(tenant, asked, num_bytes=BYTES_A_TOKEN * len(written.tokens))
    shown = SampleObject.model_validate(msgspec.to_builtins(msgspec.structs.replace(found, written=None)))
    return ConversationObject(step=step, sample=shown, turns=_turns(written, spelt), num_dropped=written.num_dropped)


def _turns(written: Written, tokens: Sequence[str]) -> list[TurnObject]:
    """The stretches that have tokens."""
    turns: list[TurnObject] = []
    at = said = 0
    for place, length in enumerate(written.lengths):
        by = "prompt" if place == 0 else "model" if place % 2 else "environment"
        logprobs = written.logprobs[said : said + length] if by == "model" else None
        if length:
            turns.append(TurnObject(by=by, tokens=list(tokens[at : at + length]), logprobs=logprobs))
        at, said = at + length, said + len(logprobs or ())
    return turns


def _page_of_samples(records: bytes) -> bytes:
    """A Page[SampleObject] of SampleRecords in JSON, as they are: to decode those of large groups would stop the event loop."""
    return b'{"object":"list","data":' + records + b',"first_id":null,"last_id":null,"has_more":false}'
