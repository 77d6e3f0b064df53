"""Completions take their share of the slots and no more."""

import asyncio

import pytest

from common.errors import Unavailable
from manager_service.api.sampling.shares import Share


async def test_what_exceeds_the_share_waits_until_slots_are_given_back() -> None:
    share, running, most = Share(lambda: 4), 0, 0

    async def ask(num: int) -> None:
        nonlocal running, most
        async with share.of(num, 10):
            running += num
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= num

    await asyncio.gather(*(ask(num) for num in (1, 2, 3, 1, 4, 2)))
    assert most == 4


async def test_a_request_for_more_than_the_share_runs_alone_instead_of_never() -> None:
    share = Share(lambda: 4)
    async with share.of(9, 1):
        with pytest.raises(Unavailable, match="try again"):
            async with share.of(1, 0.05):
                raise AssertionError("two at once")


async def test_a_request_that_gives_up_waiting_takes_nothing() -> None:
    share = Share(lambda: 1)
    async with share.of(1, 1):
        waiting = asyncio.create_task(share.of(1, 5).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
    async with share.of(1, 1):
        pass
