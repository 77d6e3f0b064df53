"""/healthz, /readyz"""

import asyncio

from fastapi import APIRouter
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from common.errors import MarlaasError
from manager_service.http.context import Api, Parts
from manager_service.http.schemas import Health, Readiness

router = APIRouter(tags=["health"])

SERVICES = ("rollout", "env", "trainer")
PATIENCE_S = 2.0


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Something that jobs need is missing"}},
)
async def readyz(api: Parts) -> Response:
    """Redis and the store are there, and at least one worker of each service for each base model."""
    waiting = [name for name, works in await _parts(api) if not works]
    for base in api.bases.values():
        working = {worker.service for worker in base.cluster.working()}
        waiting += [f"{service} ({base.name})" for service in SERVICES if service not in working]
    status = "not_ready" if waiting else "ready"
    refused, starting = _reasons(api, "refused"), _reasons(api, "starting")
    answer = Readiness(status=status, waiting_for=waiting, refused=refused, starting=starting)
    return JSONResponse(answer.model_dump(), 503 if waiting else 200)


def _reasons(api: Api, state: str) -> list[str]:
    """The reasons that the workers in a state give for it."""
    workers = [(base.name, worker) for base in api.bases.values() for worker in base.cluster.workers()]
    return [f"{worker.service} ({base}): {worker.reason}" for base, worker in workers if worker.state == state]


async def _parts(api: Api) -> list[tuple[str, bool]]:
    clients = [api.redis, *(base.redis for base in api.bases.values())]
    redis = all([await _works(client.ping()) for client in clients])
    return [("redis", redis), ("store", await _works(api.objects.exists("ready")))]


async def _works(call: object) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await call  # pyright: ignore[reportGeneralTypeIssues]
    except (RedisError, MarlaasError, TimeoutError, OSError):
        return False
    return True
