"""Measures the processor time of the control plane for each trajectory, when nothing is computed, by number of jobs.

    python -m benchmarks.control_plane [--rounds 3] [--json FILE]

A real Redis with the settings of `marlaas up`, a real owner (the manager's state machine), and the worker loops of an
env, a rollout and a trainer whose handlers compute nothing:

    owner ─ Start ─► env ─ TurnRequest x 8 ─► rollout ─ ScoredTrajectory ─► owner ─ TrainStep ─► trainer ─ AdapterUpdate ─► owner

Steps of 16 groups of 8, trajectories of 64 tokens, one turn each. (The real rollout worker answers to the env, which
grades: one more hand-over of about the same cost.) The owner has a thread of its own, so its processor time is told
apart from the workers'. Every figure is the median over rounds, in which the numbers of jobs take turns.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, astuple, dataclass
from typing import Any

import msgspec

from benchmarks._report import Report, in_turns, make_table, medians, run
from common.adapters import AdapterStore
from common.bus import Bus
from common.objects import Objects
from common.streams import GROUP_ENV, GROUP_ROLLOUT, GROUP_TRAINER, NUM_PARTITIONS
from common.worker import Inbox, Worker
from harness.redis_server import RedisServer, embedded_redis
from harness.standin import (
    FixedSlots,
    OneTurnEnv,
    OneTurnRollout,
    StandInTrainer,
    create_job,
    job_spec,
    stand_in_worker,
)
from manager_service.owner.owner import Owner
from manager_service.tenants import Tenants

STEPS = {1: 24, 8: 6, 64: 2}
"""Number of jobs → steps of each."""
NUM_TENANTS = 8
BATCH_SIZE, GROUP_SIZE = 16, 8
SLOTS = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one trajectory, in microseconds."""

    owner_us: float
    workers_us: float
    redis_us: float
    wall_us: float


def workers(bus: Bus, store: AdapterStore) -> list[Worker]:
    cell = bus.cell
    handlers = [
        ("env", Inbox(cell.env, GROUP_ENV), OneTurnEnv(cell), SLOTS),
        ("rollout", Inbox(cell.rollout, GROUP_ROLLOUT), OneTurnRollout(cell), SLOTS),
        ("trainer", Inbox(cell.train, GROUP_TRAINER), StandInTrainer(cell, store), 1),
    ]
    return [stand_in_worker(bus, name, inbox, handler, slots=n, lease_s=10) for name, inbox, handler, n in handlers]


# ---- one measurement ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def owner_thread(server: RedisServer, store: AdapterStore, objects: Objects) -> Generator[int]:
    """Runs an owner in a thread of its own; gives the clock of that thread's processor time."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def own() -> None:
        bus = server.bus()
        slots, tenants = FixedSlots(rollout=SLOTS), Tenants(bus.client)
        await Owner(bus=bus, cluster=slots, store=store, objects=objects, tenants=tenants).run(stop)
        await bus.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(own()))
    thread.start()
    try:
        yield time.pthread_getcpuclockid(thread.ident or 0)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def measure_jobs(num_jobs: int) -> Cost:
    objects = Objects.open("memory:///")
    store = AdapterStore(objects)
    with embedded_redis() as server:
        bus, stop = server.bus(), asyncio.Event()
        with owner_thread(server, store, objects) as clock:
            running = [asyncio.create_task(worker.run(stop)) for worker in workers(bus, store)]
            await asyncio.sleep(0.5)  # until the owner has its partitions
            cost = await cost_of(server, bus, clock, num_jobs)
            stop.set()
            await asyncio.gather(*running)
        await bus.close()
    return cost


async def cost_of(server: RedisServer, bus: Bus, clock: int, num_jobs: int) -> Cost:
    def now() -> tuple[float, float, float, float]:
        return time.clock_gettime(clock), time.process_time(), server.cpu_s(), time.perf_counter()

    num_steps = STEPS[num_jobs]
    before = now()
    for n in range(num_jobs):
        spec = job_spec(f"job-{n}", f"tenant-{n % NUM_TENANTS}", num_steps=num_steps)
        hyper = msgspec.structs.replace(spec.hyper, batch_size=BATCH_SIZE, group_size=GROUP_SIZE)
        await create_job(bus, msgspec.structs.replace(spec, hyper=hyper))
    while await num_active(bus):
        await asyncio.sleep(0.1)
    owner, process, redis, wall = (b - a for a, b in zip(before, now(), strict=True))
    num = num_jobs * num_steps * BATCH_SIZE * GROUP_SIZE
    return Cost(*(1e6 * seconds / num for seconds in (owner, process - owner, redis, wall)))


async def num_active(bus: Bus) -> int:
    """Jobs that have not ended."""
    pipe = bus.client.pipeline(transaction=False)
    for partition in range(NUM_PARTITIONS):
        pipe.scard(bus.cell.active(partition))
    return sum(await pipe.execute())


def report(given: Any) -> Report:
    runs = {num_jobs: lambda n=num_jobs: asyncio.run(measure_jobs(n)) for num_jobs in STEPS}
    costs = {num_jobs: medians(found) for num_jobs, found in in_turns(runs, given.rounds, warm_up=0).items()}
    columns = ("jobs", "owner µs", "workers µs", "Redis µs", "wall µs", "trajectories/s")
    lines = [(str(n), *astuple(cost), 1e6 / cost.wall_us) for n, cost in costs.items()]
    figures = {str(n): asdict(cost) for n, cost in costs.items()}
    return Report([make_table("The control plane, per trajectory", columns, lines)], figures)


if __name__ == "__main__":
    run(__doc__, report, rounds=3)
