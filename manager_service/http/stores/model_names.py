"""Finds the adapter that a model's name means.

tiny, any/path/tiny                        a base model
ft:{base}:{tenant}:{suffix}:{job}          a job's model, or a run's, which has no suffix; with `@{version}` a version of it
tinker://{run}/sampler_weights/{name}      a run's checkpoint; of a job: tinker://{job}/sampler_weights/{version}
"""

from dataclasses import dataclass

from common.errors import InvalidInput, NotFound
from common.suggestions import did_you_mean, quoted
from common.wire.messages import BASE, AdapterRef, LoraSpec
from manager_service.http.context import Api, Base
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.http.stores.run_store import RunStore
from manager_service.http.stores.tinker_names import base_named
from manager_service.records.job_records import newest_stored, tuned_model
from manager_service.records.run_records import is_run, use
from manager_service.records.tenants import TenantRecord


@dataclass(frozen=True, slots=True)
class Named:
    """A base model, or one version of a tuned one."""

    base: Base
    adapter: AdapterRef
    lora: LoraSpec | None = None  # None: the base model
    row: JobRow | None = None  # None: no job's


async def find_model(api: Api, tenant: TenantRecord, name: str) -> Named:
    """The newest committed version unless one is pinned. Raises NotFound, also for other tenants' models."""
    if base := base_named(api, name):
        return Named(base, BASE)
    if name.startswith("tinker://"):
        return await _checkpoint(api, tenant, name)
    plain, at, pinned = name.partition("@")
    parts = plain.split(":")
    if len(parts) != 5 or parts[0] != "ft":
        raise NotFound(f"there is no model {quoted(name)}{did_you_mean(name, api.bases)}")
    try:
        found = await (_of_run if is_run(parts[4]) else _of_job)(api, tenant, plain, pinned if at else None)
    except NotFound as error:
        raise NotFound(f"there is no model {quoted(name)}: {error}", code=error.code) from error
    return found


async def _checkpoint(api: Api, tenant: TenantRecord, path: str) -> Named:
    try:
        source = await RunStore(api).source(tenant.id, path)
    except InvalidInput as error:
        raise NotFound(str(error)) from error
    return Named(source.base, source.adapter, source.lora)


async def _of_run(api: Api, tenant: TenantRecord, plain: str, pinned: str | None) -> Named:
    run = await RunStore(api).find(tenant.id, plain.rpartition(":")[2])
    if plain != tuned_model(run.base.name, tenant.id, "", run.id):
        raise NotFound("another name is meant")
    version = _version(pinned, (await run.state()).version, "its run has not begun")
    adapter = AdapterRef(tenant.id, run.id, version)
    if not await use(run.base.bus, adapter):
        raise NotFound("this version is deleted: a run keeps its newest two, and those that checkpoints name")
    return Named(run.base, adapter, run.spec.lora)


async def _of_job(api: Api, tenant: TenantRecord, plain: str, pinned: str | None) -> Named:
    row = await JobStore(api).find(tenant.id, plain.rpartition(":")[2])
    if row.spec.tuned_model != plain or row.deleted:
        raise NotFound("another name is meant, or it was deleted")
    version = _version(pinned, newest_stored(row.spec, row.state), f"its job is {row.state.status}")
    return Named(row.base, await JobStore(api).version(row, version), row.spec.hyper.lora, row)


def _version(pinned: str | None, newest: int, reason: str) -> int:
    if newest < 0:
        raise NotFound(f"it has no version yet: {reason}")
    if pinned is None:
        return newest
    if not (pinned.isascii() and pinned.isdecimal() and len(pinned) <= 8 and int(pinned) <= newest):
        raise NotFound(f"the newest version is {newest}")
    return int(pinned)
