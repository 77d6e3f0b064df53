"""Routes that only read: lists of runs, their checkpoints and sessions, and a search of sessions."""

import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from common.errors import InvalidInput
from common.wire.operations import Kind
from manager_service.http.context import Parts, Tenant
from manager_service.http.stores.run_store import RunRow
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import NameBody, SearchBody, StatusBody, read
from manager_service.http.tinker.run_routes import ATTENTION, MLP
from manager_service.records.run_records import Checkpoint, ClientSession, RunSpec, RunState

router = APIRouter(prefix=PREFIX, include_in_schema=False)

TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The protocol's names for the kinds of checkpoints."""
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
MAX_FOUND = 200
"""Sessions that a search finds at most."""
NUM_READ = 500
"""Sessions that a search looks at together."""
REASONS = ("success", "errored", "interrupted")


@router.get("/training_runs")
async def list_runs(tenant: Tenant, tinker: Tinker, limit: Limit = 20, offset: Offset = 0) -> Response:
    pages, num = await tinker.runs.newest_first(tenant.id, limit=limit, offset=offset)
    shown = [_shown(run.spec, state) async for page in pages for run, state in page]
    return answer({"training_runs": shown, "cursor": _cursor(limit, offset, num)})


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, tenant: Tenant, tinker: Tinker) -> Response:
    run = await tinker.runs.named(tenant.id, run_id)
    return answer(_shown(run.spec, await run.state()))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, tenant: Tenant, tinker: Tinker) -> Response:
    run = await tinker.runs.named(tenant.id, run_id)
    return answer({"checkpoints": _checkpoints(run, await run.state())})


@router.get("/checkpoints")
async def list_all_checkpoints(tenant: Tenant, tinker: Tinker, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Newest runs first."""
    shown, num, now = list[dict[str, Any]](), 0, time.time()
    async for page in tinker.runs.pages(tenant.id):
        for run, state in page:
            kept = state.kept(now)
            rows = kept[max(0, offset - num) : max(0, offset + limit - num)]
            shown += [_checkpoint(run.spec, one) for one in rows]
            num += len(kept)
    return answer({"checkpoints": shown, "cursor": _cursor(limit, offset, num)})


@router.post("/weights_info")
async def weights_info(request: Request, tenant: Tenant, tinker: Tinker) -> Response:
    """Facts that a client needs of a checkpoint before it loads it."""
    source = await tinker.runs.source(tenant.id, (await read(request, NameBody)).tinker_path)
    targets = source.lora.targets
    return answer(
        {
            "base_model": source.asked_model,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": source.lora.rank,
            "train_unembed": False,
            "train_mlp": not targets or any(name in targets for name in MLP),
            "train_attn": not targets or any(name in targets for name in ATTENTION),
        }
    )


@router.get("/sessions")
async def list_sessions(tenant: Tenant, tinker: Tinker, limit: Limit = 20, offset: Offset = 0) -> Response:
    return answer({"sessions": await tinker.sessions.newest_first(tenant.id, limit=limit, offset=offset)})


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    session = await tinker.sessions.find(tenant.id, session_id)
    mine = [run async for page in tinker.runs.pages(tenant.id, {session.id}) for run, _ in page]
    return answer(
        {
            "training_run_ids": [run.spec.public_id for run in mine],
            "sampler_ids": await tinker.samplers.of_session(tenant.id, session.id),
            "user_metadata": session.user_metadata or None,
            "display_name": session.display_name,
        }
    )


def _shown(spec: RunSpec, state: RunState) -> dict[str, Any]:
    """A TrainingRun."""
    newest = {one.kind: one for one in state.kept(time.time())}
    last = {kind: _checkpoint(spec, one) for kind, one in newest.items()}
    return {
        "training_run_id": spec.public_id,
        "base_model": spec.asked_model,
        "model_owner": spec.tenant,
        "is_lora": True,
        "lora_rank": spec.lora.rank,
        "corrupted": state.status == "failed",
        "last_request_time": _time(max([spec.created_at, *(one.created_at for one in state.checkpoints)])),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": shown_metadata(spec.user_metadata),
    }


def _checkpoints(run: RunRow, state: RunState) -> list[dict[str, Any]]:
    return [_checkpoint(run.spec, checkpoint) for checkpoint in state.kept(time.time())]


def _checkpoint(spec: RunSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    name = f"{checkpoint.kind}/{checkpoint.name}"
    return {
        "checkpoint_id": name,
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": _time(checkpoint.created_at),
        "tinker_path": f"tinker://{spec.public_id}/{name}",
        "public": False,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def shown_metadata(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    return {name: str(value) for name, value in metadata.items()} or None


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(limit: int, offset: int, num: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": num}


# ---- search ---------------------------------------------------------------------------------------------------------


@router.post("/sessions/search")
async def search_sessions(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    """Newest first. A session is kept for a month after its last sign of life."""
    body = await read(request, SearchBody)
    if not 1 <= body.limit <= MAX_FOUND:
        raise InvalidInput(f"limit is between 1 and {MAX_FOUND}", param="limit")
    if body.project_ids:
        raise InvalidInput("there are no projects here: leave project_ids out", param="project_ids")
    found: list[tuple[ClientSession, bool]] = []
    before = None if body.cursor is None else (body.cursor.created_at, body.cursor.last_session_id)
    is_own = body.owner.type != "user" or tenant.id in body.owner.owner_urns  # nobody sees another's sessions
    ids = await tinker.sessions.ids_before(tenant.id, before) if is_own else []
    async with api.reads.of(tenant.id):  # decoded sessions are many times as large as their records
        for start in range(0, len(ids), NUM_READ):
            rows = await _read(tinker, tenant.id, ids[start : start + NUM_READ])
            found += [(session, alive) for session, alive in rows if _fits(body, session, alive=alive)]
            if len(found) > body.limit:
                break
    shown, more = found[: body.limit], len(found) > body.limit
    nums = await _num_checkpoints(tinker, tenant.id, {session.id for session, _ in shown})
    last = shown[-1][0] if shown else None
    next_cursor = last and {"last_created_at": _time(last.created_at), "last_session_id": last.id}
    rows = [_summary(session, alive=alive, num_checkpoints=nums[session.id]) for session, alive in shown]
    return answer({"sessions": rows, "next_cursor": next_cursor if more else None})


async def _read(tinker: Records, tenant: str, ids: list[str]) -> list[tuple[ClientSession, bool]]:
    """Sessions, and whether each is alive."""
    sessions = await tinker.sessions.some(tenant, ids)
    alive = await tinker.sessions.alive([session.id for session in sessions])
    return [(session, session.id in alive) for session in sessions]


def _fits(body: SearchBody, session: ClientSession, *, alive: bool) -> bool:
    name = (session.display_name or "").lower()
    named = [session.id == body.session_id] if body.session_id is not None else []
    named += [all(word in name for word in body.display_name.lower().split())] if body.display_name else []
    if named and not any(named):
        return False
    if any(str(session.user_metadata.get(key)) != value for key, value in body.user_metadata.items()):
        return False
    return body.statuses is None or any(_has_status(each, session, alive=alive) for each in body.statuses)


def _has_status(wanted: StatusBody, session: ClientSession, *, alive: bool) -> bool:
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
        "user_metadata": shown_metadata(session.user_metadata),
    }


async def _num_checkpoints(tinker: Records, tenant: str, sessions: set[str]) -> Counter[str]:
    """The number of checkpoints of each session."""
    now, nums = time.time(), Counter[str]()
    async for page in tinker.runs.pages(tenant, sessions):
        for run, state in page:
            nums[run.spec.session] += len(state.kept(now))
    return nums
