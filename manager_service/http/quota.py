"""Counters of each tenant's use (`usage:<tenant>`), the daily quota, and room in Redis for new work."""

import time
from typing import Any

import msgspec

from common.bus.fullness import DISK_FULL, MAX_USED_FOR_NEW, Gauge
from common.bus.streams import Cell
from common.wire.messages import Usage
from manager_service.http.errors import ApiError, unavailable
from manager_service.records.stored import WHAT_TO_DELETE, StoredBytes
from manager_service.records.tenants import TenantRecord
from manager_service.records.usage import INFERENCE, KEEP_HOURS_S, QUOTA_COUNTERS, day_field, hour_of

NO_DISK = (
    "the disk of the service's Redis is full, so it serves only reads, deletes and cancels: try again when the operator has made"
    " room; jobs then go on by themselves"
)


MAX_HOUR_COUNTERS = 500
"""Counters of one tenant's hour: what further sessions use counts without a session. Hours are kept for weeks."""


async def tokens_today(redis: Any, cell: Cell, tenant: str) -> int:
    """Prompt, sampled and trained tokens since midnight UTC, in one cell."""
    return int(float(await redis.hget(cell.usage(tenant), day_field(time.time())) or 0))


async def check_quota(redis: Any, cell: Cell, tenant: TenantRecord) -> None:
    """Raises ApiError 429."""
    limit = tenant.max_tokens_per_day
    if limit is None:
        return
    used = await tokens_today(redis, cell, tenant.id)
    if used >= limit:
        raise ApiError(
            429,
            f"the quota of {limit} tokens a day is used up ({used} today): wait until midnight UTC, or have the operator raise it",
            code="quota_exceeded",
            retry=False,
        )


async def check_disk(gauge: Gauge) -> None:
    """Raises ApiError 503 while Redis' disk is full."""
    if await gauge.used() == DISK_FULL:
        raise unavailable(NO_DISK, code="disk_full")


async def check_stored(stored: StoredBytes, tenant: TenantRecord, more: int = 0) -> None:
    """Raises ApiError 429 if the tenant keeps all that it may, or would with `more` bytes."""
    if fault := await storage_fault(stored, tenant, more):
        raise ApiError(429, fault, code="storage_exceeded", retry=False)


async def storage_fault(stored: StoredBytes, tenant: TenantRecord, more: int = 0) -> str:
    """The reason for which the tenant may store nothing more, with what to delete; empty if it may."""
    limit, used = tenant.may_store(stored.max_bytes), (await stored.totals([tenant.id]))[tenant.id]
    if used + max(1, more) <= limit:
        return ""
    largest = ", ".join(f"{name} ({size:,})" for name, size in await stored.largest(tenant.id))
    this = f", this is {more:,}" if more else ""
    return f"you store {used:,} bytes{this}, and may store {limit:,}: {WHAT_TO_DELETE}; the largest are {largest or 'none'}"


async def check_room(gauge: Gauge) -> None:
    """Raises ApiError 503 while Redis is so full that what is under way needs the rest."""
    await check_disk(gauge)
    if await gauge.used() > MAX_USED_FOR_NEW:
        raise memory_full()


def memory_full() -> ApiError:
    return unavailable(
        f"the service's memory is more than {MAX_USED_FOR_NEW:.0%} full, so it takes no new work: try again in a minute, when work"
        " under way has ended, or cancel what you do not need; if it lasts, ask the operator for more memory for Redis",
        code="memory_full",
    )


async def count_inference(redis: Any, cell: Cell, tenant: str, usage: Usage, session: str = "") -> None:
    """`session`: of the Tinker protocol, if it asked."""
    now = time.time()
    key, hour, tokens = cell.usage(tenant), cell.hours(tenant, hour_of(now)), 0
    if session and await redis.hlen(hour) >= MAX_HOUR_COUNTERS:
        known = await redis.hexists(hour, f"{session}/sampled_tokens")
        session = session if known else ""
    pipe = redis.pipeline(transaction=False)
    for counter, amount in msgspec.structs.asdict(usage).items():
        if amount:
            pipe.hincrbyfloat(key, f"{INFERENCE}/{counter}", float(amount))
        if amount and counter in QUOTA_COUNTERS:
            pipe.hincrby(hour, f"{session}/{counter}", int(amount))
            tokens += int(amount)
    if tokens:
        pipe.hincrby(key, day_field(now), tokens)
        pipe.expire(hour, KEEP_HOURS_S)
    await pipe.execute()
