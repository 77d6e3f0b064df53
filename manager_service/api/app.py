"""The application: routers, error handlers, limits, and an OpenAPI document that is true."""

from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from manager_service.api import (
    adapters,
    admin,
    cluster,
    curves,
    docs_page,
    environments,
    errors,
    estimates,
    events,
    files,
    graders,
    health,
    jobs,
    metrics,
    models,
    page,
    receivers,
    results,
    samples,
    usage,
)
from manager_service.api.body_limit import BodyLimit
from manager_service.api.context import Api
from manager_service.api.key_first import KeyFirst
from manager_service.api.open_requests import OpenRequests
from manager_service.api.sampling import chat, completions, generate
from manager_service.tinker import operations, retrieval, runs, samplers, sessions
from manager_service.tinker.parts import MAX_PASS_BYTES, PREFIX, make_records
from manager_service.tinker.rest import absent, billing, checkpoints, listings, search
from manager_service.tinker.retrieval import Patience

TITLE = "MARLaaS"
DESCRIPTION = """Reinforcement learning as a service: OpenAI's fine-tuning API over LoRA adapters of shared base models.
The `openai` client works unchanged with `base_url=http://host:port/v1`."""

ROUTERS = (
    files,
    estimates,
    jobs,
    events,
    results,
    samples,
    curves,
    models,
    adapters,
    chat,
    completions,
    generate,
    environments,
    graders,
    usage,
    cluster,
    receivers,
    admin,
    health,
    metrics,
    sessions,
    runs,
    operations,
    samplers,
    retrieval,
    search,
    listings,
    checkpoints,
    billing,
    absent,
)


def create_app(api: Api) -> FastAPI:
    """The HTTP API over these parts. Whoever calls this also runs the cells' loops."""
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
    app.state.tinker = make_records(api)
    # the routes as they are: `include_router` makes each anew, a quarter of a second in all
    for router in (*(noun.router for noun in ROUTERS), jobs.hyperparameters):
        app.router.routes += router.routes
    errors.install(app)
    app.add_middleware(
        BodyLimit,
        larger={f"{PREFIX}/{name}": MAX_PASS_BYTES for name in ("forward", "forward_backward")},
        max_file_bytes=api.limits.max_file_bytes,
        max_uploads_bytes=api.limits.max_uploads_bytes,
    )
    app.add_middleware(OpenRequests, api=api)
    app.add_middleware(KeyFirst, api=api)
    app.add_middleware(Patience)
    app.openapi = cache(partial(_openapi, app))
    docs_page.install(app)
    page.install(app)
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, without the 422 that this API never answers."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
