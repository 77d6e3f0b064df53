"""Clients that leave: what is done for them alone ends."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")
GONE = 499
"""The status of an answer that nobody reads, as nginx has it."""


class ClientGone(Exception):
    """The client disconnected."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. Cancels the work and raises Gone when the client disconnects. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
