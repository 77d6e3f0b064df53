"""Answers a client that waits for a result while nothing can be said of it.

The client repeats at once after an error of the server's, hundreds of times a second. So such an error becomes 408, after a while.
"""

import asyncio
import time

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager_service.tinker.parts import PREFIX, answer

PATH = f"{PREFIX}/retrieve_future"
HOLD_S = 10.0
log = structlog.get_logger()


class Patience:
    """ASGI middleware. `retrieve_future` answers no 5xx, and tells of none before HOLD_S are over."""

    def __init__(self, app: ASGIApp, hold_s: float = HOLD_S) -> None:
        self._app = app
        self._hold_s = hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        began_s, failed, said = time.monotonic(), False, bytearray()

        async def send_unless_failed(message: Message) -> None:
            nonlocal failed, said
            failed = failed or (message["type"] == "http.response.start" and message["status"] >= 500)
            said += message.get("body", b"") if failed else b""
            if not failed:
                await send(message)

        try:
            await self._app(scope, receive, send_unless_failed)
        except Exception:  # the boundary: a client that waits repeats at once after an error
            log.error("internal_error", path=PATH, exc_info=True)
            failed = True
        if failed:
            await asyncio.sleep(max(0.0, began_s + self._hold_s - time.monotonic()))
            told = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": _reason(said)}
            await answer(told, 408)(scope, receive, send)


def _reason(said: bytearray) -> str:
    """The message of an error's answer."""
    try:
        return msgspec.json.decode(said)["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return "internal error; the operators' log says more"
