"""GET /v1/usage"""

from collections import defaultdict

from fastapi import APIRouter

from manager_service.api.context import Base, Parts, Tenant
from manager_service.api.errors import COMMON
from manager_service.api.quota import tokens_today
from manager_service.api.schemas import UsageObject, UsageReport
from manager_service.records import INFERENCE

router = APIRouter(prefix="/v1/usage", tags=["usage"], responses=COMMON)

COUNTERS = ("prompt_tokens", "sampled_tokens", "trained_tokens", "wasted_tokens", "rollout_s", "env_s", "train_s")
WHOLE = frozenset(counter for counter in COUNTERS if counter.endswith("_tokens"))


@router.get("")
async def usage(api: Parts, tenant: Tenant) -> UsageReport:
    """The tenant's use since its beginning, in all and per job; busy seconds are split between jobs by tokens."""
    jobs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    today = 0
    for base in api.bases.values():
        today += await tokens_today(base.redis, base.cell, tenant.id)
        for job, counter, amount in await counted(base, tenant.id):
            jobs[job][counter] += amount
            jobs[""][counter] += amount
    total = _shown(None, jobs.pop("", {}))
    rows = [_shown("inference" if job == INFERENCE else job, counts) for job, counts in sorted(jobs.items())]
    return UsageReport(
        tenant=tenant.id, tokens_today=today, max_tokens_per_day=tenant.max_tokens_per_day, total=total, data=rows
    )


async def counted(base: Base, tenant: str) -> list[tuple[str, str, float]]:
    """(job, counter, amount) of a tenant in a cell."""
    fields = {
        field.decode(): float(value) for field, value in (await base.redis.hgetall(base.cell.usage(tenant))).items()
    }
    split = [(*field.partition("/")[::2], amount) for field, amount in fields.items()]
    return [(job, counter, amount) for job, counter, amount in split if counter in COUNTERS]


def _shown(job: str | None, counts: "dict[str, float] | defaultdict[str, float]") -> UsageObject:
    whole = {counter: int(counts.get(counter, 0)) for counter in WHOLE}
    seconds = {counter: counts.get(counter, 0.0) for counter in COUNTERS if counter not in WHOLE}
    return UsageObject.model_validate({"job": job, **whole, **seconds})
