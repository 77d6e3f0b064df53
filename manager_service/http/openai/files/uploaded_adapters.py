"""Adapters that tenants upload, to start jobs from: checks the file, and later that it fits the job's base model."""

from functools import partial

import msgspec
from fastapi import UploadFile

from common.errors import InvalidInput
from manager_service.http.context import Api, Base
from manager_service.http.openai.files.file_store import content_of
from manager_service.http.reading.adapter_uploads import FoundAdapter, check_finite, header_bytes, refuse_pickle
from manager_service.http.reading.reading_helpers import SLICE_BYTES
from manager_service.http.reading.tasks import ReadAdapter
from manager_service.records.file_records import UploadedAdapter
from manager_service.records.tenants import TenantRecord


async def check_adapter(api: Api, tenant: TenantRecord, file: UploadFile, config: str | None) -> UploadedAdapter:
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


def check_fits(adapter: UploadedAdapter, base: Base) -> None:
    """Raises InvalidInput if the base has other layers. A manager without the base's weights leaves that to the trainer."""
    there = base.weights.shapes
    if not there:
        return
    num_layers = len({name.split(".")[1] for name in there})
    if adapter.num_layers != num_layers:
        raise _misfit(base, f"it is for {adapter.num_layers} layers, and the base has {num_layers}")
    for module, shape in adapter.shapes.items():
        for layer in range(num_layers):
            of = there.get(f"layers.{layer}.{module}")
            if of != shape:
                known = f"{of[0]} x {of[1]}" if of else "not there"
                raise _misfit(base, f"its {module} is {shape[0]} x {shape[1]}, the base's {known}")


def _misfit(base: Base, reason: str) -> InvalidInput:
    return InvalidInput(f"the adapter does not fit {base.name!r}: {reason}", param="adapter_file", code="wrong_adapter")
