"""Policies where they are used: an owner over a real Redis, killed in between."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.bus import Bus
from common.objects import Objects
from common.streams import GROUP_TRAINER
from common.worker import Inbox
from harness.standin import FixedSlots, create_job, job_spec, stand_in_worker, state_of, until_status
from manager_service.scheduling.policies import parse_policy
from tests.common.test_worker import until
from tests.manager.test_owner import System

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def system(bus: Bus, objects: Objects) -> AsyncIterator[System]:
    """Not started yet."""
    system = System(bus, objects)
    yield system
    await system.stop()


async def test_under_sequential_the_steps_of_jobs_do_not_mix(system: System) -> None:
    system.policy = parse_policy("sequential")
    specs = [job_spec(f"job-{n}", f"tenant-{n}", created_at=1 + n) for n in range(3)]
    for spec in specs:
        await create_job(system.bus, spec)
    await system.start()
    for spec in specs:
        await until_status(system.bus, spec.id, "succeeded")
    order = [step.job for step in system.trainer.seen]
    assert order == sorted(order, key=order.index) and len(order) == 9


async def test_bounded_jobs_do_not_burst_when_their_owner_is_killed(system: System) -> None:
    """AReaL's recovery bug: a counter that starts again at 0 lets everything be issued a second time."""
    eta, spec = 2, job_spec(num_steps=12, max_staleness=2)
    system.env.delay_s = 0.02
    await create_job(system.bus, spec)
    await system.start()
    for version in (3, 6):

        async def reached(version: int = version) -> bool:
            return (await state_of(system.bus, spec.id)).version >= version

        await until(reached, seconds=30)
        await system.kill_owner()
        await asyncio.sleep(0)
        system.start_owner()
    await until_status(system.bus, spec.id, "succeeded")
    batch_size = spec.hyper.batch_size
    assert all(start.group < (start.adapter.version + eta + 1) * batch_size for start in system.env.seen)


@pytest.mark.parametrize(("policy", "expected"), [("naive", 2), ("marlaas", 12)])
async def test_slots_are_refilled_while_tools_run_but_for_naive(system: System, policy: str, expected: int) -> None:
    """Two slots make room for three trajectories, and the eight that env workers can hold need none."""
    bus, job = system.bus, job_spec(batch_size=16, group_size=2)
    system.policy, system.slots = parse_policy(policy), FixedSlots(rollout=2, env=8)
    for _ in range(10):  # turns of which the tools are under way
        await bus.client.xadd(bus.cell.env, {"kind": "TurnResult"})
    stop = asyncio.Event()
    trainer = stand_in_worker(bus, "trainer", Inbox(bus.cell.train, GROUP_TRAINER), system.trainer)
    running = asyncio.create_task(trainer.run(stop))
    system.start_owner()
    await create_job(bus, job)

    async def full() -> bool:
        return await bus.client.hlen(bus.cell.open(job.id)) >= expected

    await until(full)
    await asyncio.sleep(0.3)  # some more passes of the owner
    assert await bus.client.hlen(bus.cell.open(job.id)) == expected
    stop.set()
    await running
