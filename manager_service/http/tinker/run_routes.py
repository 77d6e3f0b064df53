"""Routes of a run as a whole: create it, with new weights or from a checkpoint, ask about it, end it."""

import secrets
import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from common.errors import InvalidInput, NotFound
from common.suggestions import did_you_mean
from common.wire.messages import AdapterRef, LoraSpec
from common.wire.operations import LoadWeights
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.stores.operation_store import NewOperation, submit_unload
from manager_service.http.stores.run_store import RunRow, Source
from manager_service.http.stores.tinker_names import find_base, numbered, parse_path, run_name, tokenizer_id
from manager_service.http.tinker.operations import submitted
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import (
    CreateBody,
    LoadBody,
    LoraBody,
    NameBody,
    OptimizerBody,
    read,
)
from manager_service.records.run_records import RunSpec
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix=PREFIX, include_in_schema=False)

ALPHA = 32.0
"""Tinker's, whatever the rank."""
MAX_RANK = 512
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@router.post("/create_model")
async def create_model(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, CreateBody)
    await _check_session(tenant, tinker, body)
    base = find_base(api, body.base_model)
    _check_optimizer(body.optimizer_config)
    lora = body.lora_config or LoraBody()
    spec = _spec(tenant, body, base, lora=_lora(base, lora), seed=lora.seed, asked_model=body.base_model)
    return await _created(tinker, base, spec, body, "create_model")


async def _created(tinker: Records, base: Base, spec: RunSpec, body: CreateBody | LoadBody, kind: str) -> Response:
    await tinker.runs.create(base, spec, body=body, kind=kind)
    return answer({"request_id": f"{spec.id}:0", "model_id": spec.public_id})


@router.post("/load_weights")
async def load_weights(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, LoadBody)
    if body.session_id is None:
        return await _load_into(api, tenant, tinker, body)
    await _check_session(tenant, tinker, body)
    source = await _source(tenant, tinker, body)
    _check_optimizer(body.optimizer_config or OptimizerBody())
    if body.base_model is not None and find_base(api, body.base_model) is not source.base:
        raise InvalidInput(f"{body.path} is of the base model {source.asked_model!r}", param="base_model")
    model = body.base_model or source.asked_model
    spec = _spec(tenant, body, source.base, lora=source.lora, asked_model=model, source=source.adapter)
    spec = msgspec.structs.replace(spec, with_optimizer=body.optimizer)
    return await _created(tinker, source.base, spec, body, "load_weights")


async def _check_session(tenant: TenantRecord, tinker: Records, body: CreateBody | LoadBody) -> None:
    """Raises NotFound, InvalidInput unless a run can begin in the session that is asked for."""
    session = await tinker.sessions.find(tenant.id, body.session_id or "")
    if session.finished:
        raise InvalidInput(f"the session {session.id} has finished: create another", param="session_id")


async def _load_into(api: Api, tenant: TenantRecord, tinker: Records, body: LoadBody) -> Response:
    """A load into a run is an operation with a number: what is wrong with it is a future that fails."""
    run = await tinker.runs.named(tenant.id, body.model_id or "")
    payload, fault = b"", ""
    try:
        source = await _source(tenant, tinker, body)
        payload = msgspec.msgpack.encode(LoadWeights(body.path, source.adapter, body.optimizer))
        fault = _misfit(run, source, body.path)
    except (InvalidInput, NotFound) as error:
        fault = str(error)
    operation = NewOperation(seq=body.seq_id or 0, action="load", payload=payload, fault=fault)
    return await submitted(api, run, operation)


def _misfit(run: RunRow, source: Source, path: str) -> str:
    """The reason why a run cannot go on from a version; empty if it can."""
    mine, theirs = _shape(run.base, run.spec.lora), _shape(source.base, source.lora)
    return "" if mine == theirs else f"{path} is of {theirs}, and this run of {mine}: create a run from it instead"


def _shape(base: Base, lora: LoraSpec) -> str:
    """The base, rank, alpha and targets of an adapter, which one that it loads shares."""
    targets = ", ".join(sorted(lora.targets or _present(base, ATTENTION + MLP)))
    return f"{base.name!r} with rank {lora.rank}, alpha {lora.alpha:g} and the targets {targets}"


def _present(base: Base, layers: Sequence[str]) -> tuple[str, ...]:
    """The layers of these that a base model has; all if its layers are not known."""
    return tuple(name for name in layers if name in base.linear_layers or not base.linear_layers)


async def _source(tenant: TenantRecord, tinker: Records, body: LoadBody) -> Source:
    """The version that is asked for, noted as used. Raises InvalidInput, NotFound."""
    if body.optimizer and (kind := parse_path(body.path).kind) != "weights":
        raise InvalidInput(f"…/{kind}/ have no optimiser state: load …/weights/, or without it", param="optimizer")
    return await tinker.runs.source(tenant.id, body.path, with_optimizer=body.optimizer)


@router.post("/get_info")
async def get_info(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    run = await tinker.runs.named(tenant.id, (await read(request, NameBody)).model_id)
    tokenizer = tokenizer_id(api, run.base)
    return answer(
        {
            "type": "get_info",
            "model_id": run.spec.public_id,
            "model_data": {"model_name": run.spec.asked_model, "tokenizer_id": tokenizer},
            "model_name": run.spec.asked_model,
            "is_lora": True,
            "lora_rank": run.spec.lora.rank,
            "optimizer_config": {"type": "adamw"},
        }
    )


@router.post("/unload_model")
async def unload_model(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    run = await tinker.runs.named(tenant.id, (await read(request, NameBody)).model_id)
    return answer({"request_id": await submit_unload(run, api.objects), "model_id": run.spec.public_id})


def _spec(
    tenant: TenantRecord,
    body: CreateBody | LoadBody,
    base: Base,
    *,
    lora: LoraSpec,
    asked_model: str,
    seed: int | None = None,
    source: AdapterRef | None = None,
) -> RunSpec:
    session = body.session_id or ""
    return RunSpec(
        id=run_name(session, numbered(body.model_seq_id, "model_seq_id")),
        tenant=tenant.id,
        session=session,
        base_model=base.name,
        asked_model=asked_model,
        lora=lora,
        seed=secrets.randbits(53) if seed is None else seed % 2**53,
        created_at=int(time.time()),
        source=source,
        user_metadata=body.user_metadata or {},
        weight=tenant.weight,
    )


def _check_optimizer(optimizer: OptimizerBody) -> None:
    if optimizer.type != "adamw":
        hint = did_you_mean(optimizer.type, ["adamw"])
        raise InvalidInput(
            f"the optimizer {optimizer.type!r} is not offered{hint}: use adamw", param="optimizer_config"
        )


def _lora(base: Base, body: LoraBody) -> LoraSpec:
    """Raises InvalidInput. `train_unembed`, true in every request of the SDK, is accepted, and not trained."""
    limit = min(MAX_RANK, base.cluster.max_lora_rank() or MAX_RANK)
    if not 1 <= body.rank <= limit:
        raise InvalidInput(f"rank {body.rank}: this service takes 1 to {limit}", param="lora_config.rank")
    wanted = (ATTENTION if body.train_attn else ()) + (MLP if body.train_mlp else ())
    if not wanted:
        raise InvalidInput(
            "LoRA on nothing but the unembedding is not offered: train_attn or train_mlp too", param="lora_config"
        )
    there = _present(base, wanted)
    if not there:
        names = ", ".join(sorted(base.linear_layers))
        raise InvalidInput(
            f"{base.name!r} has none of the layers {', '.join(wanted)}; it has {names}", param="lora_config"
        )
    return LoraSpec(body.rank, ALPHA, () if body.train_attn and body.train_mlp else there)
