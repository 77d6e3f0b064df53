"""Tasks that always end, also where a library swallows a cancellation."""

import asyncio

import pytest

from common.cancellation import cancel_all, running, starting


async def swallows(times: int) -> None:
    """Stands for a client library that is interrupted while it closes a connection."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


async def fails() -> None:
    raise ValueError("why")


async def test_what_swallows_a_cancellation_is_cancelled_again() -> None:
    task = asyncio.create_task(swallows(2))
    await asyncio.sleep(0)
    await cancel_all([task])
    assert task.cancelled()


async def test_loops_end_with_the_block() -> None:
    async with running(swallows(0), swallows(1)) as tasks:
        await asyncio.sleep(0)
    assert all(task.cancelled() for task in tasks)


async def test_one_that_fails_ends_the_block_and_those_that_swallow_a_cancellation() -> None:
    others: list[asyncio.Task[None]] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with running(swallows(1), fails()) as tasks:
            others += tasks[:1]
            await asyncio.Event().wait()
    assert [repr(error) for error in caught.value.exceptions] == ["ValueError('why')"]
    assert others[0].cancelled()


async def test_an_error_in_the_block_ends_them_too() -> None:
    with pytest.raises(ExceptionGroup):
        async with running(swallows(1)):
            await asyncio.sleep(0)
            raise ValueError("why")


async def test_what_a_loop_has_started_ends_with_it_though_it_swallows_a_cancellation() -> None:
    async def loop() -> None:
        async with starting() as start:
            start(swallows(1))
            await asyncio.Event().wait()

    async with running(loop()) as tasks:
        await asyncio.sleep(0.01)
    assert tasks[0].cancelled()
