"""Streams of single workers, over a real Redis: read first, passed on rather than let another idle, and lost by nobody."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from common.bus.bus import Bus, Out, Settlement
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.wire.messages import Start
from common.worker.handlers import Beat
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker
from tests.common.test_bus import start
from tests.common.test_worker import Recorder, for_ever, length, until

CELL = Cell("tiny")
ONE, OTHER = CELL.rollout_worker("one"), CELL.rollout_worker("other")
LEASE_S = 0.4


class Noting(Recorder):
    """Works until it is let go."""

    def __init__(self) -> None:
        super().__init__(self.until_let_go)
        self.may_end = asyncio.Event()

    async def until_let_go(self, message: Start, beat: Beat) -> None:
        while not self.may_end.is_set():
            beat()
            await asyncio.sleep(0.02)

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        await super().__call__(message, beat)
        return [(CELL.env, message)]


@contextlib.asynccontextmanager
async def working(
    bus: Bus, name: str, handler: Recorder, *, slots: int = 2, lease_s: float = 30.0
) -> AsyncGenerator[asyncio.Event]:
    """Ends the worker behind the block, unless the event says that it was killed."""
    inboxes = [
        Inbox(CELL.rollout_chat, GROUP_ROLLOUT, own_slots=1, own=CELL.rollout_chat_worker(name)),
        Inbox(CELL.rollout_first, GROUP_ROLLOUT, own=CELL.rollout_worker(name)),
        Inbox(CELL.rollout, GROUP_ROLLOUT),
    ]
    own_bus = Bus(bus.client, CELL)
    worker = Worker(own_bus, handler, inboxes, Reporter(name, "rollout", "tiny", About(slots=slots)), lease_s=lease_s)
    stop, killed = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        await until(lambda: bus.client.exists(CELL.rollout_worker(name)))
        yield killed
    finally:
        if killed.is_set():
            task.cancel()
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)


async def test_what_follows_goes_to_the_worker_that_is_there_and_else_to_all(bus: Bus) -> None:
    await bus.ensure_group(CELL.env, GROUP_ROLLOUT)
    await bus.publish([(CELL.env, start(n)) for n in range(2)])
    held = await bus.read([CELL.env], GROUP_ROLLOUT, "w", count=2)
    async with working(bus, "one", handler := Noting()):
        await bus.settle([Settlement(held[0], [(ONE, start(10))]), Settlement(held[1], [(OTHER, start(11))])])
        await until(lambda: handler.running == 2)
        assert [await bus.client.xlen(stream) for stream in (ONE, CELL.rollout_first)] == [1, 1]
        assert not await bus.client.exists(OTHER)
        handler.may_end.set()
        await until(lambda: length(bus, CELL.env, 2))


async def test_a_worker_reads_its_own_first_and_keeps_what_waits_for_it_while_nobody_is_hungry(bus: Bus) -> None:
    async with working(bus, "one", one := Noting()):
        await bus.publish([(CELL.rollout, start(n)) for n in range(2)])
        await until(lambda: one.running == 2)
        await bus.publish([(CELL.rollout_first, start(2)), (ONE, start(3))])
        async with working(bus, "other", other := Noting(), slots=1):
            await until(lambda: other.running == 1)
            await asyncio.sleep(0.2)
            # Then the other took what is for all, and has no room for what is not
            assert other.seen == ["job/2"] and await bus.client.xlen(ONE) == 1
            one.may_end.set()
            await until(lambda: length(bus, CELL.env, 3))
            assert one.seen == ["job/0", "job/1", "job/3"]
            other.may_end.set()


async def test_nobody_idles_while_turns_wait_for_a_worker_without_room(bus: Bus) -> None:
    async with working(bus, "one", one := Noting()), working(bus, "other", other := Noting(), slots=3):
        await bus.publish([(ONE, start(n)) for n in range(7)])
        # Then the others' room is filled with the oldest that wait, and no more is passed on
        await until(lambda: (one.running, other.running) == (2, 3))
        await asyncio.sleep(0.2)
        assert sorted(one.seen + other.seen) == [f"job/{n}" for n in range(5)]
        assert [await bus.client.xlen(stream) for stream in (ONE, CELL.rollout_first)] == [4, 3]
        assert not await bus.client.hgetall(CELL.hungry)
        one.may_end.set()
        await until(lambda: length(bus, ONE, 0))
        assert len(one.seen) == 4
        other.may_end.set()


async def test_who_is_hungry_says_so_again_to_a_redis_that_lost_it(bus: Bus) -> None:
    async with working(bus, "one", one := Noting()), working(bus, "other", other := Noting()):
        await bus.publish([(ONE, start(n)) for n in range(2)])
        await until(lambda: one.running == 2)
        await until(lambda: bus.client.hexists(CELL.hungry, "other"))
        await bus.client.delete(CELL.hungry)
        await bus.publish([(ONE, start(2))])
        await until(lambda: other.running == 1)
        one.may_end.set()
        other.may_end.set()


async def test_a_chat_waits_for_no_slot_of_the_worker_that_it_was_meant_for(bus: Bus) -> None:
    own = CELL.rollout_chat_worker("one")
    async with working(bus, "one", one := Noting()):
        await bus.publish([(CELL.rollout, start(n)) for n in range(2)])
        await until(lambda: one.running == 2)
        await bus.publish([(own, start(2))])
        await until(lambda: one.running == 3)
        # When the place for chats is taken too, then it goes to the places of all, and says where it went
        await bus.client.xadd(own, {"payload": "x"}, "9999999999999-0")
        await until(lambda: length(bus, CELL.rollout_chat, 1))
        found: Any = await bus.client.xrange(CELL.rollout_chat)
        said = await bus.client.get(CELL.moved(own, "9999999999999-0"))
        assert said == f"{CELL.rollout_chat} {found[0][0].decode()}".encode()
        one.may_end.set()


async def test_a_worker_that_stops_leaves_nothing_behind(bus: Bus) -> None:
    async with working(bus, "one", one := Noting()):
        await bus.publish([(ONE, start(n)) for n in range(150)])
        await until(lambda: one.running == 2)
    assert await bus.client.xlen(CELL.rollout_first) == 150
    assert not await bus.client.exists(ONE, CELL.rollout_chat_worker("one"), CELL.rollout_workers)


async def test_what_a_dead_worker_had_and_what_waited_for_it_goes_on_elsewhere(bus: Bus) -> None:
    async with working(bus, "one", one := Noting(), lease_s=LEASE_S) as killed:
        await bus.publish([(ONE, start(n)) for n in range(5)])
        await until(lambda: one.running == 2)
        killed.set()
    assert await bus.client.xlen(ONE) == 5
    async with working(bus, "other", other := Noting(), slots=8, lease_s=LEASE_S):
        other.may_end.set()
        await until(lambda: length(bus, CELL.env, 5))
        assert sorted(other.seen) == [f"job/{n}" for n in range(5)]
        await until(lambda: bus.client.zrange(CELL.rollout_workers, 0, -1), seconds=10)

        async def is_forgotten() -> bool:
            return await bus.client.zrange(CELL.rollout_workers, 0, -1) == [b"other"] and not await bus.client.exists(
                ONE
            )

        await until(is_forgotten)


async def test_what_waits_for_a_dead_worker_waits_for_no_lease(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.own_streams.HOLD_S", LEASE_S)
    async with working(bus, "one", one := Noting()) as killed:
        await bus.publish([(ONE, start(n)) for n in range(3)])
        await until(lambda: one.running == 2)
        killed.set()
    async with working(bus, "other", other := Noting(), slots=8):
        await until(lambda: other.seen)
        assert other.seen == ["job/2"] and await bus.client.xlen(ONE) == 2, "the lease of what it worked on is not over"
        other.may_end.set()


async def test_a_stream_that_only_a_dead_worker_could_read_is_one_that_others_look_after(bus: Bus) -> None:
    async with working(bus, "one", Noting(), lease_s=30.0) as killed:
        # Given a worker that was taken for dead, whose streams the others deleted
        await bus.client.delete(ONE, CELL.rollout_chat_worker("one"), CELL.rollout_workers)
        # When it is there again and dies at once, then each stream that it has made is one of a worker that they know
        await until(lambda: bus.client.exists(ONE))
        assert await bus.client.zscore(CELL.rollout_workers, "one") is not None
        killed.set()


async def test_streams_of_a_gone_worker_stay_while_one_holds_work_and_go_together(bus: Bus) -> None:
    async with working(bus, "one", one := Noting(), lease_s=LEASE_S) as killed:
        await bus.publish([(ONE, start(0))])
        await until(lambda: one.running == 1)
        killed.set()
    chat = CELL.rollout_chat_worker("one")
    async with working(bus, "other", other := Noting(), lease_s=LEASE_S):
        await until(lambda: other.running == 1)
        # When more comes for it while another works on what it had, then that is passed on at once
        await bus.publish([(chat, start(1)), (ONE, start(2))])
        await until(lambda: other.running == 3)
        assert await bus.client.exists(ONE, chat) == 2
        assert await bus.client.zscore(CELL.rollout_workers, "one") == 0
        other.may_end.set()

        async def are_gone() -> bool:
            return await bus.client.zscore(CELL.rollout_workers, "one") is None

        await until(are_gone)
        assert not await bus.client.exists(ONE, chat)


async def test_work_that_hangs_in_a_live_worker_moves_to_another(bus: Bus) -> None:
    async def hangs(message: Start, beat: Beat) -> None:
        await (for_ever(message, beat) if message.id == "job/1" else asyncio.Event().wait())

    async with working(bus, "one", one := Recorder(hangs), lease_s=LEASE_S):
        await bus.publish([(ONE, start(n)) for n in range(2)])
        await until(lambda: one.running == 2)
        async with working(bus, "other", other := Noting(), lease_s=LEASE_S):
            await until(lambda: other.seen)
            assert other.seen == ["job/0"]
            other.may_end.set()


@pytest.mark.parametrize("lost", [ONE, CELL.rollout_workers])
async def test_a_worker_whose_stream_redis_lost_makes_it_again(bus: Bus, lost: str) -> None:
    async with working(bus, "one", one := Noting(), lease_s=LEASE_S):
        await bus.client.delete(lost)
        await until(lambda: bus.client.exists(lost))
        await bus.publish([(ONE, start(1))])
        await until(lambda: one.running == 1)
        one.may_end.set()
