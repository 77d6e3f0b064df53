"""Tests what pool workers see of the cells and of each other, over a real Redis."""

import asyncio

from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT, GROUP_TRAINER, Cell
from common.pool.looking import Lookout, Unread
from tests.common.test_bus import start

LEASE_S = 0.2


def lookouts(bus: Bus, num: int, service: str = "rollout") -> list[Lookout]:
    buses = {name: Bus(bus.client, Cell(name)) for name in ("tiny", "other")}
    return [Lookout(buses, service, f"{service}-{number}", LEASE_S) for number in range(num)]


async def test_unread_entries_are_seen_with_the_age_of_the_oldest_until_somebody_reads_them(bus: Bus) -> None:
    (lookout,) = lookouts(bus, 1)
    assert await lookout.look({}) == {"tiny": Unread(), "other": Unread()}
    # Given a stream that nobody has read yet, and another with a group
    await bus.ensure_group(bus.cell.rollout_first, GROUP_ROLLOUT)
    await bus.publish([(stream, start(1)) for stream in (bus.cell.rollout, bus.cell.rollout_first)])
    await bus.client.hset(bus.cell.weights, mapping={"3": "2", "5": "0.5"})
    await asyncio.sleep(0.05)
    seen = (await lookout.look({}))["tiny"]
    assert (seen.num, seen.num_own, seen.weight) == (2, 0, 2.5) and 0.05 <= seen.waited_s < 5
    # When a worker reads both
    for stream in (bus.cell.rollout, bus.cell.rollout_first):
        await bus.ensure_group(stream, GROUP_ROLLOUT)
        assert await bus.read([stream], GROUP_ROLLOUT, "w", count=1)
    # Then nothing waits while the base is open, whatever becomes of the worker
    await lookout.stay("tiny", opening=False)
    await asyncio.sleep(2 * LEASE_S)
    assert (await lookout.look({}))["tiny"].num == 0
    # and where it is open nowhere, what is idle for a lease waits for somebody who takes it over
    await lookout.leave("tiny")
    assert (await lookout.look({}))["tiny"].num == 2


async def test_what_waits_for_a_rollout_worker_that_is_gone_is_seen_by_all(bus: Bus) -> None:
    (lookout,) = lookouts(bus, 1)
    for stream in (bus.cell.rollout_worker("gone"), bus.cell.rollout_chat_worker("gone")):
        await bus.publish([(stream, start(1))])
    await bus.client.zadd(bus.cell.rollout_workers, {"gone": 1})
    seen = await lookout.look({})
    assert (seen["tiny"].num, seen["tiny"].num_own, seen["other"].num) == (2, 0, 0)


async def test_only_its_own_pool_worker_sees_what_waits_for_a_trainer(bus: Bus) -> None:
    (lookout,) = lookouts(bus, 1, "trainer")
    stream = bus.cell.trainer("trainer-x")
    await bus.ensure_group(stream, GROUP_TRAINER)
    await bus.publish([(stream, start(1))])
    assert (await lookout.look({}))["tiny"].num == 0
    seen = (await lookout.look({"tiny": "trainer-x"}))["tiny"]
    assert (seen.num, seen.num_own) == (1, 1)


async def test_one_entry_wakes_one_of_three_idle_workers(bus: Bus) -> None:
    idle, slots = lookouts(bus, 3), 4
    await bus.publish([(bus.cell.rollout, start(1))])
    seen = [(await each.look({}))["tiny"] for each in idle]
    entered = [await each.enter("tiny", unread, slots) for each, unread in zip(idle, seen, strict=True)]
    assert entered == [True, False, False]
    # When more waits than that one has slots for, a second comes; the first may enter again
    assert [await each.enter("tiny", Unread(num=slots + 1), slots) for each in idle] == [True, True, False]
    # When both have opened the base, their slots are taken
    for each in idle[:2]:
        await each.stay("tiny", opening=False)
    assert await idle[2].enter("tiny", Unread(num=1), slots)


async def test_entries_for_one_trainer_alone_let_it_in_whoever_opens_the_base(bus: Bus) -> None:
    first, second = lookouts(bus, 2, "trainer")
    assert await first.enter("tiny", Unread(num=1), 4)
    assert not await second.enter("tiny", Unread(num=1), 4)
    assert await second.enter("tiny", Unread(num=1, num_own=1), 4)


async def test_a_worker_that_was_killed_is_forgotten(bus: Bus) -> None:
    first, second = lookouts(bus, 2)
    assert await first.enter("tiny", Unread(num=1), 4)
    for key in (bus.cell.open_at("rollout"), bus.cell.opening("rollout")):
        score = await bus.client.zscore(key, "rollout-0")
        assert score is not None
        await bus.client.zadd(key, {"rollout-0": score - 3001})  # as if it had been silent for HOLD_S
    assert await second.enter("tiny", Unread(num=1), 4)
    assert await bus.client.zrange(bus.cell.open_at("rollout"), 0, -1) == [b"rollout-1"]
