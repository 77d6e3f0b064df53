"""Measures what repacking saves: `benchmarks.elastic` calls it.

Up to four workers, each a process at a given pace (`_paced_rollout`), come and go as the owner's own `PoolSizer` and `marlaas up`'s own
`ElasticPool` decide. Jobs sample batches whose turns have log-normal lengths (sigma 1), train a while when a batch's last turn ends, and
go on: on average fewer than half of all slots are taken. Once a worker retires whose turns the others have room for, once only one
without turns. A second pair of runs has more turns than slots at all times. Workers are forked as `marlaas up` forks them, and take
LOAD_S more to load; turns that move are real.
"""

import asyncio
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks._paced_rollout import ARGUMENTS, CELL, nothing
from benchmarks._report import Goal, make_table
from benchmarks.rollout import request
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.cancellation import cancel_all
from common.children.forking import PreforkServer
from common.children.processes import Command, SupervisedProcess
from common.wire.messages import BASE, TurnResult
from harness.redis_server import embedded_redis
from manager_service.launcher.elastic_pool import ElasticPool
from manager_service.owner.surroundings import PoolSizer
from manager_service.records.cluster import Cluster
from manager_service.scheduling.elastic import WorkerRange

BOUNDS, SLOTS, LEASE_S = WorkerRange(1, 4), 32, 10.0
NUM_JOBS, BATCH = 4, 32
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 400, 1.0, 1900
TRAIN_S, LOAD_S, WARM_S, HELD_EVERY_S = 1.0, 2.0, 30.0, 0.05


class Load(Protocol):
    """Turns that are asked for."""

    bus: Bus
    cluster: Cluster

    @property
    def under_way(self) -> int: ...

    async def run(self) -> None: ...


class Sizer(Protocol):
    """Says how many workers are wanted, and which retires."""

    async def look(self, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One run's figures, of its window."""

    tokens_per_s: float
    workers: float
    """Processes that were held, on average; those that started or stopped included."""
    load: float
    """Turns under way over all slots that there may be, on average."""
    starts: int
    """Processes that were started."""

    @property
    def tokens_per_worker_s(self) -> float:
        return self.tokens_per_s / self.workers


@dataclass
class JobLoad:
    """Jobs that ask for turns. `full`: always for twice as many as there are slots."""

    bus: Bus
    cluster: Cluster
    full: bool
    under_way: int = 0
    _ended: "dict[str, asyncio.Future[None]]" = field(default_factory=dict)
    _number: int = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear())
            for job in range(2 * BOUNDS.most * SLOTS if self.full else NUM_JOBS):
                group.create_task(self._job(random.Random(job)))

    async def _job(self, rng: random.Random) -> None:
        await asyncio.sleep(0 if self.full else rng.uniform(0, WARM_S))
        while True:
            await asyncio.gather(*(self._turn(rng) for _ in range(1 if self.full else BATCH)))
            await asyncio.sleep(0 if self.full else TRAIN_S)

    async def _turn(self, rng: random.Random) -> None:
        self._number += 1
        length = min(MOST_TOKENS, max(1, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))))
        asked = request(BASE, list(range(97, 113)), self._number, length)
        self._ended[asked.id] = ended = asyncio.get_running_loop().create_future()
        self.under_way += 1
        await self.bus.publish([(CELL.rollout, asked)])
        await ended
        self.under_way -= 1

    async def _hear(self) -> None:
        cursor = "0"
        while True:
            for entry, message in await self.bus.follow(CELL.env, cursor, block_ms=100):
                cursor = entry
                if isinstance(message, TurnResult):
                    assert len(message.tokens) == message.usage.sampled_tokens, "a token was sampled twice"
                    self._ended.pop(message.id).set_result(None)


@asynccontextmanager
async def pool(
    url: str, folder: Path, load: Load, size: Sizer, *, bounds: WorkerRange = BOUNDS, options: Sequence[str] = ()
) -> AsyncGenerator[dict[str, SupervisedProcess]]:
    """Runs the pool inside, under a load. `options`: of `_paced_rollout` behind the seconds of loading; `{}` is a worker's number."""
    running = dict[str, SupervisedProcess]()
    elastic = ElasticPool(bounds, {}, running, nothing)
    argv, commands = (sys.executable, "-m", "benchmarks._paced_rollout"), list[Command]()
    for number in range(bounds.most):
        more = [option.format(number) for option in options]
        arguments = " ".join((url, str(LEASE_S), str(SLOTS), str(folder / str(number)), str(LOAD_S), *more))
        settings = {**os.environ, ARGUMENTS: arguments}
        commands.append(Command(name=f"rollout-{number}", argv=argv, environment=settings, log=folder / "log"))
    server = PreforkServer(commands, folder / "log")
    for command in commands:
        elastic.add(command.name, partial(SupervisedProcess, command, nothing, server.start))

    async def own() -> None:
        while True:
            await load.bus.client.hset(CELL.demand, "1", str(load.under_way))
            await size.look(time.monotonic())
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for process in running.values():
            group.create_task(process.keep_running())
        loops = [
            group.create_task(loop) for loop in (load.run(), load.cluster.run(), own(), elastic.follow(url, group))
        ]
        yield running
        await cancel_all(loops)
        await asyncio.gather(*(process.stop(10) for process in running.values()))
    server.end()


async def measure(url: str, window_s: float, folder: Path, *, repack: bool, full: bool) -> PoolFigures:
    bus, pids, held, turns = Bus.connect(url, CELL), set[int](), list[int](), list[int]()
    load = JobLoad(bus, Cluster(bus), full)
    size = PoolSizer(bus, load.cluster, BOUNDS, repack=repack)
    for stream in (CELL.rollout, CELL.rollout_first):
        await load.bus.ensure_group(stream, GROUP_ROLLOUT)
    async with pool(url, folder, load, size) as running:
        while not any("begin" in file.read_text() for file in folder.glob("[0-9]")):
            await asyncio.sleep(0.1)  # none has started yet
        await asyncio.sleep(2 * WARM_S if window_s > WARM_S else window_s)
        since_s = time.monotonic()
        while time.monotonic() < since_s + window_s:
            alive = [process.pid for process in running.values() if process.pid is not None]
            held.append(len(alive))
            turns.append(load.under_way)
            pids |= set(alive)
            await asyncio.sleep(HELD_EVERY_S)
        until_s = time.monotonic()
    await load.bus.close()
    steps = [line.split() for file in folder.glob("[0-9]") for line in file.read_text().splitlines()]
    tokens = sum(int(step[2]) for step in steps if step[0] == "step" and since_s <= float(step[1]) < until_s)
    mean = sum(turns) / len(turns) / BOUNDS.most / SLOTS
    return PoolFigures(tokens / (until_s - since_s), sum(held) / len(held), mean, len(pids))


def measured(window_s: float) -> tuple[list[Any], dict[str, Any], list[Goal]]:
    """The tables, figures and goals of all four runs."""
    found = dict[tuple[bool, bool], PoolFigures]()
    for full in (False, True):
        for repack in (False, True):
            with embedded_redis() as server, tempfile.TemporaryDirectory() as folder:
                run = measure(server.url, window_s, Path(folder), repack=repack, full=full)
                found[full, repack] = asyncio.run(run)
    names = {False: "those without turns", True: "by repacking"}
    rows = [
        (
            "full" if full else f"{each.load:.0%}",
            names[repack],
            each.tokens_per_s,
            each.workers,
            each.tokens_per_worker_s,
        )
        for (full, repack), each in found.items()
    ]
    columns = ("load", "who retires", "tokens/s", "workers held", "tokens per worker and s")

    def more(figure: str, *, full: bool = False) -> float:
        return 100 * (getattr(found[full, True], figure) / getattr(found[full, False], figure) - 1)

    goals = [
        Goal("tokens per held worker-second by repacking, more by", more("tokens_per_worker_s"), 26, " %"),
        Goal("tokens/s by repacking, more by", more("tokens_per_s"), -8, " %"),
        Goal("tokens/s of a full pool, change", abs(more("tokens_per_s", full=True)), 2, " %", more_is_better=False),
    ]
    figures = {f"{'full' if full else 'half'}-{repack=}": asdict(each) for (full, repack), each in found.items()}
    return [make_table("A pool of up to four workers", columns, rows)], figures, goals
