"""Routes of a run's operations. Each has a number, and is answered by a future.

A request that cannot be read is refused with 400. One that makes no sense is a future that fails: a refusal would leave a hole in
the run's numbers, for which all behind it would wait.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response

from common.suggestions import did_you_mean
from common.wire.messages import OptimSpec
from common.wire.operations import STAND_IN, SaveWeights
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.reading.tasks import ReadPass
from manager_service.http.stores.operation_store import NewOperation, submit
from manager_service.http.stores.run_store import RunRow
from manager_service.http.stores.tinker_names import MAX_NUMBER, is_checkpoint_name, sampler_name, ttl_fault
from manager_service.http.tinker.parts import MAX_PASS_BYTES, PREFIX, Tinker, answer
from manager_service.http.tinker.request_bodies import SaveBody, StepBody, read
from manager_service.http.tinker.wire.learning import CheckedPass
from manager_service.records.run_records import USED_S

router = APIRouter(prefix=PREFIX, include_in_schema=False)
log = structlog.get_logger()

ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The parameters of a step with their defaults, Tinker's."""


@router.post("/forward_backward")
@router.post("/forward")
async def forward_backward(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    """A pass over data; older clients ask `forward` for one without a gradient, in JSON: it fails in its turn."""
    body, encoding = await request.body(), request.headers.get("content-encoding", "")
    task = ReadPass(body, request.headers.get("content-type", ""), encoding, MAX_PASS_BYTES)
    num_bytes = MAX_PASS_BYTES if encoding else len(body)
    found = await unless_gone(request, api.helpers.do(tenant, task, num_bytes=num_bytes))
    checked = msgspec.convert(found, CheckedPass)
    run = await tinker.runs.named(tenant.id, checked.model)
    fault = checked.fault or _misfit(run.base, checked)
    if checked.stands_in:
        _tell_of_stand_in(run.spec.public_id)
    operation = NewOperation(
        seq=checked.seq,
        action="forward" if checked.forward_only else "forward_backward",
        payload=b"" if fault else checked.payload,
        num_tokens=checked.num_tokens,
        fault=fault,
    )
    return await submitted(api, run, operation)


@lru_cache(maxsize=10_000)
def _tell_of_stand_in(run: str) -> None:
    """Logs it once a run."""
    log.warning(STAND_IN, run=run, formula="trainer_service/data.py")


MAX_POSITIONS = 262_144
"""Most positions of one operation: a trainer does nothing else meanwhile. The SDK's own have at most 250,000."""


def _misfit(base: Base, checked: CheckedPass) -> str:
    """The reason why a model cannot read the data; empty if it can."""
    if checked.num_tokens > max(MAX_POSITIONS, base.tokenizer.context):
        return f"{checked.num_tokens:,} positions in one operation are too many: at most {MAX_POSITIONS:,}; send the data in several calls"
    if checked.longest > base.tokenizer.context:
        return f"a datum has {checked.longest} tokens, and the context of {base.name!r} is {base.tokenizer.context}"
    if checked.largest >= base.tokenizer.vocab_size:
        return f"there is no token {checked.largest}: {base.name!r} has {base.tokenizer.vocab_size}"
    return ""


@router.post("/optim_step")
async def optim_step(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, StepBody)
    run = await tinker.runs.named(tenant.id, body.model_id)
    fault = _optim_fault(body)
    payload = b"" if fault else msgspec.msgpack.encode(_optim(body.adam_params or {}))
    return await submitted(api, run, NewOperation(seq=body.seq_id, action="optim_step", payload=payload, fault=fault))


def _optim_fault(body: StepBody) -> str:
    """The fault of a step's parameters; empty if they have none."""
    if body.optimizer_params is not None:
        return f"the optimizer {str(body.optimizer_params.get('type'))[:64]!r} is not offered: use AdamParams"
    for name, value in (body.adam_params or {}).items():
        if name not in ADAM:
            return f"adam_params has no {name!r}{did_you_mean(name, ADAM)}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return f"adam_params: {name} must be a number"
        if (value < 0 and name != "grad_clip_norm") or (name.startswith("beta") and value >= 1):
            return f"adam_params: {name} cannot be {value:g}"
    return ""


def _optim(params: Mapping[str, float]) -> OptimSpec:
    values = {name: float(value) for name, value in (ADAM | dict(params)).items()}
    clip = max(0.0, values.pop("grad_clip_norm"))
    return OptimSpec(**values, grad_clip=clip)


@router.post("/save_weights")
async def save_weights(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, SaveBody)
    run = await tinker.runs.named(tenant.id, body.model_id)
    payload = SaveWeights(_name(body), ttl_s=body.ttl_seconds, overwrite=body.overwrite)
    return await _saved(api, run, body, "save_weights", payload)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, SaveBody)
    run = await tinker.runs.named(tenant.id, body.model_id)
    if body.path is not None or body.sampling_session_seq_id is None:
        payload = SaveWeights(_name(body), ttl_s=body.ttl_seconds, overwrite=body.overwrite)
        return await _saved(api, run, body, "save_for_sampler", payload)
    name = sampler_name(run.spec.session, body.sampling_session_seq_id)
    payload = SaveWeights(sampler=name, inflight=body.kind == "inflight", ttl_s=body.ttl_seconds)
    if not _save_fault(body, payload):
        await tinker.samplers.note(run.base, tenant.id, name, USED_S)
    return await _saved(api, run, body, "save_for_sampler", payload)


@router.post("/save_weights_external")
async def save_weights_external(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    """The files of any version are those that PEFT loads, so there is nothing to convert."""
    body = await read(request, SaveBody)
    run = await tinker.runs.named(tenant.id, body.model_id)
    return await _saved(api, run, body, "save_external", SaveWeights(_name(body), ttl_s=body.ttl_seconds))


def _name(body: SaveBody) -> str:
    """A save without a name is named by its number."""
    return body.path or f"{body.seq_id:06d}"


async def _saved(api: Api, run: RunRow, body: SaveBody, action: Any, payload: SaveWeights) -> Response:
    """A repeat is known without the sampler's number, which the SDK changes, and has the first one's answer."""
    operation = NewOperation(
        seq=body.seq_id,
        action=action,
        payload=msgspec.msgpack.encode(payload),
        fault=_save_fault(body, payload),
        known_by=msgspec.msgpack.encode(msgspec.structs.replace(payload, sampler="")),
    )
    return await submitted(api, run, operation)


def _save_fault(body: SaveBody, payload: SaveWeights) -> str:
    """The fault of a save; empty if it has none."""
    if payload.name and not is_checkpoint_name(payload.name):
        return f"{payload.name[:64]!r} cannot be a checkpoint's name: 1 to 128 letters, digits, '.', '_' and '-', not '.' or '..'"
    if fault := ttl_fault(payload.ttl_s):
        return fault
    if body.age_encryption_recipients:
        return "age_encryption_recipients: encryption is not offered: leave it out, and encrypt what you download"
    if body.kind not in ("snapshot", "inflight"):
        return f"unknown kind {body.kind[:64]!r}: snapshot or inflight"
    if payload.sampler and not 0 <= (body.sampling_session_seq_id or 0) <= MAX_NUMBER:
        return f"sampling_session_seq_id is between 0 and {MAX_NUMBER}"
    return ""


async def submitted(api: Api, run: RunRow, operation: NewOperation) -> Response:
    return answer({"request_id": await submit(run, operation, api.objects), "model_id": run.spec.public_id})
