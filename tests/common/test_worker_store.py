"""A worker whose object storage is slow: nothing waits for it but the work whose payload it is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from common.bus.bus import Bus, Out, fetched
from common.bus.payloads import CLAIM_CHECK_BYTES
from common.bus.streams import GROUP_ENV
from common.store.objects import Objects
from common.wire.messages import Cancel, Start
from common.worker.handlers import Beat
from tests.common.test_bus import start
from tests.common.test_worker import (
    CELL,
    LEASE_S,
    ParkingRecorder,
    Recorder,
    at_once,
    left_behind,
    length,
    until,
    working,
)
from tests.support.gated_store import GatedStore

BIG: dict[str, object] = {"text": "x" * (CLAIM_CHECK_BYTES + 1)}
"""An item with which a Start travels as a claim check."""


class Growing(ParkingRecorder):
    """Answers `job/0` with a message that travels as a claim check."""

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        outputs = await super().__call__(message, beat)
        return [(CELL.rollout, replace(message, item=BIG))] if message.id == "job/0" else outputs


@pytest.fixture
def store(objects: Objects) -> GatedStore:
    return GatedStore(objects)


@pytest.fixture
async def slow(redis_url: str, store: GatedStore) -> AsyncIterator[Bus]:
    """A bus whose object storage does not answer before the gate is open."""
    bus = Bus.connect(redis_url, CELL, store)
    yield bus
    await bus.close()


async def pending(bus: Bus) -> int:
    return (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"]


@pytest.mark.parametrize("item", [None, BIG], ids=["output", "input"])
async def test_what_travels_through_a_slow_store_keeps_nobody_waiting_and_stays_ours(
    bus: Bus, slow: Bus, store: GatedStore, item: dict[str, object] | None
) -> None:
    handler, other = Growing(at_once) if item is None else Recorder(at_once), Recorder(at_once)
    async with working(slow, handler, name="slow"):
        # Given a big output that is being written, or a big input that is being read
        await bus.publish([(CELL.env, start(0, item))])
        await until(store.payloads)
        # Then other work settles
        await bus.publish([(CELL.env, start(n)) for n in range(1, 6)])
        await until(lambda: length(bus, CELL.rollout, 5))
        # And after more than a lease nobody else has worked on it
        async with working(bus, other, name="other"):
            await asyncio.sleep(3 * LEASE_S)
            assert other.seen == [] and await pending(bus) == 1
        # And it is there, once, when the store answers
        store.gate.set()
        await until(lambda: length(bus, CELL.rollout, 6))
        await until(lambda: length(bus, CELL.env, 0))
    assert sorted(handler.seen) == [start(n).id for n in range(6)]
    assert [message.item for _, message in await found(bus)] == [None] * 5 + [BIG]


async def found(bus: Bus) -> list[tuple[str, Any]]:
    return await bus.follow(CELL.rollout, "0", block_ms=None)


@pytest.mark.parametrize("park", [True, False])
async def test_a_cancel_ends_work_whose_result_is_being_written(
    bus: Bus, slow: Bus, store: GatedStore, park: bool
) -> None:
    async with working(slow, Growing(at_once)):
        await bus.publish([(CELL.env, start())])
        await until(store.payloads)
        cancel = Cancel(id="c", tenant="acme", job="job", partition=3, epoch=0, park=park)
        await bus.broadcast(CELL.control, cancel, keep_s=60)
        await until(lambda: length(bus, CELL.env, 0))
    assert await bus.client.xlen(CELL.scored(0 if park else 2)) == 1
    assert await bus.client.xlen(CELL.rollout) == 0


async def test_a_stopping_worker_does_not_wait_for_the_store_and_leaves_nothing_behind(
    bus: Bus, slow: Bus, store: GatedStore
) -> None:
    tasks = asyncio.all_tasks()
    async with working(slow, Growing(at_once)):
        # Given an output that is being written, and inputs that are being read
        await bus.publish([(CELL.env, start(0)), (CELL.env, start(1, BIG)), (CELL.env, start(2, BIG))])
        await until(lambda: len(store.payloads()) == 3)
    # Then all can be read by another at once, as they were
    assert await pending(bus) == 0 and asyncio.all_tasks() == tasks
    handed: list[Any] = [await fetched(each) for each in await bus.read([CELL.env], GROUP_ENV, "other", count=10)]
    found = {delivery.message.id: delivery.message for delivery in handed}
    assert found == {"job/0": start(0), "job/1": start(1, BIG), "job/2": start(2, BIG)}
    assert len(store.payloads()) == 3, "nothing was written to hand it back"


async def test_orphans_are_taken_over_beside_one_whose_payload_the_store_keeps(
    bus: Bus, slow: Bus, store: GatedStore
) -> None:
    # Given what a worker held before it died, a claim check first
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(0, BIG))])
    await left_behind(bus, 3)
    await bus.read([CELL.env], GROUP_ENV, "dead", count=10)
    handler = Recorder(at_once)
    async with working(slow, handler, slots=8):
        await until(lambda: length(bus, CELL.rollout, 3))
        assert len(store.payloads()) == 1
        store.gate.set()
        await until(lambda: length(bus, CELL.rollout, 4))
    assert await pending(bus) == 0


@pytest.mark.parametrize("takes_leftovers", [False, True])
async def test_a_worker_that_leaves_bursts_to_others_reads_on_once_it_knows_what_it_has(
    bus: Bus, slow: Bus, store: GatedStore, takes_leftovers: bool
) -> None:
    handler, other = Recorder(at_once), Recorder(at_once)
    async with working(slow, handler, name="slow", a_read=1, takes_leftovers=lambda: takes_leftovers):
        await bus.publish([(CELL.env, start(0, BIG)), (CELL.env, start(1))])
        await until(store.payloads)
        if takes_leftovers:
            await until(lambda: length(bus, CELL.rollout, 1))
        else:
            async with working(bus, other, name="other"):
                await until(lambda: other.seen)
            assert (handler.seen, other.seen) == ([], ["job/1"])
        store.gate.set()
        await until(lambda: length(bus, CELL.rollout, 2))
        # And it reads on by itself afterwards
        await bus.publish([(CELL.env, start(2))])
        await until(lambda: length(bus, CELL.rollout, 3))
