"""A client's connections to Redis: few are enough for many calls at once."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from common.bus.redis_connection import make_client, own_address
from harness.redis_server import RedisServer

KEY = "marlaas:{tiny}:x"
LONG_S = 100.0


def test_a_machines_own_address_is_that_on_its_way_to_redis() -> None:
    assert own_address("redis://user:word@127.0.0.1:6379/0") == "127.0.0.1"
    assert own_address("rediss+cluster://user:word@127.0.0.1:7000,h:7001") == "127.0.0.1"
    with pytest.raises(OSError, match=r"known|resolution"):
        own_address("redis://nobody.invalid")


async def test_calls_beyond_the_connections_wait_for_one_in_order(redis_url: str) -> None:
    client: Any = make_client(redis_url, KEY, max_connections=2, wait_s=LONG_S)
    ended: list[int] = []

    async def call(number: int) -> None:
        await client.get(KEY)
        ended.append(number)

    try:
        await asyncio.gather(*(call(number) for number in range(200)))
        assert sorted(ended) == list(range(200)) and ended[-1] >= 190
        names = [one for one in await client.client_list() if one["cmd"] == "get"]
        assert len(names) <= 2
    finally:
        await client.aclose()


async def test_a_command_starts_no_task(redis_url: str) -> None:
    client: Any = make_client(redis_url, KEY, socket_timeout=LONG_S)
    loop, made = asyncio.get_running_loop(), 0

    def count(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal made
        made += 1
        return asyncio.Task(work, loop=loop, **options)

    try:
        await client.get(KEY)
        loop.set_task_factory(count)
        assert await client.get(KEY) is None and made == 0
    finally:
        loop.set_task_factory(None)
        await client.aclose()


async def test_calls_that_are_cancelled_while_they_wait_keep_no_connection(redis_url: str) -> None:
    client: Any = make_client(redis_url, KEY, max_connections=2, wait_s=LONG_S)
    try:
        for _ in range(5):
            blocked = [asyncio.create_task(client.blpop([KEY], 0)) for _ in range(2)]
            waiting = [asyncio.create_task(client.get(KEY)) for _ in range(8)]
            await asyncio.sleep(0.02)
            for task in [*blocked, *waiting[::2]]:
                task.cancel()
            assert await asyncio.gather(*waiting[1::2]) == [None] * 4
    finally:
        await client.aclose()


async def test_a_call_waits_for_a_connection_only_so_long(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path)
    client: Any = make_client(server.url, KEY, max_connections=1, wait_s=0.1)
    try:
        await client.get(KEY)
        os.kill(server.pid, signal.SIGSTOP)
        first = asyncio.create_task(client.get(KEY))
        await asyncio.sleep(0)
        with pytest.raises(RedisConnectionError, match="no connection to Redis was free"):
            await client.get(KEY)
        os.kill(server.pid, signal.SIGCONT)
        assert await first is None and await client.get(KEY) is None
    finally:
        os.kill(server.pid, signal.SIGCONT)
        await client.aclose()
        server.stop()
