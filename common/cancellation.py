"""Ends tasks for certain: a client library may swallow a cancellation while it closes its connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
BEAT_S = 0.25


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels, and cancels again what lives on."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)


def is_cancelled() -> bool:
    """Was this task cancelled? False where a CancelledError comes from what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def beating(beat: Callable[[], None], work: Awaitable[T]) -> T:
    """Awaits work that ends but reports no progress (a transfer, a thread), and beats meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
            beat()
        return task.result()
    finally:
        await cancel_all([task])


async def done_before(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Awaits the work. False: `stop` was set first, and the work is cancelled."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
    finally:
        await cancel_all([working, stopped])
    if done:
        working.result()
    return done


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Waits for the event, or until the time is over. Returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@contextlib.asynccontextmanager
async def starting() -> "AsyncGenerator[Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]]":
    """Gives the block a function that starts tasks, which end with it. If one fails, all end; raises a group."""
    tasks: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = group.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async with asyncio.TaskGroup() as group:
        guard = group.create_task(_end_with_guard(tasks))
        yield start
        await cancel_all([*tasks, guard])


@contextlib.asynccontextmanager
async def running(*loops: Coroutine[Any, Any, None]) -> "AsyncGenerator[list[asyncio.Task[None]]]":
    """Runs tasks as long as the block, as `starting` does."""
    async with starting() as start:
        yield [start(loop) for loop in loops]


async def _end_with_guard(tasks: "Collection[asyncio.Task[None]]") -> None:
    """Cancels the tasks until they have ended, when the task group cancels this one: the group cancels once."""
    try:
        await asyncio.Event().wait()
    finally:
        await cancel_all(tasks)
