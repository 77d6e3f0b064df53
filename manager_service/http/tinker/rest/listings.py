"""Routes that only read: runs, their checkpoints, sessions."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from common.wire.operations import Kind
from manager_service.http.context import Parts, Tenant
from manager_service.http.stores.run_store import RunRow
from manager_service.http.tinker.parts import PREFIX, Known, answer
from manager_service.http.tinker.request_bodies import WeightsNamed, read
from manager_service.http.tinker.run_routes import ATTENTION, MLP
from manager_service.records.run_records import Checkpoint, RunSpec, RunState

router = APIRouter(prefix=PREFIX, include_in_schema=False)

TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The protocol's names for the kinds of checkpoints."""
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


@router.get("/training_runs")
async def list_runs(tenant: Tenant, known: Known, limit: Limit = 20, offset: Offset = 0) -> Response:
    runs, num = await known.runs.newest_first(tenant.id, limit=limit, offset=offset)
    return answer(
        {"training_runs": [_shown(run.spec, state) for run, state in runs], "cursor": _cursor(limit, offset, num)}
    )


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, tenant: Tenant, known: Known) -> Response:
    run = await known.runs.named(tenant.id, run_id)
    return answer(_shown(run.spec, await run.state()))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, tenant: Tenant, known: Known) -> Response:
    run = await known.runs.named(tenant.id, run_id)
    return answer({"checkpoints": _checkpoints(run, await run.state())})


@router.get("/checkpoints")
async def list_all_checkpoints(tenant: Tenant, known: Known, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Newest runs first."""
    shown, num = list[dict[str, Any]](), 0
    async for page in known.runs.pages(tenant.id):
        rows = [row for run, state in page for row in _checkpoints(run, state)]
        shown += rows[max(0, offset - num) : max(0, offset + limit - num)]
        num += len(rows)
    return answer({"checkpoints": shown, "cursor": _cursor(limit, offset, num)})


@router.post("/weights_info")
async def weights_info(request: Request, tenant: Tenant, known: Known) -> Response:
    """Facts that a client needs of a checkpoint before it loads it."""
    source = await known.runs.source(tenant.id, (await read(request, WeightsNamed)).tinker_path)
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
async def list_sessions(tenant: Tenant, known: Known, limit: Limit = 20, offset: Offset = 0) -> Response:
    return answer({"sessions": await known.sessions.newest_first(tenant.id, limit=limit, offset=offset)})


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, api: Parts, tenant: Tenant, known: Known) -> Response:
    session = await known.sessions.find(tenant.id, session_id)
    mine = [run async for page in known.runs.pages(tenant.id, {session.id}) for run, _ in page]
    return answer(
        {
            "training_run_ids": [run.spec.public_id for run in mine],
            "sampler_ids": await known.samplers.of_session(tenant.id, session.id),
            "user_metadata": session.user_metadata or None,
            "display_name": session.display_name,
        }
    )


def _shown(spec: RunSpec, state: RunState) -> dict[str, Any]:
    """A TrainingRun."""
    newest: dict[str, dict[str, Any]] = {}
    now = time.time()
    for checkpoint in state.checkpoints:
        if checkpoint.is_kept(now):
            newest[checkpoint.kind] = _checkpoint(spec, checkpoint)
    return {
        "training_run_id": spec.public_id,
        "base_model": spec.asked_model,
        "model_owner": spec.tenant,
        "is_lora": True,
        "lora_rank": spec.lora.rank,
        "corrupted": state.status == "failed",
        "last_request_time": _time(max([spec.created_at, *(one.created_at for one in state.checkpoints)])),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": {name: str(value) for name, value in spec.user_metadata.items()} or None,
    }


def _checkpoints(run: RunRow, state: RunState) -> list[dict[str, Any]]:
    now = time.time()
    return [_checkpoint(run.spec, checkpoint) for checkpoint in state.checkpoints if checkpoint.is_kept(now)]


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


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(limit: int, offset: int, num: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": num}
