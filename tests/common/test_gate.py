"""A worker behind a gate, over a real Redis: it reads while the gate is open, and closes with nothing in its hands."""

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest

from common.bus.bus import Bus
from common.cancellation import cancel_all
from common.pool.gate import Awake, Channel, Close, Closed, Expected, FromBase, Gate, NotTaken, Open, Pulse
from tests.common.test_bus import start
from tests.common.test_worker import CELL, Recorder, at_once, for_ever, length, until, working


class PoolSide:
    """The pool worker's end."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = Channel(end)
        self.heard: list[Any] = []

    async def follow(self) -> None:
        while packet := await self.channel.receive():
            self.heard.append(msgspec.json.decode(packet, type=FromBase))

    @property
    def num_closed(self) -> int:
        return sum(isinstance(each, Closed) for each in self.heard)

    @property
    def beat(self) -> Pulse:
        return next((each for each in reversed(self.heard) if isinstance(each, Pulse)), Pulse())


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Gate, PoolSide]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = PoolSide(ours)
    following = asyncio.create_task(pool.follow())
    with ours, theirs:
        yield Gate(Channel(theirs), "rollout-0"), pool
        await cancel_all([following])


async def test_a_long_reason_arrives_whole(sides: tuple[Gate, PoolSide]) -> None:
    gate, pool = sides
    told = NotTaken("there are: " + ", ".join(f"store:base-{number}@{'0a' * 32}" for number in range(100)))
    await gate.tell(told)
    await until(lambda: pool.heard)
    assert pool.heard == [told]


async def test_a_worker_reads_while_its_gate_is_open(bus: Bus, sides: tuple[Gate, PoolSide]) -> None:
    gate, pool = sides
    async with working(bus, Recorder(at_once), gate=gate):
        await bus.publish([(CELL.env, start(n)) for n in range(3)])
        await until(lambda: pool.heard)
        assert await length(bus, CELL.env, 3), "nothing is read before it opens"
        for num in (3, 6):
            await pool.channel.send(Open("host", 2.0))
            await until(lambda: length(bus, CELL.env, 0))
            await pool.channel.send(Close(0.0))
            await until(lambda num=num: pool.num_closed == num // 3)
            assert pool.beat.num_ended == num
            await bus.publish([(CELL.env, start(n)) for n in range(3)])


async def test_what_does_not_end_in_time_goes_to_others_before_the_worker_is_closed(
    bus: Bus, sides: tuple[Gate, PoolSide]
) -> None:
    gate, pool = sides
    async with working(bus, Recorder(for_ever), gate=gate):
        await bus.publish([(CELL.env, start(n)) for n in range(3)])
        await pool.channel.send(Open("host", 2.0))
        await until(lambda: pool.beat.in_use == 3)
        await pool.channel.send(Close(0.05))
        await until(lambda: pool.num_closed)
        assert (await bus.client.xpending(CELL.env, "env"))["pending"] == 0
        async with working(bus, Recorder(at_once), name="other"):
            await until(lambda: length(bus, CELL.rollout, 3))


async def test_without_a_limit_all_that_was_begun_ends_before_the_worker_is_closed(
    bus: Bus, sides: tuple[Gate, PoolSide]
) -> None:
    gate, pool = sides
    may_end = asyncio.Event()

    async def when_told(message: Any, beat: Any) -> None:
        await may_end.wait()

    async with working(bus, Recorder(when_told), gate=gate):
        await bus.publish([(CELL.env, start(1))])
        await pool.channel.send(Open("host", 2.0))
        await until(lambda: pool.beat.in_use == 1)
        await pool.channel.send(Close(None))
        await until(lambda: not gate.is_open)
        assert not pool.num_closed
        may_end.set()
        await until(lambda: pool.num_closed)
        assert await length(bus, CELL.rollout, 1)


async def test_a_worker_reads_once_it_is_awake_and_is_closed_once_it_sleeps(
    bus: Bus, sides: tuple[Gate, PoolSide]
) -> None:
    gate, pool = sides
    may_go_on, came = asyncio.Event(), list[str]()

    async def turn(name: str) -> None:
        came.append(name)
        await may_go_on.wait()
        may_go_on.clear()

    gate.wake, gate.sleep = partial(turn, "wakes"), partial(turn, "falls asleep")
    async with working(bus, Recorder(at_once), gate=gate):
        await bus.publish([(CELL.env, start(1))])
        await pool.channel.send(Open("device", 2.0))
        await until(lambda: came == ["wakes"])
        assert Awake() not in pool.heard and await length(bus, CELL.env, 1)
        may_go_on.set()
        await until(lambda: length(bus, CELL.rollout, 1))
        await pool.channel.send(Close(0.0))
        await until(lambda: came == ["wakes", "falls asleep"])
        assert Awake() in pool.heard and not pool.num_closed
        may_go_on.set()
        await until(lambda: pool.num_closed)


async def test_a_closed_worker_reports_what_its_pool_worker_expects(bus: Bus, sides: tuple[Gate, PoolSide]) -> None:
    gate, pool = sides
    async with working(bus, Recorder(at_once), gate=gate):
        await pool.channel.send(Expected(0.5, 2.0))
        await until(lambda: gate.state().waiting_s == 2.0)
        await pool.channel.send(Open("host", 2.0))
        await until(lambda: gate.is_open)
        assert gate.counters == {"opened_from_host": 1.0, "opening_waited_s": 2.0}
        assert (gate.state().worker, gate.state().opens_in_s) == ("rollout-0", 0.0)


async def test_a_worker_ends_once_its_pool_worker_is_gone(bus: Bus, sides: tuple[Gate, PoolSide]) -> None:
    gate, pool = sides
    stop = asyncio.Event()
    following = asyncio.create_task(gate.follow(stop))
    pool.channel.close()
    await asyncio.wait_for(following, 60)
    assert stop.is_set()
