"""The parts of the manager that every route may use, and the caller's key and tenant."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import redis.asyncio as aioredis
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from common.adapters import AdapterStore
from common.bus import Bus
from common.objects import Objects
from common.redis_connection import make_client
from common.streams import Cell
from common.tasks import running
from common.text.tokens import ChatTokenizer
from manager_service.api.errors import ApiError
from manager_service.api.feed import Feed
from manager_service.api.file_store import Files, parse_json
from manager_service.api.sampling.shares import Inference
from manager_service.cluster import Cluster
from manager_service.records import KeyRecord, TenantRecord
from manager_service.settings import ManagerSettings
from manager_service.tenants import Tenants

ANSWER_S = 4.0
"""How long a request waits for Redis before it answers 503."""


@dataclass(frozen=True, slots=True)
class Base:
    """One base model, and the API's way to its cell."""

    name: str
    bus: Bus
    redis: Any  # an impatient client for the cell's keys: see connect_impatiently
    cluster: Cluster
    tokenizer: ChatTokenizer
    inference: Inference
    feed: Feed
    linear_layers: frozenset[str]  # leaf names that `lora_targets` may name; empty: not known
    created_at: int

    @property
    def cell(self) -> Cell:
        return self.bus.cell

    async def run(self) -> None:
        """Runs the loops that its requests need, until cancelled."""
        async with running(self.cluster.run(), self.inference.run(), self.feed.run()) as tasks:
            await asyncio.wait(tasks)


@dataclass(frozen=True, slots=True)
class Api:
    """The parts behind the routes."""

    settings: ManagerSettings
    redis: Any  # an impatient client for the records outside the cells
    objects: Objects
    adapters: AdapterStore
    tenants: Tenants
    files: Files
    bases: dict[str, Base]


def connect_impatiently(redis_url: str, key: str) -> "aioredis.Redis":
    """A client for the keys that share this key's hash tag. Its calls fail within seconds when Redis is away, so that a
    request is answered.
    """
    backoff = ExponentialWithJitterBackoff(base=0.1, cap=1.0)
    retry = Retry(backoff, 5, supported_errors=(RedisConnectionError,))
    return make_client(redis_url, key, retry=retry, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)


async def get_api(request: Request) -> Api:
    return request.app.state.api


Parts = Annotated[Api, Depends(get_api)]

_bearer = HTTPBearer(auto_error=False, description="An API key: `sk-…`")


async def get_key(
    api: Parts, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> KeyRecord:
    """Raises ApiError 401."""
    if credentials is None or not credentials.credentials:
        raise _unauthorized("no API key: send the header `Authorization: Bearer sk-…`")
    record = await api.tenants.authenticate(credentials.credentials)
    if record is None:
        raise _unauthorized("this API key is not known; it may have been deleted")
    return record


def _unauthorized(message: str) -> ApiError:
    error = ApiError(401, message, code="invalid_api_key")
    error.headers = {"WWW-Authenticate": "Bearer"}
    return error


Key = Annotated[KeyRecord, Depends(get_key)]


async def get_tenant(api: Parts, key: Key) -> TenantRecord:
    """Raises ApiError 403 for an admin key, which belongs to no tenant."""
    if key.admin:
        raise ApiError(403, "this is an admin key; use a tenant's key", code="tenant_key_needed")
    return await api.tenants.get(key.tenant)


async def get_admin(key: Key) -> KeyRecord:
    """Raises ApiError 403."""
    if not key.admin:
        raise ApiError(403, "this needs the admin key", code="admin_key_needed")
    return key


Tenant = Annotated[TenantRecord, Depends(get_tenant)]
Admin = Annotated[KeyRecord, Depends(get_admin)]


async def check_json_body(request: Request) -> None:
    """Raises ApiError 400 for JSON that messages cannot carry (NaN, bad Unicode, numbers beyond 64 bits, duplicate keys)."""
    if "json" not in request.headers.get("content-type", ""):
        return
    body = await request.body()
    if body.strip():
        try:
            parse_json(body)
        except ValueError as error:
            raise ApiError(400, f"the body: {error}", code="invalid_json") from error
