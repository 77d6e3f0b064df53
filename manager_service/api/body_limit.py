"""Limits on request bodies: on their size, also of those that do not announce it, and on the pauses in which they come."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager_service.api.errors import answer

UPLOADS = "/v1/files"
FORM_BYTES = 64 << 10
"""Room for the other parts of a multipart form."""
PAUSE_S = 30.0
"""The longest wait for more of a body."""


class BodyLimit:
    """ASGI middleware: answers 413 to bodies above the limit, if possible before it reads them."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_file_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_body_bytes
        if scope["path"].rstrip("/") == UPLOADS:
            limit = self._max_file_bytes + FORM_BYTES
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
            await answer(413, _too_large(limit), code="too_large")(scope, receive, send)
            return
        await self._app(scope, _limited(receive, limit), send)


def _limited(receive: Receive, limit: int) -> Receive:
    seen, more = 0, True

    async def limited() -> Message:
        nonlocal seen, more
        try:
            async with asyncio.timeout(PAUSE_S if more else None):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, f"the body paused for more than {PAUSE_S:g} seconds") from error
        seen, more = seen + len(message.get("body", b"")), message.get("more_body", False)
        if seen > limit:
            raise HTTPException(413, _too_large(limit))
        return message

    return limited


def _too_large(limit: int) -> str:
    return f"the body is too large: at most {limit} bytes"
