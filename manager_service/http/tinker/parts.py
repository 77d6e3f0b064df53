"""Parts of the protocol's routes beside the API's own."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from manager_service.http.context import Api
from manager_service.http.stores.run_store import RunStore
from manager_service.http.stores.sampler_store import Samplers
from manager_service.http.stores.session_store import ClientSessions
from manager_service.http.tinker.rest.file_links import SigningKey

PREFIX = "/api/v1"
MAX_PASS_BYTES = 16 << 20
"""Bytes of the body of a pass over data: one datum of a long context may have more than other bodies may."""


@dataclass(frozen=True, slots=True)
class Records:
    """The protocol's records."""

    sessions: ClientSessions
    runs: RunStore
    samplers: Samplers
    signing_key: SigningKey


def make_records(api: Api) -> Records:
    runs = RunStore(api)
    return Records(ClientSessions(api), runs, Samplers(api, runs), SigningKey(api.redis))


async def get_records(request: Request) -> Records:
    return request.app.state.tinker


Known = Annotated[Records, Depends(get_records)]


def answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
