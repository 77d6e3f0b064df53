"""Routes of a client as a whole: its configuration, its session, what the service can do."""

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import ApiError
from manager_service.http.tinker.parts import PREFIX, Tinker, answer
from manager_service.http.tinker.request_bodies import FinishBody, NameBody, SessionBody, read
from manager_service.records.run_records import ClientSession

router = APIRouter(prefix=PREFIX, include_in_schema=False)

CLIENT_CONFIG: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": False,  # in parallel a call's first part comes last, and the others may fill the room before it
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 400_000,  # what the owner schedules at once, and less than a claim check
    "proto_compress_fwdbwd": False,
    "proto_write_fwdbwd": True,  # this and the next two: clients up to 0.24 speak as later ones do
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG: dict[str, Any] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}
UNTRAINED = "LoRA on the unembedding (train_unembed) is not trained here; attention and MLP layers are."


@router.post("/client/config")
async def client_config(tenant: Tenant) -> Response:
    return answer(CLIENT_CONFIG)


@router.post("/client/dynamic_config")
async def dynamic_config(tenant: Tenant) -> Response:
    return answer(DYNAMIC_CONFIG)


@router.get("/healthz")
async def healthz() -> Response:
    return answer({"status": "ok"})


@router.get("/get_server_capabilities")
async def capabilities(api: Parts, tenant: Tenant) -> Response:
    models = [
        {
            "model_name": base.name,
            "max_context_length": base.tokenizer.context,
            "trainable": True,
            "sampleable": True,
        }
        for base in api.bases.values()
    ]
    return answer({"supported_models": models})


@router.post("/create_session")
async def create_session(request: Request, tenant: Tenant, tinker: Tinker) -> Response:
    body = await read(request, SessionBody)
    session = ClientSession(
        id=f"ses-{secrets.token_hex(8)}",
        tenant=tenant.id,
        created_at=int(time.time()),
        sdk_version=body.sdk_version[:64],
        display_name=body.display_name,
        user_metadata=body.user_metadata or {},
    )
    await tinker.sessions.create(session)
    return answer({"type": "create_session", "session_id": session.id, "info_message": UNTRAINED})


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, tenant: Tenant, tinker: Tinker) -> Response:
    """410 ends the client's signs of life."""
    session = await tinker.sessions.find(tenant.id, (await read(request, NameBody)).session_id)
    if session.finished:
        raise ApiError(410, f"the session {session.id} has finished", code="finished")
    await tinker.sessions.refresh(session)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str, tenant: Tenant, tinker: Tinker) -> Response:
    """Ends a session. Its requests end at this replica now, and at others when they look."""
    session = await tinker.sessions.find(tenant.id, session_id)
    body = await read(request, FinishBody)
    await tinker.sessions.finish(session, body.reason.type[:32])
    for each in tinker.futures.values():
        each.samples.end_session(session.id)
    return answer({})


@router.post("/telemetry")
async def telemetry(request: Request, tenant: Tenant) -> Response:
    """Takes what clients tell of themselves, and keeps nothing."""
    async for _ in request.stream():
        pass
    return answer({"status": "accepted"})
