"""GET /v1/usage"""

from collections import Counter, defaultdict

from fastapi import APIRouter

from manager_service.http.context import Base, Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.quota import tokens_today
from manager_service.http.schemas import UsageObject, UsageReport
from manager_service.records.usage import INFERENCE, USAGE_COUNTERS

router = APIRouter(prefix="/v1/usage", tags=["usage"], responses=COMMON)

WHOLE = frozenset(counter for counter in USAGE_COUNTERS if counter.endswith("_tokens"))


@router.get("")
async def usage(api: Parts, tenant: Tenant) -> UsageReport:
    """The tenant's use since its beginning, in all and per job; busy seconds are split between jobs by tokens."""
    jobs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    today, days = 0, Counter[str]()
    for base in api.bases.values():
        today += await tokens_today(base.redis, base.cell, tenant.id)
        days.update(await used_by_day(base, tenant.id))
        for job, counter, amount in await counted(base, tenant.id):
            jobs[job][counter] += amount
            jobs[""][counter] += amount
    total = shown(None, jobs.pop("", {}))
    rows = [shown("inference" if job == INFERENCE else job, counts) for job, counts in sorted(jobs.items())]
    return UsageReport(
        tenant=tenant.id,
        tokens_today=today,
        max_tokens_per_day=tenant.max_tokens_per_day,
        total=total,
        data=rows,
        days=dict(sorted(days.items())),
    )


async def used_by_day(base: Base, tenant: str) -> dict[str, int]:
    """Prompt, sampled and trained tokens by day (`2026-11-22`, UTC), in one cell."""
    found = (await base.redis.hgetall(base.cell.usage(tenant))).items()
    days = {field.decode().removeprefix("day/"): int(float(value)) for field, value in found if field[:4] == b"day/"}
    return {f"{day[:4]}-{day[4:6]}-{day[6:]}": amount for day, amount in days.items()}


async def counted(base: Base, tenant: str) -> list[tuple[str, str, float]]:
    """(job, counter, amount) of a tenant in a cell."""
    fields = {
        field.decode(): float(value) for field, value in (await base.redis.hgetall(base.cell.usage(tenant))).items()
    }
    split = [(*field.partition("/")[::2], amount) for field, amount in fields.items()]
    return [(job, counter, amount) for job, counter, amount in split if counter in USAGE_COUNTERS]


def shown(job: str | None, counts: "dict[str, float] | defaultdict[str, float]") -> UsageObject:
    whole = {counter: int(counts.get(counter, 0)) for counter in WHOLE}
    seconds = {counter: counts.get(counter, 0.0) for counter in USAGE_COUNTERS if counter not in WHOLE}
    return UsageObject.model_validate({"job": job, **whole, **seconds})
