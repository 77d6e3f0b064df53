"""The parts of the manager that every route may use, and the caller's key and tenant."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import redis.asyncio as aioredis
from fastapi import Depends, Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.types import Scope

from common.bus.bus import Bus
from common.bus.fullness import Gauge
from common.bus.redis_connection import make_client
from common.bus.streams import Cell
from common.cancellation import running
from common.errors import InvalidInput, NotFound
from common.models.weight_files import Weights
from common.sharing.places import PerTenant, Rounds
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.text.tokens import ChatTokenizer
from manager_service.http.errors import ApiError
from manager_service.http.openai.files.downloads import Downloads
from manager_service.http.openai.files.file_store import Files
from manager_service.http.reading.reading_helpers import Helpers
from manager_service.http.sampling.feed import Feed
from manager_service.http.sampling.inference import Inference
from manager_service.records.archive import Archive
from manager_service.records.cluster import Cluster
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import ADMIN, KeyRecord, TenantRecord, Tenants
from manager_service.settings import ManagerSettings

TINKER_PREFIX = "tml-"
ANSWER_S = 4.0
"""Seconds that a request waits for Redis before it answers 503."""
MAX_READS = 2
"""Reads of jobs' or runs' records by one tenant at once: each may have a megabyte or two."""
MAX_CONNECTIONS = 64
"""Connections of one client, whose calls are short: more would take longer to make than they save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Limits of requests that no operator needs to change; tests shorten them."""

    max_file_bytes: int = 256 << 20  # the largest uploaded file
    max_line_bytes: int = 256 << 10  # its longest line: the whole item travels in messages
    max_uploads_bytes: int = 1 << 30  # of this manager's disk that one tenant's uploads under way may take
    max_unfinished_bytes: int = 64 << 20  # of the records of a tenant's unfinished jobs, of which methods are the most
    max_event_streams: int = 100  # requests of one tenant for events that are open at once on this manager
    inference_silence_s: float = 10.0  # a turn that nobody worked on for this long is asked for again
    grader_run_timeout_s: float = 60.0  # the longest call of `graders/run`
    command_wait_s: float = 3.0  # for which cancel, pause and resume wait for the job's owner before they answer
    keep_alive_s: float = 10.0  # between comments on a silent stream of events


LIMITS = ApiLimits()


@dataclass(frozen=True, slots=True)
class Base:
    """One base model, and the API's way to its cell."""

    name: str
    bus: Bus
    redis: Any  # an impatient client for the cell's keys: see connect_impatiently
    gauge: Gauge  # of that Redis
    cluster: Cluster
    folder: Path  # of the model's files
    digest: str  # of its configuration and tokenizer here
    tokenizer: ChatTokenizer
    inference: Inference
    feed: Feed
    archive: Archive
    where: str  # it was found: a folder, or a name of the hub
    weights: Weights
    created_at: int

    @property
    def linear_layers(self) -> frozenset[str]:
        """Leaf names that `lora_targets` may name; empty: not known."""
        return self.weights.linear_layers

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
    limits: ApiLimits
    redis: Any  # an impatient client for the records outside the cells
    objects: Objects
    adapters: AdapterStore
    tenants: Tenants
    helpers: Helpers
    stored: StoredBytes
    files: Files
    bases: dict[str, Base]
    reads: PerTenant = field(default_factory=lambda: PerTenant(MAX_READS))
    rounds: Rounds = field(default_factory=Rounds)  # of the event loop, for what takes long
    downloads: Downloads = field(default_factory=Downloads)


def connect_impatiently(redis_url: str, key: str) -> "aioredis.Redis":
    """A client for the keys with this key's hash tag. Its calls fail within seconds when Redis is away: a request is answered."""
    backoff = ExponentialWithJitterBackoff(base=0.1, cap=1.0)
    retry = Retry(backoff, 5, supported_errors=(RedisConnectionError,))
    limits: dict[str, Any] = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S}
    return make_client(redis_url, key, retry=retry, max_connections=MAX_CONNECTIONS, **limits)


async def get_api(request: Request) -> Api:
    return request.app.state.api


Parts = Annotated[Api, Depends(get_api)]

_bearer = HTTPBearer(auto_error=False, description="An API key: `sk-…`")


async def authenticate(api: Api, scope: Scope, *, again: bool = False) -> KeyRecord:
    """The record of a request's key, which is looked up once. `again`: it may be deleted meanwhile. Raises ApiError 401."""
    if again or "key" not in scope:
        key = _given_key(dict(scope["headers"]))
        if not key:
            raise _unauthorized("no API key: send the header `Authorization: Bearer sk-…`")
        scope["key"] = await api.tenants.authenticate(key)
    if scope["key"] is None:
        raise _unauthorized("this API key is not known; it may have been deleted")
    return scope["key"]


def _given_key(headers: Mapping[bytes, bytes]) -> str:
    """The key of a request; empty if it has none. `tinker` has its own header, and a prefix for either."""
    if tinker := headers.get(b"x-api-key"):
        return tinker.decode("latin-1").removeprefix(TINKER_PREFIX)
    scheme, key = get_authorization_scheme_param(headers.get(b"authorization", b"").decode("latin-1"))
    return key.removeprefix(TINKER_PREFIX) if scheme.lower() == "bearer" else ""


async def get_key(request: Request, api: Parts, shown: Annotated[object, Depends(_bearer)]) -> KeyRecord:
    """Raises ApiError 401. `shown`: declares the key in the OpenAPI document."""
    return await authenticate(api, request.scope)


async def tenant_of(api: Api, scope: Scope) -> TenantRecord:
    """The tenant that a request with a key comes from; one of no name for the operator's."""
    key = await authenticate(api, scope)
    return TenantRecord(id=ADMIN, created_at=0) if key.admin else await api.tenants.get(key.tenant)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


Key = Annotated[KeyRecord, Depends(get_key)]


Read = Annotated[
    str | None, Header(alias="MARLaaS-Tenant", description="With the admin key: the tenant whose objects are read")
]


async def get_tenant(request: Request, api: Parts, key: Key, read: Read = None) -> TenantRecord:
    """Raises ApiError 403 for an admin key, with which an operator may read as any tenant, and do nothing."""
    if key.admin and read is not None and request.method == "GET":
        try:
            return await api.tenants.get(read)
        except NotFound as error:
            raise InvalidInput(str(error), param="MARLaaS-Tenant") from error
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
