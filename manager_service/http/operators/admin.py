"""/v1/admin: tenants, their weights, quotas and keys. Needs the admin key."""

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import AfterValidator, Field

from manager_service.http.context import Admin, Parts
from manager_service.http.errors import COMMON, declared
from manager_service.http.openai.paging import page
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.schemas import Deleted, Given, KeyObject, Page, TenantObject
from manager_service.records.tenants import KeyRecord, TenantRecord

router = APIRouter(prefix="/v1/admin/tenants", tags=["admin"], responses=COMMON, route_class=JsonRoute)

LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0


def _in_range(weight: float) -> float:
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"a weight is from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return weight


Weight = Annotated[
    float, AfterValidator(_in_range), Field(json_schema_extra={"minimum": LEAST_WEIGHT, "maximum": MOST_WEIGHT})
]
MaxJobs = Annotated[int, Field(ge=1, le=100_000)]
MaxAmount = Annotated[int, Field(ge=0, lt=2**53)]


class TenantLimits(Given):
    """The fields to change: an absent one stays as it is; `max_tokens_per_day` null means no limit,
    `max_stored_bytes` null the service's."""

    name: str = Field("", max_length=256)
    weight: Weight = 1.0
    max_jobs: MaxJobs = 16
    max_tokens_per_day: MaxAmount | None = None
    max_stored_bytes: MaxAmount | None = None


class TenantGiven(TenantLimits):
    id: str = Field(max_length=63)


@router.post("", responses=declared(409))
async def create(api: Parts, admin: Admin, body: TenantGiven) -> TenantObject:
    """Make a tenant, without a key yet."""
    record = TenantRecord(created_at=int(time.time()), **body.model_dump())
    await api.tenants.create(record)
    return shown(record)


@router.get("")
async def list_tenants(api: Parts, admin: Admin) -> Page[TenantObject]:
    return page([shown(record) for record in await api.tenants.all()], has_more=False)


@router.get("/{tenant_id}", responses=declared(404))
async def retrieve(api: Parts, admin: Admin, tenant_id: str) -> TenantObject:
    return shown(await api.tenants.get(tenant_id))


@router.post("/{tenant_id}", responses=declared(404))
async def update(api: Parts, admin: Admin, tenant_id: str, body: TenantLimits) -> TenantObject:
    """Change weight and quotas. A job keeps the weight that its tenant had when it was made."""
    record = msgspec.structs.replace(await api.tenants.get(tenant_id), **body.model_dump(exclude_unset=True))
    await api.tenants.update(record)
    return shown(record)


@router.post("/{tenant_id}/keys", responses=declared(404))
async def create_key(api: Parts, admin: Admin, tenant_id: str) -> KeyObject:
    """Make a key. Only this answer shows it, since only its hash is kept."""
    await api.tenants.get(tenant_id)
    key, record = await api.tenants.add_key(tenant_id)
    return shown_key(record, key)


@router.get("/{tenant_id}/keys", responses=declared(404))
async def list_keys(api: Parts, admin: Admin, tenant_id: str) -> Page[KeyObject]:
    await api.tenants.get(tenant_id)
    return page([shown_key(record) for record in await api.tenants.keys(tenant_id)], has_more=False)


@router.delete("/{tenant_id}/keys/{key_id}", responses=declared(404))
async def delete_key(api: Parts, admin: Admin, tenant_id: str, key_id: str) -> Deleted:
    """Refuse the key from the next request on. The tenant's jobs go on."""
    await api.tenants.get(tenant_id)
    await api.tenants.delete_key(tenant_id, key_id)
    return Deleted(id=key_id, object="api_key")


def shown(record: TenantRecord) -> TenantObject:
    return TenantObject(**msgspec.structs.asdict(record))


def shown_key(record: KeyRecord, key: str | None = None) -> KeyObject:
    return KeyObject(**msgspec.structs.asdict(record), key=key)
