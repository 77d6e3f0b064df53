"""The stand-in workers that cost little: to Redis and to the manager they are the ordinary ones."""

from collections.abc import Sequence
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
from harness.standin import OneTurnEnv, OneTurnRollout

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


def light_worker(bus: Bus, seconds: float = 0.0, slots: int = 64) -> LightWorker:
    reporter = Reporter("rollout-light", "rollout", bus.cell.base_model, About(slots=slots))
    return light_rollout(bus, reporter, lambda: seconds, lease_s=LEASE_S)


def light_env_worker(bus: Bus) -> LightWorker:
    return light_env(bus, Reporter("env-light", "env", bus.cell.base_model, About(slots=64)), lease_s=LEASE_S)


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
