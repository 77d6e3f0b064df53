"""Answers a request with a body and without a known key before it reads the body."""

from redis.exceptions import RedisError
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import MarlaasError
from manager_service.api.context import Api, authenticate
from manager_service.api.errors import ApiError, answer, translated


class KeyFirst:
    """ASGI middleware. No request without a key needs a body."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_body(scope):
            try:
                await authenticate(self._api, scope)
            except (ApiError, MarlaasError, RedisError) as error:
                ours = translated(error)
                refusal = answer(ours.status_code, ours.detail, code=ours.code, headers=ours.headers)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
