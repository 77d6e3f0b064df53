"""GET /v1/usage"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from fastapi import APIRouter

from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.schemas import UsageObject, UsageReport
from manager_service.records.usage import INFERENCE, USAGE_COUNTERS

router = APIRouter(prefix="/v1/usage", tags=["usage"], responses=COMMON)

WHOLE = frozenset(counter for counter in USAGE_COUNTERS if counter.endswith("_tokens"))


@router.get("")
async def usage(api: Parts, tenant: Tenant) -> UsageReport:
    """The tenant's use since its beginning, in all and per job; busy seconds are split between jobs by tokens."""
    jobs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    days = Counter[str]()
    for base in api.bases.values():
        for field, value in (await base.redis.hgetall(base.cell.usage(tenant.id))).items():
            job, _, counter = field.decode().partition("/")
            if job == "day":  # of UTC, as 20261122
                days[f"{counter[:4]}-{counter[4:6]}-{counter[6:]}"] += int(float(value))
            elif counter in USAGE_COUNTERS:
                jobs[job][counter] += float(value)
                jobs[""][counter] += float(value)
    total = shown(None, jobs.pop("", {}))
    rows = [shown("inference" if job == INFERENCE else job, counts) for job, counts in sorted(jobs.items())]
    return UsageReport(
        tenant=tenant.id,
        tokens_today=days[time.strftime("%Y-%m-%d", time.gmtime())],
        max_tokens_per_day=tenant.max_tokens_per_day,
        stored_bytes=(await api.stored.totals([tenant.id]))[tenant.id],
        max_stored_bytes=tenant.may_store(api.stored.max_bytes),
        total=total,
        data=rows,
        days=dict(sorted(days.items())),
    )


def shown(job: str | None, counts: Mapping[str, float]) -> UsageObject:
    whole = {counter: int(counts.get(counter, 0)) for counter in WHOLE}
    seconds = {counter: counts.get(counter, 0.0) for counter in USAGE_COUNTERS if counter not in WHOLE}
    return UsageObject.model_validate({"job": job, **whole, **seconds})
