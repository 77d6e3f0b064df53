"""Measures the cost of a hand-over through the bus: processor time of one core, and wall time.

    python -m benchmarks.bus [--rounds 5] [--json FILE]

A hand-over is one message taken and answered: read from a stream, decoded, one message of the same size encoded and
published, and the first acknowledged and deleted, in one script. The message is a TurnRequest of 64 tokens with their
log-probs. The messages run in a ring, in batches: what is published is what is read next. Redis is a real server with the
settings of `marlaas up` (append-only file, `appendfsync always`).

Python is the processor time of this process, Redis that of the server: other processes on the machine hardly matter to
them, as they do to wall time. Hand-overs per second and core are the inverse of Python's share. Every figure is the
median over rounds, in which the batches take turns.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from benchmarks._report import Goal, Report, in_turns_async, make_table, medians, run
from common.bus.bus import Bus, Settlement
from common.wire.messages import AdapterRef, Message, Sampling, TrajectoryRef, TurnRequest
from common.wire.transcript import wrote
from harness.redis_server import RedisServer, embedded_redis

BATCHES = (1, 8, 32, 128)
NUM_TOKENS = 64
IN_RING = 256
"""Messages in the ring; at least the largest batch, so that every read is full."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one hand-over, in microseconds."""

    python_us: float
    redis_us: float
    wall_us: float

    @property
    def per_s_and_core(self) -> float:
        return 1e6 / self.python_us

    @property
    def per_s_on_one_core(self) -> float:
        """Hand-overs a second if this process and Redis shared a single core."""
        return 1e6 / (self.python_us + self.redis_us)


def message(n: int) -> TurnRequest:
    adapter = AdapterRef("tenant-a", "ftjob-0123456789abcdef", 7)
    return TurnRequest(
        id=f"{adapter.job}/{n // 8}/{n % 8}/0/0",
        tenant=adapter.tenant,
        job=adapter.job,
        partition=3,
        adapter=adapter,
        trajectory=TrajectoryRef("train", 1, n // 8, n % 8),
        turn=0,
        transcript=wrote(np.arange(NUM_TOKENS), np.linspace(-2, 0, NUM_TOKENS)),
        sampling=Sampling(),
    )


async def measured(server: RedisServer, work: Callable[[], Awaitable[int]]) -> Cost:
    """`work` returns how many hand-overs it made."""
    redis_s, python_s, wall_s = server.cpu_s(), time.process_time(), time.perf_counter()
    num = await work()
    python_s, wall_s = time.process_time() - python_s, time.perf_counter() - wall_s
    return Cost(*(1e6 * s / num for s in (python_s, server.cpu_s() - redis_s, wall_s)))


async def ring(bus: Bus, batch: int, num: int) -> int:
    """Makes `num` hand-overs in batches."""
    done = 0
    while done < num:
        found = await bus.read([bus.cell.rollout], "rollout", "bench", count=batch)
        assert len(found) == batch
        await bus.settle([Settlement(d, [(bus.cell.rollout, cast(Message, d.message))]) for d in found])
        done += len(found)
    return done


async def fill(bus: Bus, stream: str, group: str, num: int) -> None:
    await bus.client.delete(stream)
    await bus.ensure_group(stream, group)
    await bus.publish([(stream, message(n)) for n in range(num)])


async def bus_cost(server: RedisServer, batch: int) -> Cost:
    bus = server.bus()
    await fill(bus, bus.cell.rollout, "rollout", IN_RING)
    await ring(bus, batch, 4 * batch)
    cost = await measured(server, lambda: ring(bus, batch, 512 if batch == 1 else 4096))
    await bus.close()
    return cost


async def measure(rounds: int) -> dict[str, Cost]:
    with embedded_redis() as server:
        buses = {bus_name(batch): partial(bus_cost, server, batch) for batch in BATCHES}
        found = await in_turns_async(buses, rounds, warm_up=0)
    return {name: medians(costs) for name, costs in found.items()}


def bus_name(batch: int) -> str:
    return "one by one" if batch == 1 else f"batches of {batch}"


def report(given: Any) -> Report:
    costs = asyncio.run(measure(given.rounds))
    columns = ("hand-over", "per s and core", "Redis on the same core", "Python µs", "Redis µs", "wall µs")
    lines = [(name, c.per_s_and_core, c.per_s_on_one_core, *astuple(c)) for name, c in costs.items()]
    goal = Goal("hand-overs per second and core in batches of 32", costs[bus_name(32)].per_s_and_core, 15_000)
    figures = {name: {**asdict(cost), "per_s_and_core": cost.per_s_and_core} for name, cost in costs.items()}
    return Report([make_table(f"A message of {NUM_TOKENS} tokens, read and answered", columns, lines)], figures, [goal])


if __name__ == "__main__":
    run(__doc__, report, {"rounds": 1}, rounds=5)
