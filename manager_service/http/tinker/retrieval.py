"""Routes of futures: wait for a result, give up a request.

A client that hears 408 asks again at once, and is told what the result waits for. After a server's error it would repeat hundreds of
times a second, so such an error becomes 408 too, after a while.
"""

import asyncio
import time
from functools import partial
from typing import Literal

import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager_service.http.context import Api, Base, Parts, Tenant
from manager_service.http.errors import ApiError
from manager_service.http.quota import storage_fault, tokens_today
from manager_service.http.stores.operation_store import wrong
from manager_service.http.stores.run_store import RunRow
from manager_service.http.stores.tinker_names import parse_future
from manager_service.http.tinker.futures.operation_futures import Expired, Pending, ReadyResult, failed, look
from manager_service.http.tinker.futures.sample_futures import GONE, Gone, place_of
from manager_service.http.tinker.futures.sample_futures import PREFIX as PREFIX_OF_SAMPLES
from manager_service.http.tinker.parts import PREFIX, Records, Tinker, answer
from manager_service.http.tinker.request_bodies import NameBody, read
from manager_service.http.tinker.wire import protobuf
from manager_service.records.run_records import HOLE_S
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix=PREFIX, include_in_schema=False)

WAIT_S = 35.0
"""Seconds that a request waits for a result. The client gives up after 45."""

HOLD_S = 10.0
"""Seconds after which a request is answered for which there is nothing but an error of ours."""

log = structlog.get_logger()
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@router.post("/retrieve_future")
async def retrieve_future(request: Request, api: Parts, tenant: Tenant, tinker: Tinker) -> Response:
    future = (await read(request, NameBody)).request_id
    try:
        if future.startswith(f"{PREFIX_OF_SAMPLES}-"):
            return await _samples(api, tenant, tinker, future)
        return await _operation(api, tenant, tinker, future)
    except (Expired, Gone) as error:
        raise ApiError(410, str(error), code="gone") from error


@router.post("/cancel_future")
async def cancel_future(request: Request, tenant: Tenant, tinker: Tinker) -> Response:
    """Gives up a request for samples. What is no such request, or is over, is passed over in silence."""
    future = (await read(request, NameBody)).request_id
    replica, name = place_of(future)
    if futures := tinker.futures.get(name):
        await futures.peers.give_up(replica, tenant.id, future)
    return answer({})


class Patience:
    """ASGI middleware. `retrieve_future` answers no 5xx, and tells of none before HOLD_S are over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != f"{PREFIX}/retrieve_future":
            await self._app(scope, receive, send)
            return
        began_s, failed = time.monotonic(), False

        async def send_unless_failed(message: Message) -> None:
            nonlocal failed
            failed = failed or (message["type"] == "http.response.start" and message["status"] >= 500)
            if not failed:
                await send(message)

        try:
            await self._app(scope, receive, send_unless_failed)
        except Exception:  # the boundary: a client that waits repeats at once after an error
            log.error("internal_error", path=scope["path"], exc_info=True)
            failed = True
        if failed:
            await asyncio.sleep(max(0.0, began_s + HOLD_S - time.monotonic()))
            reason = "the service cannot look for the result at the moment; the operators' log says why"
            await _try_again("", "paused_capacity", reason)(scope, receive, send)


# ---- operations -----------------------------------------------------------------------------------------------------


async def _operation(api: Api, tenant: TenantRecord, tinker: Records, future: str) -> Response:
    name, seq = parse_future(future)
    run = await tinker.runs.find(tenant.id, name)
    pending, beside = Pending(""), partial(api.helpers.beside, tenant)
    try:
        async with asyncio.timeout(WAIT_S):
            with tinker.futures[run.base.name].answered.of(run.id, seq) as answered:
                while isinstance(found := await look(run.base.bus, run.spec, seq, beside), Pending):
                    pending = found
                    await answered.wait()
                    answered.clear()
                return _ready(found)
    except TimeoutError:
        return _try_again(future, *await _run_waits(api, run, tenant, pending))


async def _run_waits(api: Api, run: RunRow, tenant: TenantRecord, pending: Pending) -> tuple[QueueState, str]:
    """The state of the queue in which an operation waits, and the reason."""
    if not pending.status:
        reason = "the service's memory is away for a moment"
    elif pending.missing is not None:
        reason = f"operation {pending.missing} of the run has not come: if it was refused, it is given up after {HOLE_S // 60:g} minutes,"
        reason += " and the step fails"
    elif pending.status == "queued":
        reason = f"your {tenant.max_jobs} jobs and runs at once are there: it begins when one has ended"
    else:
        state, reason = await _base_waits(run.base, tenant, "trainer")
        if reason or not (reason := await storage_fault(api.stored, tenant)):
            return state, reason
        reason += "; steps wait until then, and go on by themselves"
    return "paused_capacity", reason


async def _base_waits(base: Base, tenant: TenantRecord, service: str) -> tuple[QueueState, str]:
    limit = tenant.max_tokens_per_day
    if limit is not None and await tokens_today(base.redis, base.cell, tenant.id) >= limit:
        return "paused_rate_limit", f"the {limit} tokens of the day are used up: it goes on at midnight UTC"
    if not base.cluster.working(service):
        return "paused_capacity", f"no {service} worker is there"
    return "active", ""


# ---- samples --------------------------------------------------------------------------------------------------------


async def _samples(api: Api, tenant: TenantRecord, tinker: Records, future: str) -> Response:
    replica, name = place_of(future)
    base = api.bases.get(name)
    outcome = GONE if base is None else await tinker.futures[name].peers.outcome(replica, tenant.id, future, WAIT_S)
    if base is None or outcome.gone:
        raise Gone(f"the request {future[:64]!r} is not here any more, or no worker could sample: ask again")
    if not outcome.done:
        return _try_again(future, *await _base_waits(base, tenant, "rollout"))
    if outcome.error:
        return _ready(failed(wrong(outcome.error)))
    body = await api.helpers.beside(tenant, partial(protobuf.write_samples, outcome.samples))
    return _ready(ReadyResult(body, protobuf.CONTENT_TYPE))


# ---- answers --------------------------------------------------------------------------------------------------------


def _ready(found: ReadyResult) -> Response:
    return Response(found.body, media_type=found.content_type)


def _try_again(future: str, state: QueueState, reason: str) -> Response:
    told = {"type": "try_again", "request_id": future, "queue_state": state, "queue_state_reason": reason or None}
    return answer(told, 408)
