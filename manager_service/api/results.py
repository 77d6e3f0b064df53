"""The results of a job so far: /checkpoints, /checkpoints/{version}/content, /ledger, /usage."""

import asyncio
import io
import zipfile
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter
from fastapi import Path as PathParameter
from starlette.responses import Response

from common.adapters import PEFT_FILES
from common.errors import CorruptObject, InvalidInput, NotFound
from common.messages import AdapterRef
from common.spelling import quoted
from manager_service.api.context import Parts, Tenant
from manager_service.api.errors import COMMON, ApiError, declared
from manager_service.api.job_store import JobRow, JobStore
from manager_service.api.paging import After, Limit, page
from manager_service.api.schemas import (
    CheckpointObject,
    LedgerObject,
    Page,
    UsageObject,
)
from manager_service.api.usage import shown as shown_usage
from manager_service.jobs.retention import has_version
from manager_service.records import CheckpointRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"], responses={**COMMON, **declared(404)})

_, CONFIG = PEFT_FILES
Version = Annotated[int, PathParameter(ge=0, le=99_999_999)]


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
    responses={200: {"content": {"application/zip": {}}, "description": "A zip that PEFT and vLLM load"}},
)
async def checkpoint_content(api: Parts, tenant: Tenant, job_id: str, version: Version) -> Response:
    """`adapter_config.json` and `adapter_model.safetensors`, checked against their sha256."""
    row = await JobStore(api).find(tenant.id, job_id)
    if row.deleted or not has_version(row.spec, row.state, version):
        raise NotFound(f"the job has no version {version}")
    try:
        files = await api.adapters.read(AdapterRef(tenant.id, job_id, version))
    except CorruptObject as error:
        raise ApiError(503, f"version {version} is damaged: {error}", code="corrupt_adapter") from error
    files[CONFIG] = with_base(files[CONFIG], api.settings.models[row.base.name])
    name = f"{job_id}-{version}.zip"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(await asyncio.to_thread(_zipped, files), media_type="application/zip", headers=headers)


def with_base(config: bytes, where: str) -> bytes:
    """An adapter's configuration that names the hub's model, if that is its base: so `AutoPeftModel` finds it. `where`: of the
    base model, a folder of this machine or a name of the hub."""
    if Path(where).is_dir():
        return config
    return msgspec.json.format(msgspec.json.encode(msgspec.json.decode(config) | {"base_model_name_or_path": where}))


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # weights do not compress
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


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
