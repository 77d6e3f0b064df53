"""The stand-in workers that cost little: to Redis and to the manager they are the ordinary ones."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import msgspec

from common.bus.bus import Bus, Delivery, Settlement
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, partition_of
from common.wire.codec import encode
from common.wire.messages import AdapterRef, EnvSpec, Message, Sampling, Start
from common.worker.handlers import Handler
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox
from harness.light.env import light_env
from harness.light.rollout import light_rollout
from harness.light.worker import LightWorker
from harness.standin import OneTurnEnv, OneTurnRollout, stand_in_worker
from tests.common.test_worker import until

LEASE_S = 1.0


def start(tenant: str = "acme", group: int = 0, **changed: Any) -> Start:
    made = Start(
        tenant=tenant,
        job=f"job-of-{tenant}",
        partition=partition_of(tenant),
        id=f"start/{tenant}/{group}",
        adapter=AdapterRef(tenant, f"job-of-{tenant}", 3),
        purpose="train",
        seed=7,
        group=group,
        samples=tuple(range(4)),
        item=None,
        env=EnvSpec("single_turn"),
        sampling=Sampling(),
    )
    return msgspec.structs.replace(made, **changed)


STARTS = (
    *(start(tenant, group) for tenant in ("acme", "zoo", "é") for group in (0, 1, 999)),
    start(epoch=2),
    start(untrained=True),
    start(samples=(127, 128, 255, 256)),
    start(samples=(9,)),
    start(samples=(0, 2, 9), attempt=3, group=70_000),
    start(purpose="eval", samples=(1, 0)),
    start(partition=200, adapter=AdapterRef("acme", "job-of-acme", 70_000)),
)

NUM_TURNS = sum(len(each.samples) for each in STARTS)


def light_worker(bus: Bus, seconds: float = 0.0, slots: int = 64) -> LightWorker:
    reporter = Reporter("rollout-light", "rollout", bus.cell.base_model, About(slots=slots))
    return light_rollout(bus, reporter, lambda: seconds, lease_s=LEASE_S)


def light_env_worker(bus: Bus) -> LightWorker:
    return light_env(bus, Reporter("env-light", "env", bus.cell.base_model, About(slots=64)), lease_s=LEASE_S)


def ordinary_worker(bus: Bus) -> Any:
    inbox = Inbox(bus.cell.rollout, GROUP_ROLLOUT)
    return stand_in_worker(bus, "rollout", inbox, OneTurnRollout(bus.cell), slots=64, lease_s=LEASE_S)


def ordinary_env_worker(bus: Bus) -> Any:
    return stand_in_worker(bus, "env", Inbox(bus.cell.env, GROUP_ENV), OneTurnEnv(bus.cell), slots=64, lease_s=LEASE_S)


async def test_what_settles_a_turn_has_the_same_bytes(bus: Bus) -> None:
    env, inbox = OneTurnEnv(bus.cell), Inbox(bus.cell.rollout, GROUP_ROLLOUT)
    requests = [env.turn(each, sample) for each in STARTS for sample in each.samples]
    settlements = await settled(bus, inbox, OneTurnRollout(bus.cell), requests)
    assert packed(light_worker(bus).settling(taken(requests))) == packed(bus.settling(settlements))


async def test_what_settles_a_start_has_the_same_bytes(bus: Bus) -> None:
    settlements = await settled(bus, Inbox(bus.cell.env, GROUP_ENV), OneTurnEnv(bus.cell), STARTS)
    assert packed(light_env_worker(bus).settling(taken(STARTS))) == packed(bus.settling(settlements))


async def settled(bus: Bus, inbox: Inbox, handler: Handler, messages: Sequence[Any]) -> list[Settlement]:
    """Makes of the messages what a worker with this handler settles."""
    entries = [entry.decode() for entry, _ in taken(messages)]
    deliveries = [Delivery(inbox.stream, inbox.group, *both) for both in zip(entries, messages, strict=True)]
    outputs = [await handler(message, lambda: None) for message in messages]
    return [await bus.written(Settlement(*both)) for both in zip(deliveries, outputs, strict=True)]


def taken(messages: Sequence[Message]) -> list[tuple[bytes, bytes]]:
    """Entries of a stream, and their payloads."""
    return [(f"1700000000000-{number}".encode(), encode(message)) for number, message in enumerate(messages)]


def packed(words: Sequence[Any]) -> bytes:
    command: Any = tuple(words)
    return hiredis.pack_command(command)


async def test_the_same_entries_reach_the_owners(bus: Bus) -> None:
    found: list[list[bytes]] = []
    for workers in ((ordinary_env_worker(bus), ordinary_worker(bus)), (light_env_worker(bus), light_worker(bus))):
        async with working(*workers):
            await bus.publish([(bus.cell.env, each) for each in STARTS])
            await until(lambda: is_empty(bus, bus.cell.env))
            await until(lambda: is_empty(bus, bus.cell.rollout))
        found.append(await taken_from_owners(bus))
    assert found[0] == found[1] and len(found[0]) == NUM_TURNS


async def publish_turns(bus: Bus, starts: Sequence[Start]) -> None:
    """Publishes what an env worker makes of groups that begin."""
    await bus.ensure_group(bus.cell.rollout, GROUP_ROLLOUT)
    env = OneTurnEnv(bus.cell)
    for each in starts:
        await bus.publish(await env(each, lambda: None))


async def is_empty(bus: Bus, stream: str) -> bool:
    return await bus.client.xlen(stream) == 0


async def taken_from_owners(bus: Bus) -> list[bytes]:
    """The payloads in the owners' streams, sorted; the streams are empty then."""
    payloads: list[bytes] = []
    for partition in {each.partition for each in STARTS}:
        rows: Any = await bus.client.xrange(bus.cell.scored(partition))
        payloads += [fields[b"payload"] for _, fields in rows]
        await bus.client.delete(bus.cell.scored(partition))
    return sorted(payloads)


@asynccontextmanager
async def working(*workers: Any) -> AsyncGenerator[None]:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)


async def test_a_worker_that_stops_hands_back_what_it_holds(bus: Bus) -> None:
    await publish_turns(bus, STARTS)
    before: Any = await bus.client.xrange(bus.cell.rollout)
    worker = light_worker(bus, seconds=3600.0, slots=8)
    async with working(worker):
        await until(lambda: has_pending(bus, 8))
    after: Any = await bus.client.xrange(bus.cell.rollout)
    assert not await has_pending(bus, 1) and worker.num == 0
    assert sorted(fields[b"payload"] for _, fields in after) == sorted(fields[b"payload"] for _, fields in before)


async def has_pending(bus: Bus, num: int) -> bool:
    return len(await bus.pending(bus.cell.rollout, GROUP_ROLLOUT, after="0")) >= num


async def test_a_worker_takes_over_what_a_dead_one_held(bus: Bus) -> None:
    await publish_turns(bus, STARTS[:2])
    assert len(await bus.read([bus.cell.rollout], GROUP_ROLLOUT, "dead", count=100)) == 8
    worker = light_worker(bus)
    async with working(worker):
        await until(lambda: is_empty(bus, bus.cell.rollout))
    assert worker.num == 8
