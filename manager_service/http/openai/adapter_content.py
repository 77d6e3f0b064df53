"""GET /v1/adapters/content: the files of any version that a model's name means, of jobs and of runs."""

import functools
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from common.errors import CorruptObject, InvalidInput
from common.settings import stored_digest
from common.store.adapters import PEFT_FILES
from common.wire.messages import AdapterRef
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.errors import COMMON, ApiError, declared
from manager_service.http.stores.model_names import find_model
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/adapters", tags=["models"], responses={**COMMON, **declared(404)})

ZIP = {"content": {"application/zip": {}}, "description": "A zip that PEFT and vLLM load"}
_, CONFIG = PEFT_FILES


@router.get("/content", response_class=Response, responses={200: ZIP})
async def content(
    api: Parts,
    tenant: Tenant,
    model: Annotated[str, Query(description="`ft:…`, the newest version unless one is pinned, or `tinker://…`")],
) -> Response:
    """`adapter_config.json` and `adapter_model.safetensors`, checked against their sha256."""
    named = await find_model(api, tenant, model)
    if named.adapter.is_base:
        raise InvalidInput("a base model is no adapter: name a tuned one", param="model")
    return await zip_of(api, named.base, named.adapter)


async def zip_of(api: Api, base: Base, adapter: AdapterRef) -> Response:
    """Raises NotFound, and ApiError: 503 if a file is damaged, and what `Downloads` refuses."""
    name = re.sub(r"[^\w.-]", "_", f"{adapter.job}-{adapter.version}.zip")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    asker = await api.tenants.get(adapter.tenant)
    read = functools.partial(files_of, api, base, asker, adapter)
    return await api.downloads.answer(asker, read, _zip, "application/zip", headers)


async def files_of(
    api: Api, base: Base, asker: TenantRecord, adapter: AdapterRef, names: Sequence[str] = PEFT_FILES
) -> dict[str, bytes]:
    """Raises NotFound, and ApiError 503 if a file is damaged."""
    try:
        files = await api.adapters.read(adapter, names, functools.partial(api.downloads.beside, asker))
    except CorruptObject as error:
        raise ApiError(503, f"version {adapter.version} is damaged: {error}", code="corrupt_adapter") from error
    if CONFIG in files:
        files[CONFIG] = with_base(files[CONFIG], api.settings.models[base.name])
    return files


def with_base(config: bytes, where: str) -> bytes:
    """An adapter's configuration that names the hub's model, if its base is one: so `AutoPeftModel` finds it. `where`: the base's."""
    if Path(where).is_dir() or stored_digest(where):
        return config
    name, _, revision = where.partition("@")
    named = {"base_model_name_or_path": name} | ({"revision": revision} if revision else {})
    return msgspec.json.format(msgspec.json.encode(msgspec.json.decode(config) | named))


def _zip(files: Mapping[str, bytes], file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # weights do not compress
        for name, content in files.items():
            archive.writestr(name, content)
