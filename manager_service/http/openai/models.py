"""/v1/models: base models, and the tenant's tuned ones."""

import asyncio
import time
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from common.bus.streams import partition_of
from common.errors import InvalidInput
from common.text.tokens import REPLY_ROLES, ChatTokenizer
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.errors import COMMON, RETRY_LATER, ApiError, conflict, declared
from manager_service.http.openai.grader_models import asked_models
from manager_service.http.openai.paging import as_json, written
from manager_service.http.schemas import BaseObject, Deleted, ModelObject, Page
from manager_service.http.stores.job_store import POLL_S, JobRow, JobStore
from manager_service.http.stores.model_names import find_model
from manager_service.records.archive import TunedModel
from manager_service.records.job_records import FINAL
from manager_service.records.stored import count_again

router = APIRouter(prefix="/v1/models", tags=["models"], responses=COMMON)

OPERATOR = "marlaas"
AT_ONCE = 25
"""Models that are written before others have the event loop."""


@router.get("", response_model=Page[ModelObject])
async def list_models(api: Parts, tenant: Tenant) -> Response:
    """Tuned models with at least one trained version, newest first; then the base models. All on one page: `openai` asks for no other."""
    found = dict[tuple[int, str], tuple[Base, TunedModel]]()  # by creation and job
    for base in api.bases.values():
        # before the archive's: a job that moves is in both, not in none
        live = await JobStore(api).models(base, tenant.id)
        for each in (*live, *await base.archive.models(tenant.id)):
            found[each.created_ms, each.job] = (base, each)
    rows = dict[str, bytes]()
    for key in sorted(found, reverse=True):
        base, each = found[key]
        rows[each.name] = as_json(_adapter(each.name, each.created_ms // 1000, each.tenant, base.name, each.version))
        if not len(rows) % AT_ONCE:
            await api.rounds.next(tenant.id)
    return written(rows | {name: as_json(_base(base, name)) for name, base in api.bases.items()}, has_more=False)


@router.get("/{model:path}", responses=declared(404))
async def retrieve(api: Parts, tenant: Tenant, model: str) -> ModelObject:
    """`@{version}` behind a tuned model's name asks whether that version exists."""
    named = await find_model(api, tenant, model)
    if named.adapter.is_base:
        return _base(named.base, model)
    if named.row is not None:
        return _tuned(named.row, model)
    base, adapter = named.base, named.adapter
    return _adapter(model, base.created_at, adapter.tenant, base.name, adapter.version)


@router.delete("/{model:path}", responses=declared(404, 409))
async def delete(api: Parts, tenant: Tenant, model: str) -> Deleted:
    """Delete all versions of a finished job's adapter, and its samples; the job and its events stay.

    All other writes to the adapter store are by trainers. A finished job has none, but for a step under way.
    """
    named = await find_model(api, tenant, model)
    if named.adapter.is_base:
        raise InvalidInput("a base model cannot be deleted", param="model")
    if named.row is None:
        raise InvalidInput("a run's model goes with its checkpoints: delete those", param="model")
    if "@" in model:
        raise InvalidInput("a single version cannot be deleted: name the model without @", param="model")
    if named.row.state.status not in FINAL:
        raise conflict(f"the model's job is {named.row.state.status}: cancel it first", code="wrong_job_state")
    row = await _left(api, named.base, named.row)
    if job := await JobStore(api).unfinished_user(tenant.id, lambda spec: model in asked_models(spec.env)):
        raise conflict(f"graders of the job {job} ask this model until it has ended", code="model_in_use")
    await JobStore(api).mark_deleted(row)
    base, job = named.base, row.spec.id
    await api.adapters.delete_job(tenant.id, job)
    for files in (base.archive.sample_files, base.archive.answer_files):
        await files.delete(tenant.id, job)
    await count_again(api.objects, base.redis, base.cell, tenant.id, job)
    return Deleted(id=model, object="model")


async def _left(api: Api, base: Base, row: JobRow) -> JobRow:
    """The row of an ended job once its owner, who would count the same bytes as deleted once more, is done. Raises ApiError 409."""
    deadline = time.monotonic() + api.limits.command_wait_s
    while await _is_leaving(base, row):
        if time.monotonic() > deadline:
            told = "the model's job has just ended, and versions of it are being deleted: try again in some seconds"
            raise ApiError(409, told, code="wrong_job_state", headers=RETRY_LATER)
        await asyncio.sleep(POLL_S)
        row = await JobStore(api).find(row.spec.tenant, row.spec.id)
    return row


async def _is_leaving(base: Base, row: JobRow) -> bool:
    """Are versions of an ended job deleted just now, or will they be?"""
    state, active = row.state, base.cell.active(partition_of(row.spec.tenant))
    if state.leaving is None and (state.training or state.initialising):
        return False  # a trainer may wait for room on a full disk, which deletions make
    return row.archived is None and bool(await base.redis.sismember(active, row.spec.id))


def _base(base: Base, name: str) -> ModelObject:
    weights, tokenizer = base.weights, base.tokenizer
    about = BaseObject(
        source=Path(base.where).name if Path(base.where).is_dir() else base.where,
        num_weights=weights.num or None,
        dtype=weights.dtype or None,
        context=tokenizer.context,
        learning_rate=tokenizer.learning_rate,
        rules_out=_rules_out(tokenizer),
        **asdict(base.cluster.turn("rollout")),
    )
    return ModelObject(id=name, created=base.created_at, owned_by=OPERATOR, root=base.name, base=about)


@lru_cache(maxsize=64)
def _rules_out(tokenizer: ChatTokenizer) -> list[str]:
    refused = [role for role in REPLY_ROLES if tokenizer.reply_fault([role])]
    found: list[str] = []
    if refused:
        found.append(
            f"environments that answer with messages of role {', '.join(refused)}: the chat template cannot append them"
        )
    if not tokenizer.shows_tools():
        found.append("environments with tools: the chat template does not show them")
    return found


def _tuned(row: JobRow, name: str) -> ModelObject:
    return _adapter(name, row.spec.created_at, row.spec.tenant, row.spec.base_model, row.state.version)


def _adapter(name: str, created: int, owner: str, root: str, version: int) -> ModelObject:
    return ModelObject(id=name, created=created, owned_by=owner, root=root, version=version)
