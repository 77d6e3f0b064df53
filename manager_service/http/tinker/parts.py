"""Parts of the protocol's routes, next to the API's own."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from common.cancellation import running
from manager_service.http.context import Api, Base
from manager_service.http.stores.run_store import RunStore
from manager_service.http.stores.sampler_store import Samplers
from manager_service.http.stores.session_store import ClientSessions
from manager_service.http.tinker.futures.operation_futures import Answered
from manager_service.http.tinker.futures.sample_futures import Peers, Samples
from manager_service.http.tinker.rest.file_links import SigningKey

PREFIX = "/api/v1"
MAX_PASS_BYTES = 16 << 20
"""Bytes of the body of a pass over data: one datum of a long context may have more than other bodies may."""


@dataclass(frozen=True, slots=True)
class ClientFutures:
    """The results that clients wait for in one cell."""

    answered: Answered
    samples: Samples
    peers: Peers


@dataclass(frozen=True, slots=True)
class Records:
    """The protocol's records and futures."""

    futures: Mapping[str, ClientFutures]  # by base model
    sessions: ClientSessions
    runs: RunStore
    samplers: Samplers
    signing_key: SigningKey

    async def run(self) -> None:
        """Runs the loops of the futures until cancelled."""
        loops = [loop for each in self.futures.values() for loop in (each.answered, each.samples, each.peers)]
        async with running(*(loop.run() for loop in loops)) as tasks:
            await asyncio.wait(tasks)


def make_records(api: Api) -> Records:
    runs, replica = RunStore(api), secrets.token_hex(8)
    futures = {name: _futures(base, replica) for name, base in api.bases.items()}
    return Records(futures, ClientSessions(api), runs, Samplers(api, runs), SigningKey(api.redis))


def _futures(base: Base, replica: str) -> ClientFutures:
    samples = Samples(base.bus, base.inference, replica)
    return ClientFutures(Answered(base.bus), samples, Peers(base.bus, samples, replica))


async def get_records(request: Request) -> Records:
    return request.app.state.tinker


Tinker = Annotated[Records, Depends(get_records)]


def answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
