"""A search of a tenant's sessions."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from common.errors import InvalidInput
from manager_service.http.context import Tenant
from manager_service.http.tinker.parts import PREFIX, Known, Records, answer
from manager_service.http.tinker.request_bodies import SearchAsked, StatusAsked, read
from manager_service.records.run_records import ClientSession

router = APIRouter(prefix=PREFIX, include_in_schema=False)

MAX_FOUND = 200
NUM_READ = 500
"""Sessions that are looked at together."""
REASONS = ("success", "errored", "interrupted")


@router.post("/sessions/search")
async def search_sessions(request: Request, tenant: Tenant, known: Known) -> Response:
    """Newest first. A session is kept for a month after its last sign of life."""
    asked = _checked(await read(request, SearchAsked))
    found: list[tuple[ClientSession, bool]] = []
    before = None if asked.cursor is None else (asked.cursor.created_at, asked.cursor.last_session_id)
    ids = await known.sessions.ids_before(tenant.id, before) if _is_own(asked, tenant.id) else []
    for start in range(0, len(ids), NUM_READ):
        for session, alive in await _read(known, tenant.id, ids[start : start + NUM_READ]):
            if _fits(asked, session, alive=alive):
                found.append((session, alive))
        if len(found) > asked.limit:
            break
    shown, more = found[: asked.limit], len(found) > asked.limit
    nums = await _num_checkpoints(known, tenant.id, {session.id for session, _ in shown})
    rows = [_summary(session, alive=alive, num_checkpoints=nums[session.id]) for session, alive in shown]
    return answer({"sessions": rows, "next_cursor": _cursor(shown[-1][0]) if more else None})


def _checked(asked: SearchAsked) -> SearchAsked:
    if not 1 <= asked.limit <= MAX_FOUND:
        raise InvalidInput(f"limit is between 1 and {MAX_FOUND}", param="limit")
    if asked.project_ids:
        raise InvalidInput("there are no projects here: leave project_ids out", param="project_ids")
    return asked


def _is_own(asked: SearchAsked, tenant: str) -> bool:
    """Does it ask for the tenant's own sessions? Nobody sees another's."""
    return asked.owner.type != "user" or tenant in asked.owner.owner_urns


async def _read(known: Records, tenant: str, ids: list[str]) -> list[tuple[ClientSession, bool]]:
    """Sessions, and whether each is alive."""
    sessions = await known.sessions.some(tenant, ids)
    alive = await known.sessions.alive([session.id for session in sessions])
    return [(session, session.id in alive) for session in sessions]


def _fits(asked: SearchAsked, session: ClientSession, *, alive: bool) -> bool:
    name = (session.display_name or "").lower()
    named = [session.id == asked.session_id] if asked.session_id is not None else []
    named += [all(word in name for word in asked.display_name.lower().split())] if asked.display_name else []
    if named and not any(named):
        return False
    if any(str(session.user_metadata.get(key)) != value for key, value in asked.user_metadata.items()):
        return False
    return asked.statuses is None or any(_has_status(each, session, alive=alive) for each in asked.statuses)


def _has_status(wanted: StatusAsked, session: ClientSession, *, alive: bool) -> bool:
    status = _status(session, alive=alive)
    if status is None or wanted.type != status["type"]:
        return False
    return not wanted.reasons or status.get("reason", {}).get("type") in wanted.reasons


def _status(session: ClientSession, *, alive: bool) -> dict[str, Any] | None:
    if session.finished:
        reason = session.finished if session.finished in REASONS else "interrupted"
        return {"type": "client_finished", "reason": {"type": reason}}
    return {"type": "active"} if alive else None


def _summary(session: ClientSession, *, alive: bool, num_checkpoints: int) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "created_at": _time(session.created_at),
        "owner": session.tenant,
        "project_id": "",
        "status": _status(session, alive=alive),
        "checkpoints_count": num_checkpoints,
        "display_name": session.display_name,
        "user_metadata": {name: str(value) for name, value in session.user_metadata.items()} or None,
    }


async def _num_checkpoints(known: Records, tenant: str, sessions: set[str]) -> Counter[str]:
    """The number of checkpoints of each session."""
    now, nums = time.time(), Counter[str]()
    async for page in known.runs.pages(tenant, sessions):
        for run, state in page:
            nums[run.spec.session] += sum(one.is_kept(now) for one in state.checkpoints)
    return nums


def _cursor(last: ClientSession) -> dict[str, str]:
    return {"last_created_at": _time(last.created_at), "last_session_id": last.id}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
