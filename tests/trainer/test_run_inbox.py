"""A trainer's own inbox over a real Redis: what only it can go on with is sent to it alone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from common.bus.bus import Bus
from common.bus.streams import GROUP_MANAGER, GROUP_TRAINER
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.operations import OperationsDone
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker
from tests.support.run_cases import forward_backward, make_run, optim_step, segment
from tests.support.trainer_cases import load_shallow, nothing
from trainer_service.__main__ import KEEP_INBOX_S
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.packing import Budget
from trainer_service.training import Trainer


@contextlib.asynccontextmanager
async def training(bus: Bus, handler: TrainHandler, name: str) -> AsyncGenerator[None]:
    inboxes = [
        Inbox(bus.cell.trainer(name), GROUP_TRAINER, at_once=1, keep_s=KEEP_INBOX_S),
        Inbox(bus.cell.train, GROUP_TRAINER, at_once=1),
    ]
    reporter = Reporter(name, "trainer", "tiny", About(slots=4))
    worker = Worker(bus, handler, inboxes, reporter, lease_s=0.3)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def answer(bus: Bus) -> OperationsDone:
    """The next one that the owner gets."""
    await bus.ensure_group(bus.cell.adapters(3), GROUP_MANAGER)
    async with asyncio.timeout(60):
        while not (found := await bus.read([bus.cell.adapters(3)], GROUP_MANAGER, "owner", count=1, block_ms=500)):
            pass
    message = found[0].message
    assert isinstance(message, OperationsDone)
    return message


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(Objects.open(tmp_path.as_uri()))


async def test_what_follows_a_gradient_goes_to_the_trainer_that_has_it(bus: Bus, store: AdapterStore) -> None:
    # Given two trainers
    handlers = {
        name: TrainHandler(Trainer(DecoderBackbone(load_shallow())), store, "tiny", worker=name) for name in ("a", "b")
    }
    await handlers["a"](make_run(), nothing)
    async with training(bus, handlers["a"], "a"), training(bus, handlers["b"], "b"):
        # When a log's beginning goes to any of them, and its end to the one that answered
        await bus.publish([(bus.cell.train, segment(forward_backward(1)))])
        first = await answer(bus)
        await bus.publish([(bus.cell.trainer(first.holder), segment(optim_step(2), first=first.held))])

        # Then that one commits the version
        last = await answer(bus)
    assert first.holder in handlers and last.holder == first.holder
    assert (last.absent, last.adapter.version) == (False, 1)


async def test_a_trainer_that_stops_says_that_the_gradient_is_gone(bus: Bus, store: AdapterStore) -> None:
    # Given a trainer that has a gradient, and is told to stop while it goes on from it
    handler = TrainHandler(Trainer(DecoderBackbone(load_shallow()), Budget(1)), store, "tiny", worker="a")
    await handler(make_run(), nothing)
    await handler(segment(forward_backward(1)), nothing)
    async with training(bus, handler, "a"):
        await bus.publish([(bus.cell.trainer("a"), segment(*map(forward_backward, range(2, 60)), first=1))])
        async with asyncio.timeout(60):
            while handler.has_room():
                await asyncio.sleep(0.001)

    # Then its owner hears of it, and nothing is left in an inbox that nobody reads
    assert (await answer(bus)).absent
    assert await bus.client.xlen(bus.cell.trainer("a")) == 0


async def test_the_inbox_of_a_trainer_that_died_vanishes_and_that_of_a_living_one_does_not(
    bus: Bus, store: AdapterStore
) -> None:
    handler = TrainHandler(Trainer(DecoderBackbone(load_shallow())), store, "tiny", worker="a")
    own, client = bus.cell.trainer("a"), bus.client
    async with training(bus, handler, "a"), asyncio.timeout(60):
        while await client.ttl(own) < 1:
            await asyncio.sleep(0.01)
        await client.expire(own, 5)
        while await client.ttl(own) <= 5:  # each third of a lease puts the end off
            await asyncio.sleep(0.01)
        assert await client.ttl(bus.cell.train) == -1
    assert 0 < await client.ttl(own) <= KEEP_INBOX_S
