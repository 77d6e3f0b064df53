"""Turns of a rollout worker that is killed, beside one that has no slot free, and of one that is told to stop."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from benchmarks._paced_rollout import CELL, PacedCore, working
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.wire.messages import BASE, TurnRequest, TurnResult
from rollout_service.handler import SHORT_TURN
from tests.common.test_worker import length, until
from tests.support.rollout_cases import request

pytestmark = pytest.mark.asyncio
NUM, TOKENS, LEASE_S = 64, 200, 2.0


@contextlib.asynccontextmanager
async def in_a_process(url: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    command = ("-m", "benchmarks._paced_rollout", url, str(LEASE_S), str(NUM), "/dev/null")
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def test_all_turns_of_a_killed_worker_go_on_at_once_beside_one_whose_slots_are_taken(
    bus: Bus, redis_url: str
) -> None:
    async with in_a_process(redis_url) as killed:
        # Given a worker with 64 turns in a stream of its own, of all of which Redis has some tokens
        lost = [request(BASE, sample=n, max_tokens=TOKENS) for n in range(NUM)]
        await until(lambda: bus.client.zcard(CELL.rollout_workers))
        workers: Any = await bus.client.zrange(CELL.rollout_workers, 0, -1)
        own = CELL.rollout_worker(workers[0].decode())
        await until(lambda: bus.client.exists(own))
        await bus.publish([(own, each) for each in lost])

        async def num_kept() -> bool:
            return len(await bus.client.keys(CELL.partial(own, "*:by"))) == NUM

        await until(num_kept)
        notes: list[str] = []
        core = PacedCore(0.05, note=notes.append)
        async with working(redis_url, LEASE_S, NUM, core) as engine:
            # And one whose slots are taken by as many of its own, with more that wait
            await bus.publish([(CELL.rollout, request(BASE, sample=n, max_tokens=1500)) for n in range(64, 192)])
            await until(lambda: engine.in_use == NUM)
            # When the first is killed, then all of its turns go on beside those of the other, none of which has ended
            killed.send_signal(signal.SIGKILL)
            await until(lambda: engine.in_use == 2 * NUM)
            assert await bus.client.xlen(CELL.env) == 0
            pending = await bus.client.xpending_range(own, GROUP_ROLLOUT, "-", "+", 2 * NUM)
            assert [each["times_delivered"] for each in pending] == [2] * NUM
            # And from where they were: each has all its tokens, paid once
            core.step_s = 0.0005
            await until(lambda: length(bus, CELL.env, NUM))
            await until(lambda: length(bus, own, 0))
            results = [message for _, message in await bus.follow(CELL.env, "0", block_ms=None)]
    begun = {words[2]: int(words[3]) for words in map(str.split, notes) if words[0] == "begin"}
    assert all(begun[each.id] > len(each.tokens) + SHORT_TURN for each in lost)
    assert {each.id for each in results} == {each.id for each in lost}
    for each in results:
        assert isinstance(each, TurnResult) and each.failure is None
        assert len(each.tokens) == len(each.logprobs) == each.usage.sampled_tokens == TOKENS


async def test_a_worker_that_is_told_to_stop_hands_its_turns_back_and_no_token_is_sampled_again(
    bus: Bus, redis_url: str
) -> None:
    async with in_a_process(redis_url) as retiring:
        asked = [request(BASE, sample=n, max_tokens=TOKENS) for n in range(NUM)]
        await bus.publish([(CELL.rollout, each) for each in asked])

        async def num_kept() -> bool:
            return len(await bus.client.keys(CELL.partial(CELL.rollout, "*:by"))) == NUM

        await until(num_kept)
        retiring.send_signal(signal.SIGTERM)
        assert await retiring.wait() == 0
    handed = [message for _, message in await bus.follow(CELL.rollout_first, "0", block_ms=None)]
    had = {each.id: each.num_partial for each in handed if isinstance(each, TurnRequest)}
    assert had.keys() == {each.id for each in asked} and min(had.values()) > 0
    notes: list[str] = []
    async with working(redis_url, LEASE_S, NUM, PacedCore(0.0005, note=notes.append)):
        await until(lambda: length(bus, CELL.env, NUM))
    begun = {words[2]: int(words[3]) for words in map(str.split, notes) if words[0] == "begin"}
    assert begun == {each.id: len(each.tokens) + had[each.id] for each in asked}
    for each in [message for _, message in await bus.follow(CELL.env, "0", block_ms=None)]:
        assert isinstance(each, TurnResult)
        assert len(each.tokens) == len(each.logprobs) == each.usage.sampled_tokens == TOKENS
