"""Routes of samplers, and of requests for samples."""

import hashlib
import secrets
from array import array

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from common.errors import InvalidInput
from common.wire.messages import BASE, AdapterRef
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.quota import check_room
from manager_service.http.reading.tasks import ReadSample, with_room
from manager_service.http.sampling.choices import InferenceRequest
from manager_service.http.stores.sampler_store import NAMED_KEPT_S
from manager_service.http.stores.tinker_names import find_base, numbered, sampler_name
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import NameBody, SamplerBody, read
from manager_service.http.tinker.wire.sample_requests import CheckedSample
from manager_service.records.run_records import Sampler
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix=PREFIX, include_in_schema=False)


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, SamplerBody)
    session = await tinker.sessions.find(tenant.id, body.session_id)
    number = numbered(body.sampling_session_seq_id, "sampling_session_seq_id")
    base, model, adapter = await _named(api, tenant, tinker, body.base_model, body.model_path)
    sampler = Sampler(
        id=sampler_name(session.id, number),
        tenant=tenant.id,
        asked_model=model,
        keep_s=NAMED_KEPT_S,
        adapter=adapter,
        path=body.model_path,
    )
    await tinker.samplers.create(base, sampler)
    return answer({"type": "create_sampling_session", "sampling_session_id": sampler.id})


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, tenant: Tenant, tinker: Tinker) -> Response:
    """Another client of a sampler: its number keeps the numbers of its requests apart from the others'."""
    base, sampler = await tinker.samplers.find(tenant.id, (await read(request, NameBody)).sampling_session_id)
    return answer({"type": "join_sampling_session", "client_counter": await tinker.samplers.join(base, sampler)})


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, tenant: Tenant, tinker: Tinker) -> Response:
    _, sampler = await tinker.samplers.find(tenant.id, sampler_id)
    return answer({"sampler_id": sampler.id, "base_model": sampler.asked_model, "model_path": sampler.path})


@router.post("/asample")
async def asample(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    """The version that samples is settled here; the name of every sample says it."""
    body = await request.body()
    found = await unless_gone(request, api.helpers.do(tenant, ReadSample(body), num_bytes=len(body)))
    checked = msgspec.convert(found, CheckedSample)
    base, adapter = await _adapter(api, tenant, tinker, checked)
    await check_room(base.gauge)
    once = f"{checked.sampler}/{checked.seq}/{hashlib.sha256(body).hexdigest()}" if checked.sampler else ""
    session = (checked.sampler or "").partition(":")[0]
    name = tinker.futures[base.name].samples.start(_ask(tenant, base, adapter, checked), once, session)
    ids = [f"{name}/{sample}@{adapter.version}" for sample in range(checked.num_samples)]
    return answer({"request_id": name, "sample_sequence_ids": ids})


async def _adapter(api: Api, tenant: TenantRecord, tinker: Records, checked: CheckedSample) -> tuple[Base, AdapterRef]:
    if checked.sampler is None:
        base, _, adapter = await _named(api, tenant, tinker, checked.base_model, checked.model_path)
        return base, adapter
    base, sampler = await tinker.samplers.find(tenant.id, checked.sampler)
    return base, await tinker.samplers.adapter(base, sampler)


async def _named(
    api: Api, tenant: TenantRecord, tinker: Records, model: str | None, path: str | None
) -> tuple[Base, str, AdapterRef]:
    """(base model, what its user calls it, version) of a base model's name or a checkpoint's path."""
    if path is not None:
        source = await tinker.runs.source(tenant.id, path)
        return source.base, source.asked_model, source.adapter
    if model is None:
        raise InvalidInput("give base_model or model_path", param="base_model")
    return find_base(api, model), model, BASE


def _ask(tenant: TenantRecord, base: Base, adapter: AdapterRef, checked: CheckedSample) -> InferenceRequest:
    """Raises InvalidInput for a prompt that the model cannot read."""
    prompt, tokenizer = (
        array("i", checked.prompt.numpy().tobytes()),
        base.tokenizer,
    )  # a list would take ten times its memory
    room = tokenizer.context - len(with_room(prompt, tokenizer))
    if max(prompt) >= tokenizer.vocab_size:
        raise InvalidInput(
            f"prompt: there is no token {max(prompt)}: {base.name!r} has {tokenizer.vocab_size}", param="prompt"
        )
    if max(checked.sampling.stop_ids or (0,)) >= tokenizer.vocab_size:
        raise InvalidInput(
            f"sampling_params.stop: {base.name!r} has no token {max(checked.sampling.stop_ids or ())}: its ids are below"
            f" {tokenizer.vocab_size}",
            param="sampling_params.stop",
        )
    limit = min(room, checked.sampling.max_tokens or room)
    return InferenceRequest(
        tenant=tenant,
        adapter=adapter,
        prompts=[prompt],
        num_choices=checked.num_samples,
        sampling=[msgspec.structs.replace(checked.sampling, max_tokens=limit, seeded=checked.seed is not None)],
        seed=secrets.randbits(53) if checked.seed is None else checked.seed,
        stream=False,
        bulk=True,
    )
