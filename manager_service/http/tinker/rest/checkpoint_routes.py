"""Routes of one checkpoint: delete it, let it expire, download its version."""

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from common.errors import InvalidInput, NotFound
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import ApiError
from manager_service.http.stores.run_store import Source, change_checkpoint
from manager_service.http.stores.tinker_names import Path, parse_path, ttl_fault
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import TtlBody, read
from manager_service.http.tinker.rest.file_links import ARCHIVE, VALID_S, Grant, download, file_names, sign, verified
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix=PREFIX, include_in_schema=False)

ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.delete(ONE)
async def delete_checkpoint(run_id: str, kind: str, name: str, tenant: Tenant, tinker: Tinker) -> Response:
    """Its version goes when nothing else names it."""
    return await _change(tinker, tenant, _of_run(run_id, kind, name), deletes=True)


@router.put(f"{ONE}/ttl")
async def set_ttl(request: Request, run_id: str, kind: str, name: str, tenant: Tenant, tinker: Tinker) -> Response:
    ttl_s = (await read(request, TtlBody)).ttl_seconds
    if fault := ttl_fault(ttl_s):
        raise InvalidInput(fault, param="ttl_seconds")
    expires_at = None if ttl_s is None else int(time.time()) + ttl_s
    return await _change(tinker, tenant, _of_run(run_id, kind, name), expires_at=expires_at)


async def _change(tinker: Records, tenant: TenantRecord, path: Path, **to: Any) -> Response:
    run, checkpoint = await tinker.runs.checkpoint(tenant.id, path)
    await change_checkpoint(run, checkpoint, tinker.futures[run.base.name].answered.of(run.id, 0), **to)
    return answer({})


@router.get(f"{ONE}/external_weights_urls")
async def external_weights_urls(
    request: Request, run_id: str, kind: str, name: str, api: Parts, tenant: Tenant, tinker: Tinker
) -> Response:
    """A signed url for each file of the version."""
    path, expires = parse_path(f"tinker://{run_id}/{kind}/{name}"), _expires()
    source = await tinker.runs.source(tenant.id, str(path))
    files = await file_names(api, source.adapter)
    urls = {file: await _url(request, tinker, path, source, file, expires) for file in files}
    return answer({"urls": urls, "expires": expires.isoformat()})


@router.get(f"{ONE}/archive")
async def archive(
    request: Request, run_id: str, kind: str, name: str, api: Parts, tenant: Tenant, tinker: Tinker
) -> Response:
    """Clients up to 0.30 download a tar of all files."""
    path, expires = parse_path(f"tinker://{run_id}/{kind}/{name}"), _expires()
    source = await tinker.runs.source(tenant.id, str(path))
    await file_names(api, source.adapter)
    url = await _url(request, tinker, path, source, ARCHIVE, expires)
    return Response(status_code=302, headers={"Location": url, "Expires": format_datetime(expires, usegmt=True)})


@router.get("/signed/{token}", name="signed_file")
async def signed_file(request: Request, token: str, api: Parts, tinker: Tinker) -> Response:
    """Without a key: the url is the permission. It ends with the checkpoint."""
    grant = verified(await tinker.signing_key.get(), token)
    if grant is None:
        raise ApiError(403, "this url is not as it was signed here: ask for another", code="bad_signature", retry=False)
    if grant.expires_at <= time.time():
        raise ApiError(403, "this url has expired: ask for another", code="expired", retry=False)
    source = await tinker.runs.source(grant.tenant, grant.path)
    if source.adapter.version != grant.version:
        raise NotFound(f"{grant.path} was saved again since this url was signed: ask for another")
    request.scope["is_signed"] = True
    return await download(api, source, grant.file)


def _of_run(run_id: str, kind: str, name: str) -> Path:
    if run_id.startswith("ftjob-"):
        raise InvalidInput("a managed job's versions go with its model: DELETE /v1/models/ft:…", param="run_id")
    return parse_path(f"tinker://{run_id}/{kind}/{name}")


def _expires() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=VALID_S)


async def _url(request: Request, tinker: Records, path: Path, source: Source, file: str, expires: datetime) -> str:
    """On the host that the client asked. A proxy that ends TLS passes the header `Host` on, and says `X-Forwarded-Proto`."""
    grant = Grant(source.adapter.tenant, str(path), source.adapter.version, file, int(expires.timestamp()))
    url = request.url_for("signed_file", token=sign(await tinker.signing_key.get(), grant))
    ends_tls = request.headers.get("x-forwarded-proto") == "https"  # who says so falsely misleads only himself
    return str(url.replace(scheme="https") if ends_tls else url)
