"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel, and cancel again what lives on: a client library may swallow one while it closes its connection."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
