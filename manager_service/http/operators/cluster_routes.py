"""/v1/cluster, for operators: workers, the timeline of who used them, and dead letters."""

import re
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query

from common.bus.payloads import plain_of
from common.bus.streams import Cell
from common.wire.codec import decode
from common.wire.messages import DeadLetter, WorkerReport
from manager_service.http.context import Admin, Api, Parts
from manager_service.http.errors import COMMON, unavailable
from manager_service.http.openai.paging import After, Limit, page, wrong_cursor
from manager_service.http.schemas import DeadLetterObject, Page, SpanObject, WantedTotal, WorkerObject
from manager_service.records.cluster import WantedWorkers, WorkerSpan, wanted_of

router = APIRouter(prefix="/v1/cluster", tags=["cluster"], responses=COMMON)

MAX_SPANS = 50_000

_ENTRY = re.compile(r"[1-9][0-9]{0,14}-[0-9]{1,15}")


@router.get("/workers")
async def workers(api: Parts, admin: Admin) -> Page[WorkerObject]:
    """Live workers, by service; of a worker that serves several base models one for each, side by side. Needs the admin key."""
    found = [worker for base in api.bases.values() for worker in base.cluster.workers()]
    found.sort(key=lambda worker: (worker.service, worker.pool.worker if worker.pool else worker.id, worker.base_model))
    return page([_worker(worker) for worker in found], has_more=False)


def _worker(worker: WorkerReport) -> WorkerObject:
    work = {(span.tenant, span.job, span.phase) for span in worker.spans if span.tenant}
    working_for = [dict(zip(("tenant", "job", "phase"), one, strict=True)) for one in sorted(work)]
    pool = msgspec.structs.asdict(worker.pool) if worker.pool else None
    return WorkerObject.model_validate(msgspec.structs.asdict(worker) | {"working_for": working_for, "pool": pool})


@router.get("/wanted")
async def wanted(api: Parts, admin: Admin) -> dict[str, dict[str, int | str]]:
    """The rollout `workers` that each base model wants for its `turns`; its `live` ones, their `bounds`, and which `retires`. Without
    bases of which no manager has said so lately. Needs the admin key."""
    return {name: msgspec.structs.asdict(one) for name, one in (await _wanted(api)).items() if one}


@router.get("/wanted/total")
async def wanted_total(api: Parts, admin: Admin) -> WantedTotal:
    """The rollout `workers` that all base models want together, for autoscalers: a worker serves all of them. 503 while no manager has
    said so lately of one, so that the number of workers stays as it is. Needs the admin key."""
    found = await _wanted(api)
    if unknown := sorted(name for name, one in found.items() if one is None):
        raise unavailable(f"no manager has said lately how many rollout workers {', '.join(unknown)} wants")
    return WantedTotal(workers=sum(one.workers for one in found.values() if one))


async def _wanted(api: Api) -> dict[str, WantedWorkers | None]:
    return {name: await wanted_of(base.redis, base.cell) for name, base in api.bases.items()}


@router.get("/timeline")
async def timeline(
    api: Parts,
    admin: Admin,
    since: Annotated[float | None, Query(description="Seconds since 1970; the last ten minutes if absent")] = None,
) -> Page[SpanObject]:
    """Busy stretches of all workers, oldest first, for at most the last hour; never more than the newest 50,000. Needs the
    admin key.
    """
    since_s = time.time() - 600 if since is None else since
    found = [span for base in api.bases.values() for span in base.cluster.timeline(since_s)]
    spans = sorted(found, key=lambda one: one.span.start_s)
    newest = spans[-MAX_SPANS:]
    return Page(data=[_span(span) for span in newest], has_more=len(spans) > len(newest))


def _span(one: WorkerSpan) -> SpanObject:
    span = one.span
    same = msgspec.structs.asdict(span)
    return SpanObject(worker=one.worker, service=one.service, start=span.start_s, end=span.end_s, **same)


@router.get("/dead")
async def dead(api: Parts, admin: Admin, after: After = None, limit: Limit = 20) -> Page[DeadLetterObject]:
    """Messages that no worker could handle, newest first. Needs the admin key."""
    before = _entry_before(after)
    found: list[DeadLetterObject] = []
    for base in api.bases.values():
        entries = await base.redis.xrevrange(base.cell.dead, max=before, count=limit + 1)
        found += [_dead(base.cell, entry.decode(), fields) for entry, fields in entries]
    found.sort(key=lambda letter: letter.created_at, reverse=True)
    return page(found[:limit], has_more=len(found) > limit)


def _entry_before(after: str | None) -> str:
    """Redis' bound for entries before this one. Raises InvalidInput if it is not the id of an entry."""
    if after is None:
        return "+"
    if not _ENTRY.fullmatch(after):
        raise wrong_cursor(after, "is not the id of a dead letter")
    return f"({after}"


def _dead(cell: Cell, entry: str, fields: dict[bytes, bytes]) -> DeadLetterObject:
    letter = _decoded(fields)
    return DeadLetterObject(
        id=entry,
        base_model=cell.base_model,
        created_at=int(entry.split("-")[0]) / 1000,
        tenant=letter.tenant if letter else "",
        job=letter.job if letter else plain_of(fields).get("job", ""),
        stream=letter.stream if letter else "",
        entry=letter.entry if letter else "",
        reason=letter.reason if letter else "not readable here: a claim check, or no message of ours",
        deliveries=letter.deliveries if letter else 0,
        num_bytes=len(letter.payload) if letter else 0,
    )


def _decoded(fields: dict[bytes, bytes]) -> DeadLetter | None:
    try:
        message = decode(fields.get(b"payload", b""))
    except msgspec.MsgspecError:
        return None
    return message if isinstance(message, DeadLetter) else None
