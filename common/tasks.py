"""Ending tasks for certain: a client library may swallow one cancellation while it closes its connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable
from typing import Any


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel, and cancel again what lives on."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)


@contextlib.asynccontextmanager
async def running(*loops: Coroutine[Any, Any, None]) -> "AsyncGenerator[list[asyncio.Task[None]]]":
    """Tasks that run as long as the block. If one fails, the block and the others end, and its error is raised in a group."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        guard = group.create_task(_end_with_guard(tasks))
        yield tasks
        await cancel_all([*tasks, guard])


async def _end_with_guard(tasks: "Collection[asyncio.Task[None]]") -> None:
    """A task group cancels once, all at the same time; the guard sees to it that they end."""
    try:
        await asyncio.Event().wait()
    finally:
        await cancel_all(tasks)
