"""The means by which faults are inflicted, on real sockets and processes: the proxy, the replica, the clock, the full disk."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chaos.clock import Clock
from harness.proxy import Proxy
from harness.replaceable_redis import ReplaceableRedis


@asynccontextmanager
async def echoing(heard: list[bytes] | None = None) -> AsyncGenerator[Proxy]:
    """A proxy before a server that sends back what it has heard, and ends."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(data)
        writer.close()
        if heard is not None:
            heard.append(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.shut()
        server.close()


async def sent(proxy: Proxy, data: bytes) -> bytes:
    """The answer. Raises ConnectionError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_proxy_that_is_silent_ends_no_connection_and_those_of_then_stay_mute() -> None:
    heard: list[bytes] = []
    async with echoing(heard) as proxy:
        # Given a connection of before
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        while not proxy.num_passed:
            await asyncio.sleep(0.01)
        # When the proxy falls silent, then nothing comes of that connection and of a new one, not even when the target ends them
        proxy.fall_silent()
        late_reader, late_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for each in (writer, late_writer):
            each.write(b"y")
        while proxy.num_swallowed < 2:
            await asyncio.sleep(0.01)
        # And the proxy serves new ones alone when it speaks again
        proxy.speak()
        assert await sent(proxy, b"z") == b"z"
        late_writer.write(b"y")
        for each in (reader, late_reader):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(each.read(), 0.1)
        # And the target hears of their end
        for each in (writer, late_writer):
            each.close()
        while len(heard) < 3:
            await asyncio.sleep(0.01)
    assert sorted(heard) == [b"", b"x", b"z"] and proxy.num_swallowed == 3 + 1


async def test_a_replica_takes_the_place_of_redis_without_the_last_second_and_keeps_the_rest(tmp_path: Path) -> None:
    redis = ReplaceableRedis(tmp_path)
    await redis.link.open()
    try:
        with redis.client() as client:
            client.set("before", "1")
            replacing = asyncio.create_task(redis.replace())
            while not replacing.done() and client.info("replication")["connected_slaves"] == 0:
                await asyncio.sleep(0.01)
            while not replacing.done() and client.info("replication")["connected_slaves"] == 1:
                await asyncio.sleep(0.01)
            client.set("lost", "1")
        await replacing
        redis.stop()
        await redis.restart()
        with redis.client() as client:
            assert (client.get("before"), client.get("lost")) == ("1", None)
            assert client.info("replication")["role"] == "master"
    finally:
        await redis.link.shut()
        redis.stop()


ASK = """
import os, time
def told():
    return time.time(), time.time_ns() / 1e9, time.monotonic()
while input():
    print(*told(), flush=True)
    if not os.fork():
        print(*told(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_clock_jumps_in_a_process_that_runs_and_in_its_forks_and_only_there(tmp_path: Path) -> None:
    clock, other = (Clock(tmp_path / "clocks", name) for name in ("ours", "other"))
    argv, variables = [sys.executable, "-c", ASK], {"PYTHONPATH": str(clock.folder)}
    with (
        (tmp_path / "ours.log").open("w") as log,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables, text=True
        ) as process,
    ):
        assert process.stdin and process.stdout
        other.shift(1e6)
        for jump_s in (0.0, 86_400.0, -3_600.0, 0.0):
            clock.shift(jump_s)
            process.stdin.write("x\n")
            process.stdin.flush()
            for _ in range(2):
                seconds, from_ns, monotonic = map(float, process.stdout.readline().split())
                assert abs(seconds - time.time() - jump_s) < 60 and abs(from_ns - time.time() - jump_s) < 60
                assert abs(monotonic - time.monotonic()) < 60
        process.stdin.close()
        process.kill()
