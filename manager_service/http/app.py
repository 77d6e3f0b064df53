"""The application: routers, error handlers, limits, and an OpenAPI document that is true."""

import re
import secrets
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager_service.http import errors
from manager_service.http.body_limit import BodyLimit, KeyFirst
from manager_service.http.connections import GONE, ClientGone
from manager_service.http.context import Api
from manager_service.http.open_requests import OpenRequests
from manager_service.http.openai import adapter_content, environments, graders, models, receiver_routes, usage_routes
from manager_service.http.openai.files import files
from manager_service.http.openai.jobs import estimates, events, jobs, results, sample_routes
from manager_service.http.operators import admin, cluster_routes, health, metrics, page_routes
from manager_service.http.sampling import chat, completions, generate
from manager_service.http.tinker import operations, retrieval, run_routes, sampler_routes, session_routes
from manager_service.http.tinker.parts import MAX_PASS_BYTES, PREFIX, Records
from manager_service.http.tinker.rest import absent, billing, checkpoint_routes, listings
from manager_service.http.tinker.retrieval import Patience

OAI = re.compile(r"/oai/api(/v1/(?:chat/completions|completions|models(?:/.*)?))")
TITLE = "MARLaaS"
DESCRIPTION = """Reinforcement learning as a service: OpenAI's fine-tuning API over LoRA adapters of shared base models.
The `openai` client works unchanged with `base_url=http://host:port/v1`."""

ROUTERS = (
    *(files, estimates, jobs, events, results, sample_routes, models, adapter_content),
    *(chat, completions, generate),
    *(environments, graders, usage_routes, cluster_routes, receiver_routes),
    *(admin, health, metrics),
    *(session_routes, run_routes, operations, sampler_routes, retrieval),
    *(listings, checkpoint_routes, billing, absent),
)


def create_app(api: Api, tinker: Records) -> FastAPI:
    """The HTTP API over these parts, those of the Tinker protocol included."""
    app = FastAPI(
        title=TITLE,
        description=DESCRIPTION,
        version="0.1.0",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.api = api
    app.state.tinker = tinker
    # the routes as they are: `include_router` makes each again, a quarter of a second in all
    for router in (*(noun.router for noun in ROUTERS), jobs.hyperparameters):
        app.router.routes += router.routes
    errors.install(app)
    app.add_exception_handler(ClientGone, _unread)
    app.add_middleware(
        BodyLimit,
        larger={f"{PREFIX}/{name}": MAX_PASS_BYTES for name in ("forward", "forward_backward")},
        max_file_bytes=api.limits.max_file_bytes,
        max_uploads_bytes=api.limits.max_uploads_bytes,
    )
    app.add_middleware(OpenRequests, api=api)
    app.add_middleware(KeyFirst, api=api)
    app.add_middleware(Patience)
    app.add_middleware(Arrival)
    app.openapi = cache(partial(_openapi, app))
    page_routes.install(app)
    return app


async def _unread(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, without the 422 that this API never answers."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


class Arrival:
    """ASGI middleware, the first: gives each request an id, which its answer says, and makes Tinker's paths for OpenAI's calls ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[errors.REQUEST_ID] = scope[errors.REQUEST_ID]
            await send(message)

        if scope["type"] == "http":
            scope[errors.REQUEST_ID] = f"req_{secrets.token_hex(12)}"
            if known := OAI.fullmatch(scope["path"]):
                scope["path"] = known[1]
        await self._app(scope, receive, telling)
