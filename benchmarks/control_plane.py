"""What the control plane costs for each trajectory, when nothing is computed: processor time, by number of jobs.

    python -m benchmarks.control_plane [--rounds 3] [--json FILE]

A real Redis with the settings of `marlaas up`, a real owner (the manager's state machine), and the worker loops of an
env, a rollout and a trainer whose handlers compute nothing:

    owner ─ Start ─► env ─ TurnRequest x 8 ─► rollout ─ ScoredTrajectory ─► owner ─ Step ─► trainer ─ AdapterUpdate ─► owner

Steps of 16 groups of 8, trajectories of 64 tokens, one turn each. (The real rollout worker answers to the env, which
grades: one more hand-over of about the same cost.) The owner has a thread of its own, so its processor time is told
apart from the workers'. Every figure is the median over rounds, in which the numbers of jobs take turns.
"""

import asyncio
import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, astuple, dataclass

import msgspec
import numpy as np
import structlog

from benchmarks import _redis
from benchmarks._report import make_table, parser, show
from common.adapters import AdapterStore
from common.bus import Bus, Out
from common.messages import (
    Failure,
    Sampling,
    ScoredTrajectory,
    Start,
    TrajectoryRef,
    TurnRequest,
    f32,
    i32,
    turn_id,
    u8,
)
from common.objects import Objects
from common.streams import GROUP_ENV, GROUP_ROLLOUT, GROUP_TRAINER, NUM_PARTITIONS
from common.worker import Beat, Inbox, Worker
from manager_service.owner import Owner
from manager_service.tenants import Tenants
from tests.standin import FixedSlots, StandInTrainer, create_job, job_spec, stand_in_worker

STEPS = {1: 24, 8: 6, 64: 2}
"""Number of jobs → steps of each."""
NUM_TENANTS = 8
BATCH_SIZE, GROUP_SIZE = 16, 8
SLOTS = 64
NUM_PROMPT, NUM_TOKENS = 24, 64
TOKENS, LOGPROBS = i32(np.arange(NUM_TOKENS)), f32(np.linspace(-2, 0, NUM_TOKENS))
WRITTEN = u8(np.arange(NUM_TOKENS) >= NUM_PROMPT)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one trajectory, in microseconds."""

    owner_us: float
    workers_us: float
    redis_us: float
    wall_us: float


# ---- workers that compute nothing -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Stub:
    """What both handlers answer beside results: nothing is ever paused here, and nothing fails."""

    bus: Bus

    def hand_back(self, message: object) -> list[Out] | None:
        return None

    def failed(self, message: object, failure: Failure) -> list[Out]:
        return []


class Env(Stub):
    async def __call__(self, start: Start, beat: Beat) -> list[Out]:
        return [(self.bus.cell.rollout, self._turn(start, sample)) for sample in start.samples]

    def _turn(self, start: Start, sample: int) -> TurnRequest:
        ref = TrajectoryRef(start.purpose, start.seed, start.group, sample, start.attempt)
        return TurnRequest(
            **start.about(),
            id=turn_id(start.job, ref, start.adapter.version, 0),
            adapter=start.adapter,
            trajectory=ref,
            turn=0,
            tokens=TOKENS,
            logprobs=LOGPROBS,
            written=WRITTEN,
            sampling=Sampling(),
        )


class Rollout(Stub):
    async def __call__(self, turn: TurnRequest, beat: Beat) -> list[Out]:
        scored = ScoredTrajectory(
            **turn.about(),
            id=turn.id,
            adapter=turn.adapter,
            trajectory=turn.trajectory,
            tokens=TOKENS,
            logprobs=LOGPROBS,
            written=WRITTEN,
            num_prompt=NUM_PROMPT,
            reward=float(turn.trajectory.sample % 2),
            stop_reason="stop",
            num_turns=1,
            output_text="42",
        )
        return [(self.bus.cell.scored(turn.partition), scored)]


def workers(bus: Bus, store: AdapterStore) -> list[Worker]:
    cell = bus.cell
    handlers = [
        ("env", Inbox(cell.env, GROUP_ENV), Env(bus), SLOTS),
        ("rollout", Inbox(cell.rollout, GROUP_ROLLOUT), Rollout(bus), SLOTS),
        ("trainer", Inbox(cell.train, GROUP_TRAINER), StandInTrainer(cell, store), 1),
    ]
    return [stand_in_worker(bus, name, inbox, handler, slots=n, lease_s=10) for name, inbox, handler, n in handlers]


# ---- one measurement ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def owner_thread(server: _redis.Server, store: AdapterStore, objects: Objects) -> Generator[int]:
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
    async with _redis.running() as server:
        bus, stop = server.bus(), asyncio.Event()
        with owner_thread(server, store, objects) as clock:
            running = [asyncio.create_task(worker.run(stop)) for worker in workers(bus, store)]
            await asyncio.sleep(0.5)  # until the owner has its partitions
            cost = await cost_of(server, bus, clock, num_jobs)
            stop.set()
            await asyncio.gather(*running)
        await bus.close()
    return cost


async def cost_of(server: _redis.Server, bus: Bus, clock: int, num_jobs: int) -> Cost:
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


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(values) for values in zip(*map(astuple, costs), strict=True)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found: dict[int, list[Cost]] = {num_jobs: [] for num_jobs in STEPS}
    for _ in range(given.rounds):
        for num_jobs, costs in found.items():
            costs.append(asyncio.run(measure_jobs(num_jobs)))
    medians = {num_jobs: median(costs) for num_jobs, costs in found.items()}
    columns = ("jobs", "owner µs", "workers µs", "Redis µs", "wall µs", "trajectories/s")
    lines = [(str(n), *astuple(cost), 1e6 / cost.wall_us) for n, cost in medians.items()]
    figures = {str(n): asdict(cost) for n, cost in medians.items()}
    show([make_table("The control plane, per trajectory", columns, lines)], figures, [], given.json)


if __name__ == "__main__":
    main()
