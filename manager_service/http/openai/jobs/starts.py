"""Finds what a new job starts from: a base model, or a version of a tuned one."""

from dataclasses import dataclass

from common.errors import InvalidInput, NotFound
from common.suggestions import did_you_mean, quoted
from common.wire.messages import AdapterRef, LoraSpec
from manager_service.http.context import Api, Base
from manager_service.http.openai.files.uploaded_adapters import check_fits
from manager_service.http.openai.jobs.hyperparameters import Hyperparameters
from manager_service.http.stores.model_names import find_model
from manager_service.records.tenants import TenantRecord


@dataclass(frozen=True, slots=True)
class JobStart:
    base: Base
    name: str = ""  # of the source, with its version
    source: AdapterRef | None = None  # whose weights version 0 is a copy of; None: it is drawn
    lora: LoraSpec | None = None  # of the source
    adapter_file: str | None = None  # with the weights of version 0

    def shaped(self, given: Hyperparameters, param: str) -> Hyperparameters:
        """The hyperparameters, which `param` names, with the source's adapter shape. Raises InvalidInput if another one was asked for."""
        if self.lora is None:
            return given
        shape = {
            "lora_rank": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_targets": list(self.lora.targets),
        }
        for name, value in shape.items():
            if name in given.model_fields_set and getattr(given, name) != value:
                raise InvalidInput(
                    f"{name}: the model that the job starts from has {value!r}; leave it out", param=f"{param}.{name}"
                )
        return given.model_copy(update=shape)


async def find_start(api: Api, tenant: TenantRecord, model: str, adapter_file: str | None = None) -> JobStart:
    """Raises InvalidInput, with the nearest name, if there is no such model, or if the adapter does not fit it."""
    if adapter_file is not None:
        return await _uploaded(api, tenant, model, adapter_file)
    if not model.startswith(("ft:", "tinker://")):
        return JobStart(find_base(api, model))
    try:
        named = await find_model(api, tenant, model)
    except NotFound as error:
        raise InvalidInput(str(error), param="model", code="model_not_found") from error
    pinned = f"{model.partition('@')[0]}@{named.adapter.version}" if model.startswith("ft:") else model
    return JobStart(named.base, pinned, named.adapter, named.lora)


async def _uploaded(api: Api, tenant: TenantRecord, model: str, file: str) -> JobStart:
    if model.startswith(("ft:", "tinker://")):
        raise InvalidInput(
            f"model {quoted(model)} is a start already: name a base model beside adapter_file", param="model"
        )
    base = find_base(api, model)
    try:
        adapter = (await api.files.get(tenant.id, file)).adapter
    except NotFound as error:
        raise InvalidInput(f"adapter_file: {error}", param="adapter_file", code="file_not_found") from error
    if adapter is None:
        raise InvalidInput(
            f"adapter_file: {quoted(file)} holds items; upload an adapter with the purpose 'adapter'",
            param="adapter_file",
        )
    check_fits(adapter, base)
    return JobStart(base, lora=adapter.lora, adapter_file=file)


def find_base(api: Api, model: str) -> Base:
    """Raises InvalidInput, with the nearest name, if it is not a base model."""
    if model in api.bases:
        return api.bases[model]
    known = ", ".join(api.bases)
    raise InvalidInput(
        f"unknown model {quoted(model)}{did_you_mean(model, api.bases)}; base models: {known}",
        param="model",
        code="model_not_found",
    )
