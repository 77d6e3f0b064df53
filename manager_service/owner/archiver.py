"""Copies finished jobs' records from Redis to the archive; their partition's owner then deletes them. Counts what tenants store
whose count is missing.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from common.bus.bus import Bus
from common.bus.streams import partition_of
from common.errors import Unavailable
from common.store.objects import Objects
from manager_service.owner.jobs.changes import Changes, Moved
from manager_service.records.archive import Archive, Archived, in_parts
from manager_service.records.job_records import DELETED, JobSpec, JobState
from manager_service.records.keys import read_record
from manager_service.records.sample_records import Kept
from manager_service.records.stored import COUNTED, count_again, listed
from manager_service.records.usage import usage_fields, usage_of

BATCH_JOBS = 20
"""Jobs that are moved together."""

RECOUNT_EVERY_S = 1.0
log = structlog.get_logger()


class Archiver:
    """Copies the finished jobs of a cell, for the owners of its partitions."""

    def __init__(self, bus: Bus, objects: Objects, *, every_s: float = 1.0) -> None:
        """`every_s`: how often it looks for jobs that are due."""
        self._bus = bus
        self._cell = bus.cell
        self._objects = objects
        self._archive = Archive(objects, bus.cell.base_model)
        self._every_s = every_s

    async def run(
        self, due: Callable[[], tuple[list[int], float]], commit: Callable[[int, Changes], Awaitable[bool]]
    ) -> None:
        """Archives until cancelled. `due`: partitions, and before when their jobs must have finished. `commit`: writes changes of
        a partition to Redis, unless another owner has it."""
        while True:
            partitions, before_s = due()
            for partition in partitions:
                try:
                    while await self._some(partition, before_s, commit):
                        pass
                except Unavailable as error:
                    log.warning("archiving_delayed", partition=partition, reason=str(error))
            await asyncio.sleep(self._every_s)

    async def _some(self, partition: int, before_s: float, commit: Callable[[int, Changes], Awaitable[bool]]) -> bool:
        """False: nothing is left to be archived, or the partition is another's now."""
        jobs = await self.due(partition, before_s)
        # Mark, copy, delete, each write fenced. The mark keeps the API from changing a record between copy and deletion, which would
        # lose the change. A crash before the deletion repeats the copy, to the same names
        if not jobs or not await commit(partition, Changes(moving=jobs)):
            return False
        return await commit(partition, Changes(moved=await self.copy(jobs)))

    async def due(self, partition: int, before_s: float) -> list[str]:
        """Jobs of a partition that finished before a moment, the earliest first, a batch at most."""
        key, client = self._cell.finished(partition), self._bus.client
        jobs: Any = await self._bus.retrying(
            lambda: client.zrange(key, "-inf", before_s, byscore=True, offset=0, num=BATCH_JOBS)
        )
        return [job.decode() for job in jobs]

    async def copy(self, jobs: Sequence[str]) -> list[Moved]:
        """Writes marked jobs to the archive. Raises Unavailable if the store is away: then nothing may be deleted."""
        return await asyncio.gather(*map(self._copy, jobs))

    async def _copy(self, job: str) -> Moved:
        key = self._cell.job(job)
        (record,) = await self._bus.read_hashes([key])
        decoded = read_record(key, record, JobSpec, JobState)
        return await self._write(*decoded, deleted=DELETED.encode() in record) if decoded else Moved(job)

    async def _write(self, spec: JobSpec, state: JobState, *, deleted: bool) -> Moved:
        cell, job = self._cell, spec.id
        ledger, checkpoints, events, in_flight, amounts, created_s = await self._bus.pipelined(
            [
                ("HGETALL", cell.ledger(job)),
                ("HGETALL", cell.checkpoints(job)),
                ("XRANGE", cell.events(job), "-", "+"),
                ("HLEN", cell.open(job)),
                ("HMGET", cell.usage(spec.tenant), *usage_fields(job)),
                ("ZSCORE", cell.tenant_jobs(spec.tenant), job),
            ]
        )
        usage = usage_of(amounts)
        archived = Archived(
            spec=spec,
            state=state,
            deleted=deleted,
            created_ms=math.floor(1000 * (created_s or spec.created_at)),
            ledger={name.decode(): int(count) for name, count in ledger.items()} | {"in_flight": in_flight},
            usage=usage,
        )
        parts = in_parts("events", [(int(entry.partition(b"-")[0]), fields[b"event"]) for entry, fields in events])
        parts |= in_parts("checkpoints", sorted((int(version), value) for version, value in checkpoints.items()))
        await self._archive.write(archived, parts)
        kept = state.kept.get("samples", Kept())
        if kept.dropped:  # an owner that died may have left files of them
            for files in (self._archive.sample_files, self._archive.answer_files):
                await files.drop_below(spec.tenant, job, kept.first)
        await self._objects.delete_folder(f"payloads/{job}")
        if deleted:  # a step that was under way then may have made a version since
            await self._objects.delete_folder(f"adapters/{spec.tenant}/{job}")
        size = await self._bus.retrying(lambda: count_again(self._objects, self._bus.client, cell, spec.tenant, job))
        return Moved(job, spec.tenant, usage, size)


class Recount:
    """Counts from a listing, once, what a tenant stored before it was counted."""

    def __init__(self, bus: Bus, objects: Objects) -> None:
        self._bus = bus
        self._objects = objects
        self._counted: set[str] = set()

    async def run(self, tenants: Callable[[], list[str]], commit: Callable[[int, Changes], Awaitable[bool]]) -> None:
        """Counts until cancelled. `tenants`: of the owned partitions. `commit`: as in `Archiver.run`."""
        cell = self._bus.cell
        while True:
            names = [name for name in tenants() if name not in self._counted]
            counted = await self._bus.pipelined(("HEXISTS", cell.stored(name), COUNTED) for name in names)
            for name, is_counted in zip(names, counted, strict=True):
                try:
                    if is_counted or await commit(partition_of(name), await self._count(name)):
                        self._counted.add(name)
                except Unavailable as error:
                    log.warning("recount_delayed", tenant=name, reason=str(error))
            await asyncio.sleep(RECOUNT_EVERY_S)

    async def _count(self, tenant: str) -> Changes:
        """The bytes that the count lacks. A version that is committed while the store is listed may be in both."""
        cell, changes = self._bus.cell, Changes(counted=[tenant])
        before, jobs, runs = await self._bus.pipelined(
            [
                ("HGETALL", cell.stored(tenant)),
                ("ZRANGE", cell.tenant_jobs(tenant), 0, -1),
                ("ZRANGE", cell.tenant_runs(tenant), 0, -1),
            ]
        )
        known = [name.decode() for name in (*jobs, *runs)]
        for what, num_bytes in (await listed(self._objects, cell, tenant, known)).items():
            changes.stored[tenant, what] = num_bytes - int(before.get(what.encode(), 0))
        return changes
