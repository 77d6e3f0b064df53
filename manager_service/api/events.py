"""/v1/fine_tuning/jobs/{id}/events: a list, newest first; or with `stream=true` server-sent events, oldest first."""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from common.errors import InvalidInput
from manager_service.api.context import Api, Parts, Tenant
from manager_service.api.errors import COMMON, declared
from manager_service.api.event_stream import event_stream
from manager_service.api.job_store import JobRow, JobStore
from manager_service.api.paging import After, Limit, page
from manager_service.api.schemas import EventObject, Page
from manager_service.records import FINAL, EventRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], responses=COMMON)

LOOK_EVERY_S = 2.0
"""How often a silent stream looks whether its job has ended."""


@router.get(
    "/{job_id}/events",
    response_model=Page[EventObject],
    responses={**declared(404), 200: {"content": {"text/event-stream": {}}, "description": "Events of the job"}},
)
async def events(
    api: Parts,
    tenant: Tenant,
    job_id: str,
    after: After = None,
    limit: Limit = 20,
    stream: Annotated[bool, Query(description="Server-sent events, until the job has ended")] = False,
    last_event_id: Annotated[str | None, Header(description="Where to resume a stream", max_length=64)] = None,
) -> Page[EventObject] | Response:
    """An event's id is the job's own sequence number; streams resume after `Last-Event-ID`."""
    row = await JobStore(api).find(tenant.id, job_id)
    if stream:
        last = _sequence(last_event_id, "Last-Event-ID")
        return event_stream(_follow(api, row, -1 if last is None else last))
    before = _sequence(after, "after")
    highest = "+" if before is None else f"({before}-0"
    if before == 0:
        return page(list[EventObject](), has_more=False)
    key = row.base.cell.events(job_id)
    found = await row.base.redis.xrevrange(key, max=highest, count=limit + 1)
    shown = [shown_event(fields) for _, fields in found]
    return page(shown[:limit], has_more=len(shown) > limit)


def _sequence(text: str | None, param: str) -> int | None:
    """Reads an event's id. Raises InvalidInput if it is none."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise InvalidInput(f"{param}: {text!r} is not the id of an event", param=param, code="invalid_cursor")
    return int(text)


async def _follow(api: Api, row: JobRow, last: int) -> AsyncIterator[str]:
    """Events after `last` as they come; ends behind the last event of a job that has ended."""
    store, key = JobStore(api), row.base.cell.events(row.spec.id)
    cursor, told_s = (last, 2**64 - 1) if last >= 0 else (0, 0), time.monotonic()
    if last < 0 and (first := await _first(row, key)) is not None:
        yield first  # XREAD cannot begin before 0-0, and a sequence may begin with 0
    feed, wait_s = row.base.feed, min(LOOK_EVERY_S, api.settings.keep_alive_s)
    while True:
        ended = (await row.base.bus.retrying(lambda: store.state(row))).status in FINAL
        entries = await (feed.now(key, cursor) if ended else feed.after(key, cursor, wait_s))
        for entry, fields in entries:
            cursor = entry
            yield _sent(fields)
        if entries:
            told_s = time.monotonic()
        elif ended:
            return
        elif time.monotonic() - told_s >= api.settings.keep_alive_s:
            told_s = time.monotonic()
            yield ": keep-alive\n\n"


async def _first(row: JobRow, key: str) -> str | None:
    """The event number 0, if the job's numbers begin with it."""
    bus = row.base.bus
    found: Any = await bus.retrying(lambda: bus.client.xrange(key, "0-0", "0-0"))
    return _sent(found[0][1]) if found else None


def _sent(fields: Mapping[bytes, bytes]) -> str:
    shown = shown_event(fields)
    return f"id: {shown.id}\nevent: {shown.type}\ndata: {shown.model_dump_json()}\n\n"


def shown_event(fields: Mapping[bytes, bytes]) -> EventObject:
    record = msgspec.json.decode(fields[b"event"], type=EventRecord)
    return EventObject(
        id=str(record.sequence),
        created_at=record.created_at,
        level=record.level,
        message=record.message,
        type=record.type,
        data=record.data,
    )
