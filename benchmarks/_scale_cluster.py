"""Runs real managers and a real Redis around simulated workers, and measures them from outside."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from common.bus.bus import Bus
from common.bus.streams import GROUP_MANAGER, NUM_PARTITIONS, partition_of
from harness.processes import cpu_s
from harness.redis_server import RedisServer, embedded_redis
from harness.standin import job_command, job_spec
from harness.standin_load import BASE_MODEL, Load
from manager_service.launcher.supervisor import choose_port
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.keys import JSON

BATCH_SIZE, GROUP_SIZE = 16, 8
JOBS_A_TENANT = 10
MIN_TENANTS = 10
"""Few jobs have as many tenants, so that what is compared is numbers of jobs and not of partitions."""
CHUNK = 500
START_S = 60.0
AGE_MS = (1000, 2000)
"""Youngest and oldest age of the results that a look at the owners' hand-overs takes."""


class Newest(msgspec.Struct):
    """A job's state, but for all that is not looked at: the states of thousands of jobs are read while the rest works."""

    version: int = JobState().version


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one process so far."""

    cpu_s: float
    memory_mb: float
    ran_s: float  # its main thread
    waited_s: float  # likewise, for a core that something else had


@dataclass(frozen=True, slots=True)
class Moment:
    """Totals of all processes so far."""

    at_s: float
    managers: tuple[Usage, ...]
    redis: Usage


@dataclass
class ScaleCluster:
    """A Redis, managers, and jobs that never end."""

    server: RedisServer
    bus: Bus
    folder: Path
    managers: list[subprocess.Popen[bytes]]
    jobs: list[JobSpec]
    port: int = 0  # of the newest manager's API

    @property
    def store_url(self) -> str:
        return (self.folder / "store").as_uri()

    def load(self, **values: Any) -> Load:
        return Load(redis_url=self.server.url, store_url=self.store_url, **values)

    # ---- managers ---------------------------------------------------------------------------------------------------

    def start_manager(self) -> subprocess.Popen[bytes]:
        self.port = choose_port("127.0.0.1", 0)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MARLAAS_REDIS_URL": self.server.url,
            "MARLAAS_STORE_URL": self.store_url,
            "MARLAAS_DATA_DIR": str(self.folder),
            "MARLAAS_BASE_MODELS": BASE_MODEL,
            "MARLAAS_PORT": str(self.port),
            "MARLAAS_LOG_LEVEL": "error",
        }
        self.managers.append(subprocess.Popen([sys.executable, "-m", "manager_service"], env=environment))
        return self.managers[-1]

    async def start_managers(self, number: int) -> None:
        """Returns once they share the partitions as evenly as they will."""
        for _ in range(number):
            self.start_manager()
        async with asyncio.timeout(START_S):
            while (
                max(held := await self.leases(), default=0) > -(-NUM_PARTITIONS // number) or sum(held) < NUM_PARTITIONS
            ):
                await asyncio.sleep(0.1)

    async def leases(self) -> list[int]:
        """Numbers of partitions that each owner holds, the largest first."""
        return sorted(Counter(await self._tokens()).values(), reverse=True)

    async def _tokens(self) -> list[bytes | str]:
        cell = self.bus.cell
        tokens = await self.bus.client.mget([cell.lease(p) for p in range(NUM_PARTITIONS)])
        return [token for token in tokens if token]

    def stop(self) -> None:
        for manager in self.managers:
            manager.kill()
            manager.wait()

    # ---- jobs -------------------------------------------------------------------------------------------------------

    async def create_jobs(self, number: int) -> None:
        """Creates many jobs as the API's script does; returns once each has version 0."""
        known, tenants = len(self.jobs), max(MIN_TENANTS, number // JOBS_A_TENANT)
        for n in range(known, known + number):
            spec = job_spec(f"ftjob-{n:06d}", f"tenant-{n % tenants}", num_steps=100_000)
            hyper = msgspec.structs.replace(spec.hyper, batch_size=BATCH_SIZE, group_size=GROUP_SIZE)
            method = {"type": "reinforcement", "reinforcement": {"hyperparameters": {}}}
            self.jobs.append(msgspec.structs.replace(spec, hyper=hyper, method=method))
        for start in range(known, known + number, CHUNK):
            await self._create(self.jobs[start : start + CHUNK])
        async with asyncio.timeout(10 * START_S):
            while await self._num_begun() < len(self.jobs):
                await asyncio.sleep(0.2)

    async def _create(self, specs: Sequence[JobSpec]) -> None:
        cell, pipe = self.bus.cell, self.bus.client.pipeline(transaction=False)
        for spec in specs:
            pipe.hset(cell.job(spec.id), mapping={"spec": JSON.encode(spec), "state": JSON.encode(JobState())})
            pipe.zadd(cell.tenant_jobs(spec.tenant), {spec.id: float(spec.created_at)})
            pipe.zadd(cell.jobs_all, {spec.id: float(spec.created_at)})
            pipe.sadd(cell.active(partition_of(spec.tenant)), spec.id)
        await pipe.execute()
        commands = [job_command(spec) for spec in specs]
        await self.bus.publish([(self.bus.cell.jobs(command.partition), command) for command in commands])

    async def _num_begun(self) -> int:
        """The number of jobs that have a version."""
        states: list[Any] = []
        for start in range(0, len(self.jobs), CHUNK):
            pipe = self.bus.client.pipeline(transaction=False)
            for spec in self.jobs[start : start + CHUNK]:
                pipe.hget(self.bus.cell.job(spec.id), "state")
            states += await pipe.execute()
        return sum(msgspec.json.decode(state, type=Newest).version >= 0 for state in states)

    # ---- measuring --------------------------------------------------------------------------------------------------

    async def moment(self) -> Moment:
        info = await self.bus.client.info()
        return Moment(
            at_s=time.monotonic(),
            managers=tuple(_usage(manager.pid) for manager in self.managers),
            redis=dataclasses.replace(_usage(self.server.pid), memory_mb=info["used_memory"] / 1e6),
        )

    async def owner_handover_ms(self) -> list[float]:
        """Times from publication to reading of results that were published a moment ago. They are Redis' own: an entry's id
        says when it was published, and its idle time when it was delivered."""
        seconds, micros = await self.bus.client.time()
        now_ms = seconds * 1000 + micros // 1000
        found: list[float] = []
        for partition in range(NUM_PARTITIONS):
            pipe = self.bus.client.pipeline(transaction=True)
            pipe.time()
            oldest, newest = now_ms - AGE_MS[1], now_ms - AGE_MS[0]
            pipe.xpending_range(self.bus.cell.scored(partition), GROUP_MANAGER, oldest, newest, 100)
            (seconds, micros), rows = await pipe.execute()
            at_ms = seconds * 1000 + micros / 1000
            delivered = [(row["message_id"], at_ms - row["time_since_delivered"]) for row in rows]
            found += [max(0.0, delivered_ms - int(entry.split(b"-")[0])) for entry, delivered_ms in delivered]
        return found


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[ScaleCluster]:
    """Starts a cluster with no manager and no job yet."""
    with tempfile.TemporaryDirectory() as folder, embedded_redis() as server:
        cluster = ScaleCluster(server, server.bus(BASE_MODEL), Path(folder), [], [])
        try:
            yield cluster
        finally:
            cluster.stop()
            await cluster.bus.close()


def _usage(pid: int) -> Usage:
    ran_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
    return Usage(cpu_s(pid), psutil.Process(pid).memory_info().rss / 1e6, ran_ns / 1e9, waited_ns / 1e9)
