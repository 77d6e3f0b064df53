"""/v1/files"""

from functools import partial
from itertools import islice
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Form, Request, UploadFile
from starlette.responses import Response, StreamingResponse

from common.errors import InvalidInput
from common.suggestions import quoted
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api, Parts, Tenant
from manager_service.http.errors import COMMON, ApiError, conflict, declared
from manager_service.http.openai.files.file_store import ADAPTER, content_of
from manager_service.http.openai.paging import After, FileLimit, as_json, rest_after, written
from manager_service.http.quota import check_disk
from manager_service.http.reading.adapter_uploads import FoundAdapter, check_finite, header_bytes, refuse_pickle
from manager_service.http.reading.bodies import FormRoute
from manager_service.http.reading.reading_helpers import SLICE_BYTES
from manager_service.http.reading.tasks import ReadAdapter
from manager_service.http.schemas import Deleted, FileObject, Page
from manager_service.http.stores.job_store import JobStore
from manager_service.records.file_records import FileRecord, UploadedAdapter
from manager_service.records.job_records import JobSpec
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/files", tags=["files"], responses=COMMON, route_class=FormRoute)
JSONL = {"content": {"application/jsonl": {}}, "description": "The file as it was uploaded"}
SLICE = 100
"""Records that are read at once."""
MAX_NAME = 255
"""Characters of a file's name that are kept."""


@router.post("", responses=declared(507))
async def upload(
    request: Request,
    api: Parts,
    tenant: Tenant,
    file: UploadFile,
    purpose: Annotated[str, Form()],
    adapter_config: Annotated[str | None, Form(description="With the purpose adapter: its adapter_config.json")] = None,
) -> FileObject:
    """Upload JSONL, one item a line: `{"messages": […], "answer": "95"}`. Every line is checked. With the purpose
    `adapter`, `adapter_model.safetensors` as PEFT writes it, for jobs to start from."""
    if purpose not in ("fine-tune", ADAPTER):
        raise InvalidInput(f"purpose {quoted(purpose)} is not offered: use 'fine-tune' or 'adapter'", param="purpose")
    if any(name.startswith("expires_after") for name in await request.form()):
        raise InvalidInput("expires_after is not offered: a file stays until it is deleted", param="expires_after")
    await check_disk(next(iter(api.bases.values())).gauge)
    limit = api.limits.max_file_bytes
    if (file.size or 0) > limit:
        raise ApiError(413, f"a file has at most {limit} bytes", code="file_too_large", param="file")
    name = shown_name(file.filename or "upload.jsonl")
    is_adapter = purpose == ADAPTER
    check = _check_adapter(api, tenant, file, adapter_config) if is_adapter else api.files.check(tenant, file)
    return shown(await api.files.create(tenant, name, file, await unless_gone(request, check)))


async def _check_adapter(api: Api, tenant: TenantRecord, file: UploadFile, config: str | None) -> UploadedAdapter:
    """Raises InvalidInput for what is no adapter that a job could start from. `config`: the text of adapter_config.json."""
    if config is None:
        raise InvalidInput(
            "send the text of adapter_config.json too, as the form's field adapter_config", param="adapter_config"
        )
    read, size = await content_of(file)
    start = await read(0, 8)
    refuse_pickle(file.filename or "", start)
    data_at = header_bytes(start, size)
    header = await read(0, data_at)
    task = ReadAdapter(header, size, config)
    found = msgspec.convert(await api.helpers.do(tenant, task, num_bytes=len(header) + len(config)), FoundAdapter)
    for at in range(data_at, size, SLICE_BYTES):
        slice_ = await read(at, min(SLICE_BYTES, size - at))
        await api.helpers.beside(tenant, partial(check_finite, slice_, found.dtype))
    return found.adapter


@router.get("", response_model=Page[FileObject])
async def list_files(
    api: Parts,
    tenant: Tenant,
    after: After = None,
    limit: FileLimit = 100,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """The tenant's files, newest first."""
    ids = await api.files.ids(tenant.id, newest_first=order == "desc")
    rest = rest_after(ids, after) if ids else []
    found = dict[str, bytes]()
    for start in range(0, len(rest), SLICE):  # a few at a time: the event loop has others to serve
        if len(found) > limit:
            break
        records = await api.files.several(list(rest[start : start + SLICE]))
        found |= {record.id: as_json(shown(record)) for record in records if purpose in (None, record.purpose)}
    return written(dict(islice(found.items(), limit)), has_more=len(found) > limit)


@router.get("/{file_id}", responses=declared(404))
async def retrieve(api: Parts, tenant: Tenant, file_id: str) -> FileObject:
    return shown(await api.files.get(tenant.id, file_id))


@router.get("/{file_id}/content", response_class=Response, responses={**declared(404), 200: JSONL})
async def content(api: Parts, tenant: Tenant, file_id: str) -> Response:
    record = await api.files.get(tenant.id, file_id)
    length = {"Content-Length": str(record.num_bytes)}
    kind = "application/jsonl" if record.adapter is None else "application/octet-stream"
    return StreamingResponse(api.files.parts(record), media_type=kind, headers=length)


@router.delete("/{file_id}", responses=declared(404, 409))
async def delete(api: Parts, tenant: Tenant, file_id: str) -> Deleted:
    """Delete a file, unless an unfinished job needs it."""
    await api.files.get(tenant.id, file_id)

    def needs(spec: JobSpec) -> bool:
        return file_id in (spec.training_file, spec.validation_file, spec.adapter_file)

    if job := await JobStore(api).unfinished_user(tenant.id, needs):
        raise conflict(f"the job {job} needs this file until it has ended", code="file_in_use")
    await api.files.delete(tenant.id, file_id)
    return Deleted(id=file_id, object="file")


def shown(record: FileRecord) -> FileObject:
    return FileObject.model_validate(msgspec.structs.asdict(record) | {"bytes": record.num_bytes})


def shown_name(filename: str) -> str:
    """A file's name without what a screen would not show, or show in another order."""
    return "".join(sign if sign.isprintable() else "_" for sign in filename)[:MAX_NAME]
