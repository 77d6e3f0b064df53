"""Routes that this service does not offer: each says what to use instead. 404, for 5xx would be repeated."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from manager_service.http.context import Tenant
from manager_service.http.errors import error_body
from manager_service.http.tinker.parts import PREFIX, answer
from manager_service.http.tinker.rest.checkpoint_routes import ONE

router = APIRouter(prefix=PREFIX, include_in_schema=False)

OWN_KEYS = "keys are the operator's: set TINKER_API_KEY to tml- and a key of /v1/admin/tenants/TENANT/keys, which also deletes them"
ABSENT = (
    ("POST DELETE", f"{ONE}/publish", "a checkpoint belongs to its tenant, and cannot be published: download it, and pass the files on"),
    ("POST", "/copy_weights", "checkpoints are not copied, for there are no projects: use the path itself, whose end"
     " set_checkpoint_ttl_from_tinker_path sets"),
    ("POST", "/create_custom_loss", "losses of one's own are computed by the client: call forward_backward_custom with the function"),
    ("POST", "/retrieve_futures", "the ends of many requests are not told at once: retrieve_future waits for each"),
    ("POST", "/auth/token", OWN_KEYS),
    ("GET DELETE", "/auth/apikey/me", OWN_KEYS),
    ("GET", "/audit", "there is no audit log: GET /v1/fine_tuning/jobs/JOB/events tells what happened to a job"),
    ("PUT", "/sessions/{session_id}/project", "there are no projects: give the work that you want apart a tenant of its own"),
    ("GET", "/sessions/{session_id}/trace_export", "traces of sessions are not kept: GET /v1/cluster/timeline shows what each worker does"),
)  # fmt: skip
"""Methods, path, what to use instead."""


def _refusing(hint: str) -> Callable[[Tenant], Awaitable[Response]]:
    async def refuse(tenant: Tenant) -> Response:
        """`detail` is where the SDK's login looks."""
        return answer(error_body(404, hint, code="not_offered") | {"detail": hint}, 404)

    return refuse


for methods, path, hint in ABSENT:
    router.add_api_route(path, _refusing(hint), methods=methods.split())
