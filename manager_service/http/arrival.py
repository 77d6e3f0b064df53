"""Gives each request an id, which its answer says, and makes Tinker's paths for OpenAI's calls ours."""

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager_service.http.errors import REQUEST_ID

OAI = re.compile(r"/oai/api(/v1/(?:chat/completions|completions|models(?:/.*)?))")


class Arrival:
    """ASGI middleware, the first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = scope[REQUEST_ID]
            await send(message)

        if scope["type"] == "http":
            scope[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
            if known := OAI.fullmatch(scope["path"]):
                scope["path"] = known[1]
        await self._app(scope, receive, telling)
