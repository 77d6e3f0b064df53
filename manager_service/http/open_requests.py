"""Limits the open requests of one tenant: each costs memory and a connection, and a stream of events work too.

A request is open until its client has read the answer, except for what the connection's buffer holds.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import MarlaasError
from common.sharing.places import PerTenant
from manager_service.http.context import Api, authenticate
from manager_service.http.errors import ApiError, answer, too_many

EVENTS, POLLS, OTHERS = "requests for events", "requests for results", "requests"
MAX_POLLS = 12_000
"""More than a tenant's futures in the Tinker protocol, whose clients wait for each in its own request, and give up if one is refused."""
PART_BYTES = 64 << 10
MAX_UNREAD_BYTES = 256 << 20
"""Bytes of one tenant's answers of more than a part that are in memory together until their clients have read them."""
TURN_S = 0.02
"""Seconds after which a read keeps the tenant's next one waiting no longer: it waits itself, such as for object storage."""


class OpenRequests:
    """ASGI middleware: answers 429 to a tenant's requests above its limits."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api
        self._most = limits(api)
        self._turns = PerTenant(1)
        self._open: Counter[tuple[str, str]] = Counter()  # tenant and kind
        self._unread: Counter[str] = Counter()  # tenant -> bytes of large answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = await self._tenant(scope) if scope["type"] == "http" else ""
        send = send_all = in_parts(send, partial(self._api.rounds.next, tenant))
        if not tenant:
            await self._app(scope, receive, send)
            return
        kind = kind_of(scope["path"])
        if self._open[tenant, kind] >= self._most[kind]:
            message = f"{self._most[kind]} of your {kind} are open already: wait until some have ended, or close some"
            await answer(too_many(message, code="too_many_open"))(scope, receive, send)
            return
        self._open[tenant, kind] += 1
        # The application returns when its last part is sent, and each part waits for the one before (`in_parts`): a client that
        # does not read keeps its request open, and pays for its answer's memory with its own limit.
        streams = scope["path"].endswith("/content")
        read = kind is OTHERS and scope["method"] == "GET"
        with ExitStack() as held:
            held.callback(self._end, tenant, kind)
            if not streams:
                send = self._bounded(tenant, held, send, lambda error: answer(error)(scope, receive, send_all))
            await (self._in_turn(tenant, scope, receive, send) if read else self._app(scope, receive, send))

    def _end(self, tenant: str, kind: str) -> None:
        self._open[tenant, kind] -= 1
        self._open += Counter()  # without the tenants that have none open

    def _bounded(self, tenant: str, held: ExitStack, send: Send, refuse: Callable[[ApiError], Awaitable[None]]) -> Send:
        """Sends an answer; in its place an error, if the tenant's large ones that wait for their clients are too large together."""
        refused = False

        async def sending(message: Message) -> None:
            nonlocal refused
            size = _large_bytes(message) if message["type"] == "http.response.start" else 0
            if size and self._unread[tenant] + size > MAX_UNREAD_BYTES:
                refused = True
                told = f"answers to you of more than {MAX_UNREAD_BYTES >> 20} MiB wait until you have read them: read those first"
                await refuse(too_many(told, code="too_many_open"))
            elif size:
                self._unread[tenant] += size
                held.callback(self._unread.subtract, {tenant: size})
            if not refused:
                await send(message)

        return sending

    async def _in_turn(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers behind the tenant's reads before: the event loop would turn to all of them before it turns to another's. The turn ends
        when the answer begins: a slow client keeps no other waiting. A client that has left meanwhile gets none."""
        turns = self._turns.of(tenant)
        await turns.acquire()
        with ExitStack() as turn:
            turn.callback(turns.release)
            late = asyncio.get_running_loop().call_later(TURN_S, turn.close)
            turn.callback(late.cancel)
            first = [await receive()]

            async def reading() -> Message:
                return first.pop() if first else await receive()

            async def answering(message: Message) -> None:
                turn.close()
                await send(message)

            if first[0]["type"] != "http.disconnect":
                await self._app(scope, reading, answering)

    async def _tenant(self, scope: Scope) -> str:
        """The tenant of a request's key; empty for the operator's, and for a request that the routes will refuse."""
        try:
            return (await authenticate(self._api, scope)).tenant
        except (ApiError, MarlaasError, RedisError):
            return ""


def in_parts(send: Send, turn: Callable[[], Awaitable[None]]) -> Send:
    """Sends large bodies part by part, each at its `turn`: before each, the server waits until the client has read most of those
    before."""

    async def sending(message: Message) -> None:
        body = memoryview(message.get("body", b""))
        while len(body) > PART_BYTES:
            await send({"type": message["type"], "body": bytes(body[:PART_BYTES]), "more_body": True})
            await turn()
            body = body[PART_BYTES:]
        await send({**message, "body": bytes(body)} if "body" in message else message)

    return sending


def _large_bytes(start: Message) -> int:
    """The bytes of an answer that does not fit into one part; 0 of others, and of streams."""
    size = int(dict(start.get("headers", ())).get(b"content-length", 0))
    return size if size > PART_BYTES else 0


def limits(api: Api) -> dict[str, int]:
    return {EVENTS: api.limits.max_event_streams, POLLS: MAX_POLLS, OTHERS: api.settings.max_open_requests}


def kind_of(path: str) -> str:
    if path.startswith("/api/v1/retrieve_future"):
        return POLLS
    return EVENTS if path.rstrip("/").endswith("/events") else OTHERS
