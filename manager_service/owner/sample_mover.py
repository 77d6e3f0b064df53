"""Moves samples from Redis to object storage, so that Redis holds those of a job's newest step alone.

    a step's script writes them to Redis ─► follow ─► run: write the file, then delete in Redis what is still the same

They are read there and here, so a move may be late, may be repeated, and may never happen: what a dead owner left is moved after the
job's next step, or archived with the job. While the storage is away, the oldest are dropped beyond some megabytes a job.
"""

import asyncio
from typing import Any

import structlog

from common.bus import Bus
from common.errors import Unavailable
from common.objects import Objects
from manager_service.archive.samples import SampleFiles
from manager_service.jobs.changes import Changes
from manager_service.jobs.job import Job
from manager_service.scheduling.members import MemberTable

AGAIN_S = 5.0
"""After which it is tried again when the storage was away."""
MAX_WAITING_BYTES = 8 << 20
"""Of a job's samples in Redis while the storage is away."""
# KEYS: samples:<job>. ARGV: version, what was written to the file.
DELETE_IF_SAME = "if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end"

log = structlog.get_logger()


class SampleMover:
    """Works for the jobs of an owner, one at a time."""

    def __init__(self, bus: Bus, objects: Objects) -> None:
        self._bus = bus
        self._files = SampleFiles(objects, bus.cell.base_model)
        self._delete_if_same = bus.client.register_script(DELETE_IF_SAME)
        self._tenants: dict[str, str] = {}  # job with samples to move -> its tenant
        self._dropped: dict[str, tuple[str, int, int]] = {}  # job -> tenant, first version, one past the last
        self._wanted = asyncio.Event()

    def follow(self, changes: Changes, jobs: "MemberTable[Job]") -> None:
        """Takes in what was committed. Samples of a job that has left stay in Redis, and are archived with it."""
        for name, *_ in changes.samples:
            if job := jobs.get(name):
                self._tenants[name] = job.spec.tenant
        for name, first, end in changes.dropped_samples:
            if job := jobs.get(name):
                known = self._dropped.get(name)
                self._dropped[name] = (job.spec.tenant, min(first, known[1]) if known else first, end)
        if self._tenants or self._dropped:
            self._wanted.set()

    async def run(self) -> None:
        """Moves until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._move_all()
            except Unavailable as error:
                log.warning("samples_not_moved", reason=str(error))
                self._wanted.set()
                await asyncio.sleep(AGAIN_S)

    async def _move_all(self) -> None:
        while self._tenants:
            job = next(iter(self._tenants))
            tenant = self._tenants.pop(job)
            try:
                await self._move(tenant, job)
            except Unavailable:
                self._tenants[job] = tenant
                for waiting in self._tenants:
                    await self._shorten(waiting)
                raise
        while self._dropped:
            job, (tenant, first, end) = self._dropped.popitem()
            try:
                await self._files.drop(tenant, job, range(first, end))
            except Unavailable:
                self._dropped[job] = (tenant, first, max(end, self._dropped.get(job, (tenant, first, end))[2]))
                raise

    async def _move(self, tenant: str, job: str) -> None:
        """Moves all but the newest version's, which readers ask for most."""
        key = self._bus.cell.samples(job)
        found: Any = await self._bus.retrying(lambda: self._bus.client.hgetall(key))
        for version in sorted(found, key=int)[:-1]:
            samples: Any = found[version]
            await self._files.write(tenant, job, int(version), samples)
            await self._bus.retrying(lambda version=version, samples=samples: self._delete(key, version, samples))

    async def _shorten(self, job: str) -> None:
        """Drops a job's oldest samples while the storage takes none: Redis has room for a few steps' alone."""
        key, left = self._bus.cell.samples(job), MAX_WAITING_BYTES
        found: Any = await self._bus.retrying(lambda: self._bus.client.hgetall(key))
        for version in sorted(found, key=int, reverse=True):
            left -= len(found[version])
            if left < 0:
                log.warning("samples_dropped", job_id=job, version=int(version), reason="the storage is away")
                await self._bus.retrying(lambda version=version: self._delete(key, version, found[version]))

    async def _delete(self, key: str, version: bytes, samples: bytes) -> None:
        await self._delete_if_same(keys=[key], args=[version, samples])
