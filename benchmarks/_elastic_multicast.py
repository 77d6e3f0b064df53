"""A base model for some workers at once, from others that have it: the part of `benchmarks.elastic` about multicast.

The bar is the fewest rounds in which `sources` workers can bring K parts to n others, if each sends one part in a round: K +
⌈log2((n + sources) / sources)⌉ - 1. A worker sends `bytes_per_s`; the store, an S3 server behind a proxy, STORE_SPEED times that. Each
worker is a process. With the arguments REDIS FOLDER BASE BYTES_PER_S it is one: for a line with a name it fetches BASE as a
new machine of that name, answers when it has the whole folder, and at the next line forgets it.
"""

import asyncio
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from benchmarks._elastic_bases import STORE, fetched, slow_store
from benchmarks._elastic_relay import LineWorker
from benchmarks._report import Report, at_most, make_table
from common.store.bases import read_base
from common.store.objects import Objects
from common.store.parts import StoredFile, part_bytes
from harness.redis_server import embedded_redis

STORE_SPEED = 4
JOINS_S = 0.05
"""Seconds between those who join the chain, where it matters who is in its middle."""
LOST_AT = 0.5
"""Share of the bar's seconds after which a worker in the middle of a chain is lost."""


class Multicast(msgspec.Struct, frozen=True):
    what: str
    seconds: float  # until the last had the base model
    bar_s: float


@dataclass(slots=True)
class Pool:
    """Workers of which the first have the base model."""

    workers: list[LineWorker]
    weights: StoredFile
    bytes_per_s: int
    num_runs: int = 0

    async def fetch(self, number: int) -> float:
        """Has one fetch the base model; returns when it was there."""
        return float(await self.workers[number].answer(f"{self.num_runs}-{number}"))

    async def multicast(self, loaders: int, sources: int = 1, *, is_lost: bool = False) -> Multicast:
        """`is_lost`: one in the middle of the chain, as with its machine: its connections stay, and say nothing."""
        self.num_runs += 1
        rounds = len(self.weights.parts) + math.ceil(math.log2((loaders + sources) / sources)) - 1
        bar_s, since_s = rounds * part_bytes(self.weights.size) / self.bytes_per_s, time.monotonic()
        reads = dict[int, asyncio.Task[float]]()
        for each in range(sources, sources + loaders):
            reads[each] = asyncio.create_task(self.fetch(each))
            await asyncio.sleep(JOINS_S * is_lost)
        if is_lost:
            await asyncio.sleep(LOST_AT * bar_s)
            lost = sources + loaders // 2
            self.workers[lost].process.send_signal(signal.SIGSTOP)
            reads.pop(lost).cancel()
        seconds = max(await asyncio.gather(*reads.values())) - since_s
        if loaders > 1:  # a single one goes on as a source
            await asyncio.gather(*(self.workers[each].answer("") for each in reads))
        return Multicast(f"{loaders} from {sources}{', one is lost' * is_lost}", seconds, bar_s)


async def measure(folder: Path, loaders: int, num_bytes: int, bytes_per_s: int) -> tuple[list[Multicast], float]:
    """For `loaders` and fewer from one source, for one less from two, and with a loss; and the copies that the store sent."""
    workers = list[LineWorker]()
    with embedded_redis() as redis:
        async with slow_store(folder, num_bytes, STORE_SPEED * bytes_per_s) as (where, _, proxy):
            files = (await read_base(Objects.open(STORE), where)).files
            proxy.num_bytes = 0
            try:
                for number in range(1 + loaders):
                    given = ("benchmarks._elastic_multicast", redis.url, folder / str(number), where, bytes_per_s)
                    workers.append(await LineWorker.start(*given))
                pool = Pool(workers, max(files.values(), key=lambda file: file.size), bytes_per_s)
                await pool.fetch(0)
                found = [await pool.multicast(each) for each in (loaders, *(n for n in (5, 3, 2) if n < loaders), 1)]
                found.append(await pool.multicast(loaders - 1, sources=2))
                await workers[1].answer("")
                found.append(await pool.multicast(loaders, is_lost=True))
                return found, proxy.num_bytes / sum(file.size for file in files.values())
            finally:
                await asyncio.gather(*(worker.kill() for worker in workers))


def multicast_report(loaders: int, megabytes: int, copy_s: int) -> Report:
    """A worker sends `megabytes` in `copy_s`; the base model has 2.18 times as much."""
    num_bytes, bytes_per_s = 2_180_000 * megabytes, megabytes * 1_000_000 // copy_s
    with tempfile.TemporaryDirectory() as folder:
        found, copies = asyncio.run(measure(Path(folder), loaders, num_bytes, bytes_per_s))
    rows = [(each.what, each.seconds, each.bar_s, each.seconds / each.bar_s) for each in found]
    *whole, lost = found
    over, cost_s = max(each.seconds / each.bar_s for each in whole), lost.seconds - whole[0].seconds
    goals = [
        at_most("a multicast over its bar", over, 1.15, " x"),
        at_most("the loss of a worker costs", cost_s, 2.5, " s"),
        at_most("copies out of the store, for all of them", copies, 1.1),
    ]
    title = f"A base model of {num_bytes / 1e6:.0f} MB for workers at {bytes_per_s / 1e6:.0f} MB/s"
    table = make_table(title, ("loaders", "s", "bar, s", "ratio"), rows)
    return Report([table], {"multicast": [msgspec.structs.asdict(each) for each in found]}, goals)


# ---- a worker's process ---------------------------------------------------------------------------------------------


async def work(redis_url: str, folder: Path, where: str, bytes_per_s: int) -> None:
    os.nice(10)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    print("ready", flush=True)
    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        async with fetched(redis_url, where, folder / name, bytes_per_s):
            print(time.monotonic(), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        shutil.rmtree(folder / name)
        print("forgotten", flush=True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
