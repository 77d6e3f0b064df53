"""Asks for the key before a body is read; limits the size of each body, announced or not, and the time in which it comes.

Also limits what each tenant uploads, and sends in large bodies, at once. The rest of a refused body is read and dropped before the
answer, within limits: many clients send all of it before they read, and would see a reset instead of the reason.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping

from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import MarlaasError
from manager_service.http.context import Api, authenticate
from manager_service.http.errors import ApiError, answer, too_many, translated

UPLOADS = "/v1/files"
CLOSE = (b"connection", b"close")
FORM_BYTES = 64 << 10
"""Room for the other parts of a multipart form."""
MAX_BODY_BYTES = 4 << 20
"""The largest body that is neither an upload nor named as larger."""
SMALL_BYTES = 64 << 10
"""Bodies that say that they have no more do not count: as many as a tenant may have requests open have little together."""
MAX_PASSING_BYTES = 256 << 20
"""Bytes that one tenant's large bodies may have together."""
PAUSE_S = 30.0
"""The longest wait for more of a body, and for a whole one in addition to the time that BYTES_PER_S allow it."""
BYTES_PER_S = 16 << 10
"""Slower bodies are refused. Only the time in which this process waits for the client counts."""
DRAIN_BYTES = 64 << 20
"""Bytes beyond its limit that are read of a body which is refused."""
DRAIN_S, DRAIN_PAUSE_S = 30.0, 2.0
"""The longest time for that, and the longest wait for more."""


class BodyLimit:
    """ASGI middleware: answers 413 to bodies above the limit."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        larger: Mapping[str, int],
        max_file_bytes: int,
        max_uploads_bytes: int,
    ) -> None:
        """`larger`: path -> the limit of its bodies where that is above MAX_BODY_BYTES."""
        self._app = app
        self._larger = larger
        self._passing: Counter[str] = Counter()  # tenant -> bytes in this process's memory
        self._max_file_bytes = max_file_bytes
        self._max_uploads_bytes = max_uploads_bytes
        self._uploading: Counter[str] = Counter()  # tenant -> bytes on this machine's disk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        uploads = scope["path"].rstrip("/") == UPLOADS
        larger = self._larger.get(scope["path"], 0)
        limit = self._max_file_bytes + FORM_BYTES if uploads else max(MAX_BODY_BYTES, larger)
        body = Body(receive, limit)
        if (announced := _announced(scope)) > limit:
            comes = announced <= limit + DRAIN_BYTES and not _asks_first(scope)
            await body.drain(announced if comes else 0)
            await answer(ApiError(413, _too_large(limit), code="too_large"))(scope, receive, send)
            return
        if not uploads and not _may_be_large(scope):
            await self._app(scope, body.receive, send)
            return
        under_way = self._uploading if uploads else self._passing
        refusal = self._check_uploads if uploads else self._check_passing

        num_counted = 0

        async def counted() -> Message:
            nonlocal num_counted
            message = await body.receive()
            under_way[_tenant(scope)] += body.num_bytes - num_counted
            num_counted = body.num_bytes
            if error := refusal(_tenant(scope)):
                await body.drain(DRAIN_BYTES)
                raise error
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            tenant = _tenant(scope)
            under_way[tenant] -= num_counted
            if not under_way[tenant]:
                del under_way[tenant]

    def _check_uploads(self, tenant: str) -> ApiError | None:
        """An error 507 if the tenant's uploads under way are too large together."""
        if self._uploading[tenant] <= self._max_uploads_bytes:
            return None
        return ApiError(
            507,
            f"your uploads under way have more than {self._max_uploads_bytes} bytes together; wait until some have ended",
            code="uploads_too_large",
        )

    def _check_passing(self, tenant: str) -> ApiError | None:
        """An error 429 if the tenant's large bodies under way are too large together."""
        if self._passing[tenant] <= MAX_PASSING_BYTES:
            return None
        return too_many(
            f"your requests under way have more than {MAX_PASSING_BYTES >> 20} MiB of data: send this again when some are done"
        )


class KeyFirst:
    """ASGI middleware: answers a request without a known key before its body is read, and ends the connection: nothing sent behind
    the request is worked on."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start" and scope.get("key") is None:
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            await send(message)

        app = await self._refusal(scope) if scope["type"] == "http" and _has_body(scope) else None
        await (app or self._app)(scope, receive, answering)

    async def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request without a known key; None if it has one."""
        try:
            await authenticate(self._api, scope)
        except (ApiError, MarlaasError, RedisError) as error:
            return answer(translated(error))
        return None


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _may_be_large(scope: Scope) -> bool:
    return b"transfer-encoding" in dict(scope["headers"]) or _announced(scope) > SMALL_BYTES


def _announced(scope: Scope) -> int:
    """The bytes that a request says its body has; 0 if it does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 20 else 0


def _asks_first(scope: Scope) -> bool:
    """Does the client wait for leave before it sends its body?"""
    return dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue"


def _tenant(scope: Scope) -> str:
    """The tenant of a request's key; it is known once the body is read."""
    return scope["key"].tenant if scope.get("key") else ""


class Body:
    """One request's body as it comes in."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._more = True
        self._waited_s = 0.0
        self.num_bytes = 0

    async def receive(self) -> Message:
        """More of the body. Raises HTTPException 413 if it is too large, 408 if it comes too slowly."""
        message = await self._in_time() if self._more else await self._receive()
        self._more = message.get("more_body", False)
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self._limit:
            await self.drain(DRAIN_BYTES)
            raise HTTPException(413, _too_large(self._limit))
        return message

    async def drain(self, most_bytes: int) -> None:
        """Reads and forgets what is left, while it comes."""
        until_s = time.monotonic() + DRAIN_S
        with contextlib.suppress(TimeoutError):
            while self._more and most_bytes > 0 and time.monotonic() < until_s:
                async with asyncio.timeout(DRAIN_PAUSE_S):
                    message = await self._receive()
                self._more = message.get("more_body", False)
                most_bytes -= len(message.get("body", b""))

    async def _in_time(self) -> Message:
        started, left_s = time.monotonic(), PAUSE_S + self.num_bytes / BYTES_PER_S - self._waited_s
        try:
            async with asyncio.timeout(min(PAUSE_S, left_s)):
                return await self._receive()
        except TimeoutError as error:
            slow = f"the body came too slowly: {PAUSE_S:g} seconds without more of it, or less than {BYTES_PER_S} bytes a second"
            raise HTTPException(408, slow) from error
        finally:
            self._waited_s += time.monotonic() - started


def _too_large(limit: int) -> str:
    return f"the body is too large: at most {limit} bytes"
