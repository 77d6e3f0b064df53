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
from manager_service.http.stores.operation_store import AskedOperation, submit, submit_unload
from manager_service.http.stores.run_store import RunRow, Source
from manager_service.http.stores.session_store import check_told
from manager_service.http.stores.tinker_names import find_base, numbered, parse_path, run_name, tokenizer_id
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import (
    CreateAsked,
    LoadAsked,
    LoraAsked,
    NameGiven,
    OptimizerAsked,
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
    asked = await read(request, CreateAsked)
    await _check_session(tenant, tinker, asked)
    base = find_base(api, asked.base_model)
    _check_optimizer(asked.optimizer_config)
    lora = asked.lora_config or LoraAsked()
    spec = _spec(tenant, asked, base, lora=_lora(base, lora), seed=lora.seed, asked_model=asked.base_model)
    await tinker.runs.create(base, spec, asked=asked, kind="create_model")
    return answer({"request_id": f"{spec.id}:0", "model_id": spec.public_id})


@router.post("/load_weights")
async def load_weights(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    asked = await read(request, LoadAsked)
    if asked.session_id is None:
        return await _load_into(api, tenant, tinker, asked)
    await _check_session(tenant, tinker, asked)
    source = await _source(tenant, tinker, asked)
    _check_optimizer(asked.optimizer_config or OptimizerAsked())
    if asked.base_model is not None and find_base(api, asked.base_model) is not source.base:
        raise InvalidInput(f"{asked.path} is of the base model {source.asked_model!r}", param="base_model")
    model = asked.base_model or source.asked_model
    spec = _spec(tenant, asked, source.base, lora=source.lora, asked_model=model, source=source.adapter)
    spec = msgspec.structs.replace(spec, with_optimizer=asked.optimizer)
    await tinker.runs.create(source.base, spec, asked=asked, kind="load_weights")
    return answer({"request_id": f"{spec.id}:0", "model_id": spec.public_id})


async def _check_session(tenant: TenantRecord, tinker: Records, asked: CreateAsked | LoadAsked) -> None:
    """Raises NotFound, InvalidInput unless a run can begin in the session that is asked for."""
    session = await tinker.sessions.find(tenant.id, asked.session_id or "")
    if session.finished:
        raise InvalidInput(f"the session {session.id} has finished: create another", param="session_id")
    check_told(user_metadata=asked.user_metadata)


async def _load_into(api: Api, tenant: TenantRecord, tinker: Records, asked: LoadAsked) -> Response:
    """A load into a run that exists is an operation: what is wrong with it is a future that fails, for it has a number."""
    run = await tinker.runs.named(tenant.id, asked.model_id or "")
    payload, fault = b"", ""
    try:
        source = await _source(tenant, tinker, asked)
        payload = msgspec.msgpack.encode(LoadWeights(asked.path, source.adapter, asked.optimizer))
        fault = _misfit(run, source, asked.path)
    except (InvalidInput, NotFound) as error:
        fault = str(error)
    operation = AskedOperation(seq=asked.seq_id or 0, action="load", payload=payload, fault=fault)
    return answer({"request_id": await submit(run, operation, api.objects), "model_id": run.spec.public_id})


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


async def _source(tenant: TenantRecord, tinker: Records, asked: LoadAsked) -> Source:
    """The version that is asked for, noted as used. Raises InvalidInput, NotFound."""
    if asked.optimizer and (kind := parse_path(asked.path).kind) != "weights":
        raise InvalidInput(f"…/{kind}/ have no optimiser state: load …/weights/, or without it", param="optimizer")
    return await tinker.runs.source(tenant.id, asked.path, with_optimizer=asked.optimizer)


@router.post("/get_info")
async def get_info(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    run = await tinker.runs.named(tenant.id, (await read(request, NameGiven)).model_id)
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
    run = await tinker.runs.named(tenant.id, (await read(request, NameGiven)).model_id)
    return answer({"request_id": await submit_unload(run, api.objects), "model_id": run.spec.public_id})


def _spec(
    tenant: TenantRecord,
    asked: CreateAsked | LoadAsked,
    base: Base,
    *,
    lora: LoraSpec,
    asked_model: str,
    seed: int | None = None,
    source: AdapterRef | None = None,
) -> RunSpec:
    session = asked.session_id or ""
    return RunSpec(
        id=run_name(session, numbered(asked.model_seq_id, "model_seq_id")),
        tenant=tenant.id,
        session=session,
        base_model=base.name,
        asked_model=asked_model,
        lora=lora,
        seed=secrets.randbits(53) if seed is None else seed % 2**53,
        created_at=int(time.time()),
        source=source,
        user_metadata=asked.user_metadata or {},
        weight=tenant.weight,
    )


def _check_optimizer(optimizer: OptimizerAsked) -> None:
    if optimizer.type != "adamw":
        hint = did_you_mean(optimizer.type, ["adamw"])
        raise InvalidInput(
            f"the optimizer {optimizer.type!r} is not offered{hint}: use adamw", param="optimizer_config"
        )


def _lora(base: Base, asked: LoraAsked) -> LoraSpec:
    """Raises InvalidInput. `train_unembed` is true in every request of the SDK: it is accepted, and not trained."""
    limit = min(MAX_RANK, base.cluster.max_lora_rank() or MAX_RANK)
    if not 1 <= asked.rank <= limit:
        raise InvalidInput(f"rank {asked.rank}: this service takes 1 to {limit}", param="lora_config.rank")
    wanted = (ATTENTION if asked.train_attn else ()) + (MLP if asked.train_mlp else ())
    if not wanted:
        raise InvalidInput(
            "LoRA on the unembedding alone is not offered: train_attn or train_mlp too", param="lora_config"
        )
    there = _present(base, wanted)
    if not there:
        names = ", ".join(sorted(base.linear_layers))
        raise InvalidInput(
            f"{base.name!r} has none of the layers {', '.join(wanted)}; it has {names}", param="lora_config"
        )
    return LoraSpec(asked.rank, ALPHA, () if asked.train_attn and asked.train_mlp else there)
