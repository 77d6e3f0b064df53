"""Answers a request without a known key before it reads the body.

Ends the connection after such an answer, so that nothing sent behind the request is worked on.
"""

from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import MarlaasError
from manager_service.http.context import Api, authenticate
from manager_service.http.errors import ApiError, answer, translated

CLOSE = (b"connection", b"close")


class KeyFirst:
    """ASGI middleware. No request without a key needs a body."""

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
            ours = translated(error)
            return answer(ours.status_code, ours.detail, code=ours.code, headers=ours.headers)
        return None


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
