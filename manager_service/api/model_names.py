"""Finds the adapter of a model's name: `tiny`, `ft:{base}:{tenant}:{suffix}:{job}`, or the latter with `@{version}`."""

from dataclasses import dataclass

from common.errors import NotFound
from common.messages import BASE, AdapterRef
from common.spelling import did_you_mean, quoted
from manager_service.api.context import Api, Base
from manager_service.api.job_store import JobRow, JobStore
from manager_service.jobs.retention import has_version
from manager_service.records import TenantRecord


@dataclass(frozen=True, slots=True)
class Named:
    """A base model, or one version of a tuned one."""

    base: Base
    adapter: AdapterRef
    row: JobRow | None = None  # None: the base model


async def find_model(api: Api, tenant: TenantRecord, name: str) -> Named:
    """The newest committed version unless one is pinned. Raises NotFound, also for other tenants' models."""
    if name in api.bases:
        return Named(api.bases[name], BASE)
    plain, at, pinned = name.partition("@")
    parts = plain.split(":")
    if len(parts) != 5 or parts[0] != "ft":
        raise NotFound(f"there is no model {quoted(name)}{did_you_mean(name, api.bases)}")
    try:
        row = await JobStore(api).find(tenant.id, parts[4])
    except NotFound as error:
        raise NotFound(f"there is no model {quoted(name)}") from error
    if row.spec.tuned_model != plain or row.deleted:
        raise NotFound(f"there is no model {quoted(name)}")
    version = _pinned(name, pinned, row) if at else row.state.version
    if version < 0:
        raise NotFound(f"the model {quoted(name)} has no version yet: its job is {row.state.status}")
    return Named(row.base, AdapterRef(tenant.id, row.spec.id, version), row)


def _pinned(name: str, text: str, row: JobRow) -> int:
    newest = row.state.version
    if not (text.isascii() and text.isdecimal() and len(text) <= 8 and int(text) <= newest):
        raise NotFound(f"there is no model {quoted(name)}: the newest version is {newest}")
    if not has_version(row.spec, row.state, int(text)):
        raise NotFound(
            f"there is no model {quoted(name)} any more: its job keeps {row.spec.hyper.keep_versions} versions"
        )
    return int(text)
