"""Routes of what a tenant has used, by the hour, and of what its checkpoints take. Nothing has a price here."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from common.errors import InvalidInput
from common.store.adapters import PEFT_FILES
from common.wire.messages import AdapterRef
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.stores.run_store import RunRow
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.rest.listings import shown_metadata
from manager_service.records.run_records import RunState
from manager_service.records.tenants import TenantRecord
from manager_service.records.usage import hour_of

router = APIRouter(prefix=f"{PREFIX}/billing/usage", include_in_schema=False)

HOUR = timedelta(hours=1)
MAX_WINDOW = timedelta(days=14)
NUM_READ = 16
"""Manifests that are read at once."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "trained_tokens": {"type": "training"},
    "prompt_tokens": {"type": "sampling_prefill", "cached": False},
    "sampled_tokens": {"type": "sampling_sample"},
}
"""A counter of ours, as the protocol tells it."""

BilledHour = tuple[datetime, str, str, str]  # beginning of the hour, base model, session, counter


@router.get("/events")
async def events(
    starting_on: datetime, ending_before: datetime, api: Parts, tenant: Tenant, tinker: Tinker
) -> Response:
    """Managed jobs and chat count too: together, without a session."""
    hours = _hours(starting_on, ending_before)
    found = [await _used(base, tenant, hours) for base in api.bases.values()]
    rows = sorted((row for rows in found for row in rows.items()), key=lambda row: (row[0][0], -row[1]))
    async with api.reads.of(tenant.id):
        sessions = await tinker.sessions.some(tenant.id, sorted({session for (_, _, session, _), _ in rows if session}))
    told = {one.id: {"user_metadata": shown_metadata(one.user_metadata)} for one in sessions}
    return answer({"data": [_event(tenant, key, num) for key, num in rows], "sessions": told})


def _hours(start: datetime, end: datetime) -> list[datetime]:
    """Raises InvalidInput."""
    start, end = _full_hour("starting_on", start), _full_hour("ending_before", end)
    if not timedelta(0) < end - start <= MAX_WINDOW:
        raise InvalidInput("ending_before is later than starting_on, by at most 14 days", param="ending_before")
    if start > datetime.now(UTC):
        raise InvalidInput("starting_on must not be in the future", param="starting_on")
    return [start + number * HOUR for number in range((end - start) // HOUR)]


def _full_hour(name: str, when: datetime) -> datetime:
    with contextlib.suppress(OverflowError):  # an hour of year 1, say, that UTC has no name for
        utc = when.replace(tzinfo=when.tzinfo or UTC).astimezone(UTC)
        if (utc.minute, utc.second, utc.microsecond) == (0, 0, 0):
            return utc
    raise InvalidInput(f"{name} must be a full hour of UTC, such as 2026-07-13T00:00:00Z", param=name)


async def _used(base: Base, tenant: TenantRecord, hours: list[datetime]) -> dict[BilledHour, int]:
    """One round trip."""
    pipe = base.redis.pipeline(transaction=False)
    for hour in hours:
        pipe.hgetall(base.cell.hours(tenant.id, hour_of(hour.timestamp())))
    found: dict[BilledHour, int] = {}
    for hour, counters in zip(hours, await pipe.execute(), strict=True):
        for field, amount in counters.items():
            session, _, counter = field.decode().partition("/")
            if counter in KINDS:
                found[hour, base.name, session, counter] = int(amount)
    return found


def _event(tenant: TenantRecord, key: BilledHour, num_tokens: int) -> dict[str, Any]:
    hour, base, session, counter = key
    return {
        "bucket_start": hour.isoformat(),
        "bucket_end": (hour + HOUR).isoformat(),
        "base_model": base,
        "user_id": tenant.id,
        "user_name": tenant.name or None,
        "session_id": session or None,
        "project_id": None,
        "estimated_cost_usd": None,
        "event_info": {**KINDS[counter], "token_count": num_tokens},
    }


@router.get("/checkpoints/current")
async def storage(api: Parts, tenant: Tenant, tinker: Tinker, project_id: str | None = None) -> Response:
    """A version that several names name counts once."""
    if project_id is not None:
        raise InvalidInput("there are no projects here: leave project_id out", param="project_id")
    num, num_bytes = await _stored(api, tenant, tinker)
    row = {
        "org_user_urn": tenant.id,
        "user_name": tenant.name or None,
        "checkpoint_count": num,
        "size_bytes": num_bytes,
        "size_gigabytes": num_bytes / 1e9,
        "estimated_monthly_cost_usd": None,
    }
    return answer({"effective_rate_usd_per_gigabyte_month": None, "data": [row] if num else []})


async def _stored(api: Api, tenant: TenantRecord, tinker: Records) -> tuple[int, int]:
    """(checkpoints, bytes)."""
    free, now = asyncio.Semaphore(NUM_READ), datetime.now(UTC).timestamp()
    sizes: list[tuple[int, int]] = []
    async for page in tinker.runs.pages(tenant.id):
        async with api.reads.of(tenant.id):
            sizes += await asyncio.gather(*(_size(api, free, run, state, now) for run, state in page))
    return sum(num for num, _ in sizes), sum(num_bytes for _, num_bytes in sizes)


async def _size(api: Api, free: asyncio.Semaphore, run: RunRow, state: RunState, now: float) -> tuple[int, int]:
    """The size of a run. Its versions are as large as each other, so one manifest tells of all."""
    kept = state.kept(now)
    if not kept:
        return 0, 0
    async with free:
        manifest = await api.adapters.manifest(AdapterRef(run.spec.tenant, run.id, kept[-1].version))
    files = manifest.files if manifest else {}
    plain = sum(file.size for name, file in files.items() if name in PEFT_FILES)
    whole = sum(file.size for file in files.values())
    of_version = Counter({one.version: plain for one in kept})
    of_version |= Counter({one.version: whole for one in kept if one.kind == "weights"})
    return len(kept), of_version.total()
