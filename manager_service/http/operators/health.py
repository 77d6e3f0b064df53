"""/healthz, /readyz"""

import asyncio
import contextlib

from fastapi import APIRouter
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from common.errors import MarlaasError
from common.models.base_digest import differ, shown
from manager_service.http.context import Api, Base, Parts
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
    waiting, others = [name for name, works in await _parts(api) if not works], list[str]()
    for base in api.bases.values():
        working = {worker.service for worker in base.cluster.working()}
        waiting += [f"{service} ({base.name})" for service in SERVICES if service not in working]
        if "redis" not in waiting and (why := await _differs(base)):
            waiting.append(f"manager ({base.name})")
            others.append(f"manager ({base.name}): {why}")
    status = "not_ready" if waiting else "ready"
    refused = [*others, *_reasons(api, "refused")]
    answer = Readiness(status=status, waiting_for=waiting, refused=refused, starting=_reasons(api, "starting"))
    return JSONResponse(answer.model_dump(), 503 if waiting else 200)


async def _differs(base: Base) -> str:
    """The reason why this replica must not turn messages into tokens for a cell's workers: it has another tokenizer. Else empty."""
    with contextlib.suppress(RedisError):
        theirs: bytes = await base.redis.hget(base.cell.bits, "base") or b""
        if differ(base.digest, theirs.decode()):
            return (
                f"configuration and tokenizer here are others than those of the workers (digest {shown(base.digest)} instead of "
                f"{shown(theirs.decode())}): name the same files in MARLAAS_BASE_MODELS on all machines"
            )
    return ""


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
