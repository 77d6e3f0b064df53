"""Adapters of 100 MB for 16 rollout workers, whose store and links are slow: the part of `benchmarks.elastic` about the relay.

A worker sends an adapter in `copy_s`, so 100 MB in 5 s at 20 MB/s. The store is an S3 server behind a proxy that lets pass
STORE_SPEED times that, both ways together. Each worker is a process with a node folder of its own, as on a machine of its own, and
yields the processor to the trainer and the store, which have other machines. It runs as `python -m benchmarks._elastic_relay REDIS
FOLDER BYTES_PER_S`, 0 for no relay, takes a line `job version` for each adapter to read, and answers with a line of JSON when that is
in its memory.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import structlog

from benchmarks._report import Report, at_most, make_table
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import running
from common.peers.chain import Relay
from common.peers.folder import NodeFolder
from common.peers.holders import Holders
from common.store.adapters import PEFT_FILES, AdapterStore, Manifest
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from harness.proxy import Proxy
from harness.redis_server import embedded_redis
from harness.s3_server import BUCKET, S3Server, environment

CELL = Cell("bench")
STORE_SPEED = 4
CACHE_BYTES = 400_000_000
NUM_JOBS = 8
STORE = f"s3://{BUCKET}/relay"


class Read(msgspec.Struct, frozen=True):
    """One adapter that a worker has read."""

    ended_s: float  # by the machine's monotonic clock
    peer_bytes: float  # of all that the worker has read
    cpu_s: float


class RelayFigures(msgspec.Struct, kw_only=True):
    commit_1_s: float
    """Seconds of a commit while one worker reads the version before."""
    commit_all_s: float
    """While all workers do."""
    straight_1_s: float
    straight_all_s: float
    """The same without a relay."""
    copies: float
    """Bytes out of the store over those of the versions that all workers read."""
    one_copy_s: float
    """Seconds in which one worker gets a version from another."""
    wait_s: float
    """95th percentile of the followers' waits, all at once."""
    killed_wait_s: float
    """The same of those that are left when one in the middle is killed halfway."""
    cpu_s: float
    """Processor seconds of a worker for one version."""


@dataclass(slots=True)
class LineWorker:
    """A process that answers each line with one."""

    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, module: str, *arguments: object) -> Self:
        """Returns once it has said a line."""
        command, pipe = (sys.executable, "-m", module, *map(str, arguments)), asyncio.subprocess.PIPE
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        await worker._line()
        return worker

    async def answer(self, line: str) -> bytes:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return await self._line()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise EOFError("the worker ended")
        return line


class RelayWorker(LineWorker):
    async def read(self, adapter: AdapterRef) -> Read:
        """Has it read an adapter."""
        return msgspec.json.decode(await self.answer(f"{adapter.job} {adapter.version}"), type=Read)


@dataclass(slots=True)
class World:
    redis_url: str
    folder: Path
    proxy: Proxy
    store: AdapterStore
    num_bytes: int
    bytes_per_s: int
    """A worker's to its followers."""

    @contextlib.asynccontextmanager
    async def workers(self, number: int, *, relays: bool = True) -> AsyncGenerator[list[RelayWorker]]:
        bytes_per_s, now = self.bytes_per_s if relays else 0, time.monotonic_ns()
        folders = [self.folder / f"{now}-{each}" for each in range(number)]
        module = "benchmarks._elastic_relay"
        starts = [RelayWorker.start(module, self.redis_url, folder, bytes_per_s) for folder in folders]
        workers = await asyncio.gather(*starts)
        try:
            yield workers
        finally:
            await asyncio.gather(*(worker.kill() for worker in workers))

    async def commit(self, job: str, version: int, num_bytes: int) -> AdapterRef:
        adapter = AdapterRef("bench", job, version)
        manifest = Manifest(adapter=adapter, parent=None, batch="b", seed=0, next_group=0)
        await self.store.commit(manifest, {PEFT_FILES[0]: os.urandom(num_bytes), PEFT_FILES[1]: b"{}"})
        return adapter

    # ---- the bars ---------------------------------------------------------------------------------------------------

    async def commit_s(self, number: int, *, relays: bool) -> float:
        """Seconds of a commit while so many workers read the version before."""
        job = f"commit-{number}-{relays}"
        before = await self.commit(job, 0, self.num_bytes)
        async with self.workers(number, relays=relays) as workers:
            reads = [asyncio.create_task(worker.read(before)) for worker in workers]
            await asyncio.sleep(0.2)
            since_s = time.monotonic()
            await self.commit(job, 1, self.num_bytes)
            seconds = time.monotonic() - since_s
            await asyncio.gather(*reads)
        return seconds

    async def copies(self, number: int) -> float:
        adapters = [await self.commit(f"copies-{job}", 1, self.num_bytes // NUM_JOBS) for job in range(NUM_JOBS)]
        async with self.workers(number) as workers:
            before = self.proxy.num_bytes
            for adapter in adapters:
                await asyncio.gather(*(worker.read(adapter) for worker in workers))
        return (self.proxy.num_bytes - before) / (self.num_bytes // NUM_JOBS * NUM_JOBS)

    async def one_copy_s(self) -> float:
        adapter = await self.commit("one", 1, self.num_bytes)
        async with self.workers(2) as (holder, follower):
            await holder.read(adapter)
            since_s = time.monotonic()
            return (await follower.read(adapter)).ended_s - since_s

    async def waits(self, number: int, *, kills_after_s: float | None = None) -> tuple[list[float], float]:
        """Sorted seconds of all but the first to follow; and the processor seconds of one, at most."""
        adapter = await self.commit(f"wait-{kills_after_s}", 1, self.num_bytes)
        async with self.workers(number) as workers:
            since_s = time.monotonic()
            reads = [asyncio.create_task(workers[0].read(adapter))]
            await asyncio.sleep(0.05)
            reads += [asyncio.create_task(worker.read(adapter)) for worker in workers[1:]]
            if kills_after_s is not None:
                await asyncio.sleep(kills_after_s)
                await workers[number // 2].kill()
                with contextlib.suppress(EOFError):
                    await reads.pop(number // 2)
            found = await asyncio.gather(*reads)
        return sorted(each.ended_s - since_s for each in found if each.peer_bytes), max(each.cpu_s for each in found)


async def measure(folder: Path, number: int, num_bytes: int, copy_s: int) -> RelayFigures:
    server = S3Server.start()
    proxy = Proxy(server.port, bytes_per_s=STORE_SPEED * num_bytes // copy_s)
    await proxy.open()
    os.environ |= environment(proxy.endpoint)  # the workers' too
    try:
        with embedded_redis() as redis:
            world = World(redis.url, folder, proxy, AdapterStore(Objects.open(STORE)), num_bytes, num_bytes // copy_s)
            one_copy_s = await world.one_copy_s()
            waits_s, cpu_s = await world.waits(number)
            killed_s, _ = await world.waits(number, kills_after_s=one_copy_s / 2)
            return RelayFigures(
                commit_1_s=await world.commit_s(1, relays=True),
                commit_all_s=await world.commit_s(number, relays=True),
                straight_1_s=await world.commit_s(1, relays=False),
                straight_all_s=await world.commit_s(number, relays=False),
                copies=await world.copies(number),
                one_copy_s=one_copy_s,
                wait_s=percentile(waits_s, 95),
                killed_wait_s=percentile(killed_s, 95),
                cpu_s=cpu_s,
            )
    finally:
        await proxy.shut()
        server.stop()


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def relay_report(number: int, num_bytes: int, copy_s: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), number, num_bytes, copy_s))
    rows = [
        ("a commit's seconds, 1 worker reads", found.commit_1_s, found.straight_1_s),
        (f"a commit's seconds, {number} workers read", found.commit_all_s, found.straight_all_s),
        ("copies out of the store", found.copies, float(number)),
        ("one copy from a worker, s", found.one_copy_s, float("nan")),
        (f"wait of {number - 1} followers, p95, s", found.wait_s, float("nan")),
        ("the same, one killed halfway, s", found.killed_wait_s, float("nan")),
    ]
    goals = [
        at_most("commit_s, 1 → all workers read", found.commit_all_s / found.commit_1_s, 1.1, " x"),
        at_most("copies out of the store", found.copies, 1.1),
        at_most("wait of the followers, p95, over one copy", found.wait_s / found.one_copy_s, 1.3, " x"),
        at_most("wait more if one is killed, p95", found.killed_wait_s - 1.3 * found.one_copy_s, 2.5, " s"),
    ]
    table = make_table("Adapters through peers", ("", "relay", "straight from the store"), rows)
    return Report([table], {"relay": msgspec.structs.asdict(found)}, goals)


# ---- a worker's process ---------------------------------------------------------------------------------------------


async def work(redis_url: str, folder: Path, bytes_per_s: int) -> None:
    os.nice(10)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    bus, objects = Bus.connect(redis_url, CELL), Objects.open(STORE)
    relay = Relay(
        objects,
        NodeFolder(folder / "files", CACHE_BYTES),
        Holders(bus, folder.name, store_places=1),
        bytes_per_s=bytes_per_s or None,
    )
    await relay.open("127.0.0.1", 0)
    store = AdapterStore(objects, relay=relay if bytes_per_s else None)
    async with running(relay.run()):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            job, version = line.split()
            since_s = time.process_time()
            await store.read(AdapterRef("bench", job, int(version)))
            read = Read(time.monotonic(), relay.counters()["peer_bytes"], time.process_time() - since_s)
            print(msgspec.json.encode(read).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
