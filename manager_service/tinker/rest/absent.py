"""Routes of what the protocol knows and this service does not offer: each says what to use instead. 404, for 5xx would be repeated."""

from fastapi import APIRouter
from starlette.responses import Response

from manager_service.api.context import Tenant
from manager_service.api.errors import error_body
from manager_service.tinker.parts import PREFIX, answer
from manager_service.tinker.rest.checkpoints import ONE

router = APIRouter(prefix=PREFIX, include_in_schema=False)


@router.api_route(f"{ONE}/publish", methods=["POST", "DELETE"])
async def publish(tenant: Tenant) -> Response:
    return _absent("a checkpoint belongs to its tenant, and cannot be published: download it, and pass the files on")


@router.post("/copy_weights")
async def copy_weights(tenant: Tenant) -> Response:
    return _absent(
        "checkpoints are not copied, for there are no projects: use the path itself, whose end set_checkpoint_ttl_from_tinker_path sets"
    )


@router.post("/create_custom_loss")
async def create_custom_loss(tenant: Tenant) -> Response:
    return _absent(
        "losses of one's own are computed by the client: call forward_backward_custom with the function itself"
    )


@router.post("/retrieve_futures")
async def retrieve_futures(tenant: Tenant) -> Response:
    return _absent("the ends of many requests are not told at once: retrieve_future waits for each")


@router.post("/auth/token")
@router.api_route("/auth/apikey/me", methods=["GET", "DELETE"])
async def auth(tenant: Tenant) -> Response:
    return _absent(
        "keys are the operator's: set TINKER_API_KEY to tml- and a key of /v1/admin/tenants/TENANT/keys, which also deletes them"
    )


@router.get("/audit")
async def audit(tenant: Tenant) -> Response:
    return _absent("there is no audit log: GET /v1/fine_tuning/jobs/JOB/events tells what happened to a job")


@router.put("/sessions/{session_id}/project")
async def project(session_id: str, tenant: Tenant) -> Response:
    return _absent("there are no projects: give the work that you want apart a tenant of its own")


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, tenant: Tenant) -> Response:
    return _absent("traces of sessions are not kept: GET /v1/cluster/timeline shows what every worker does")


def _absent(hint: str) -> Response:
    """`detail` is where the SDK's login looks."""
    return answer(error_body(404, hint, code="not_offered") | {"detail": hint}, 404)
