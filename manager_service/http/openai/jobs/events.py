"""/v1/fine_tuning/jobs/{id}/events: a list, newest first; or with `stream=true` server-sent events, oldest first."""

import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response
from starlette.types import Scope

from common.errors import InvalidInput
from common.suggestions import quoted
from manager_service.http.context import Api, Parts, Tenant, authenticate
from manager_service.http.errors import COMMON, declared
from manager_service.http.event_stream import event_stream
from manager_service.http.openai.paging import After, Limit, page
from manager_service.http.schemas import EventObject, Page
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.records.job_records import FINAL
from manager_service.records.sample_records import EventRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], responses=COMMON)

ANY = 2**64 - 1
"""The second half of the id behind all entries with the same first half."""
LOOK_EVERY_S = 2.0
"""Seconds between a silent stream's looks whether its job has ended."""


@router.get(
    "/{job_id}/events",
    response_model=Page[EventObject],
    responses={**declared(404), 200: {"content": {"text/event-stream": {}}, "description": "Events of the job"}},
)
async def events(
    request: Request,
    api: Parts,
    tenant: Tenant,
    job_id: str,
    after: After = None,
    limit: Limit = 20,
    stream: Annotated[bool, Query(description="Server-sent events, until the job has ended")] = False,
    last_event_id: Annotated[str | None, Header(description="Where to resume a stream", max_length=64)] = None,
) -> Page[EventObject] | Response:
    """An event's id is the job's own sequence number; streams resume after `Last-Event-ID`."""
    store = JobStore(api)
    row = await store.find(tenant.id, job_id)
    if stream:
        last = _sequence(last_event_id, "Last-Event-ID")
        return event_stream(_follow(api, row, -1 if last is None else last, request.scope))
    before = _sequence(after, "after")
    found = await store.read(row, lambda records: records.events(before=before, limit=limit + 1))
    return page([shown_event(record) for record in found[:limit]], has_more=len(found) > limit)


def _sequence(text: str | None, param: str) -> int | None:
    """Reads an event's id. Raises InvalidInput if it is none."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise InvalidInput(f"{param}: {quoted(text)} is not the id of an event", param=param, code="invalid_cursor")
    return int(text)


async def _follow(api: Api, row: JobRow, last: int, scope: Scope) -> AsyncIterator[str]:
    """Events after `last` as they come; ends behind the last event of a job that has ended. Raises ApiError 401 once the request's
    key is deleted."""
    store, key, feed = JobStore(api), row.base.cell.events(row.spec.id), row.base.feed
    wait_s, told_s = min(LOOK_EVERY_S, api.limits.keep_alive_s), time.monotonic()
    while row.archived is None:
        ended, cursor = row.state.status in FINAL, (last, ANY) if last >= 0 else (0, 0)
        entries = await (feed.now(key, cursor) if ended else feed.after(key, cursor, wait_s))
        await row.base.bus.retrying(lambda: authenticate(api, scope, again=True))
        for entry, fields in entries:
            last = entry[0]
            yield _sent(msgspec.json.decode(fields[b"event"], type=EventRecord))
        row = await row.base.bus.retrying(lambda spec=row.spec: store.find(spec.tenant, spec.id))
        if entries:
            told_s = time.monotonic()
        elif ended and row.archived is None:
            return
        elif time.monotonic() - told_s >= api.limits.keep_alive_s:
            told_s = time.monotonic()
            yield ": keep-alive\n\n"
    async for record in row.base.archive.records(row.archived).events_after(last):
        yield _sent(record)


def _sent(record: EventRecord) -> str:
    shown = shown_event(record)
    return f"id: {shown.id}\nevent: {shown.type}\ndata: {shown.model_dump_json()}\n\n"


def shown_event(record: EventRecord) -> EventObject:
    return EventObject(id=str(record.sequence), **msgspec.structs.asdict(record))
