"""Reads jobs: their records in Redis, their files, and what only the store knows of them."""

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from common.bus.bus import Bus
from common.errors import CorruptObject, NotFound, Unavailable
from common.store.adapters import AdapterStore, Manifest
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from manager_service.owner.jobs.items import Items, LinesOnDisk
from manager_service.owner.jobs.job import Job
from manager_service.owner.runs.run_retention import read_versions
from manager_service.records.file_records import file_path
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.keys import read_record
from manager_service.records.sample_records import LIMITS, Limits

JobHashes = Sequence[Mapping[bytes, bytes]]
"""A job's hashes at the keys `job`, `open`, `evals` and `versions`."""
MAX_READS = 16
"""Files that are read from object storage at once."""


@dataclass(slots=True)
class VersionSearch:
    """The store's answer about the next version of a job."""

    since: float  # seconds since 1970, when something last happened to the job
    begun: bool = False  # the store is asked, or has answered
    done: bool = False
    manifest: Manifest | None = None
    error: CorruptObject | None = None


@dataclass(slots=True)
class FetchedJob:
    """A job that was read, before it counts."""

    job: Job
    searched: VersionSearch
    missing: str = ""  # why a file of it is gone


class JobReader:
    """Reads the jobs of an owner, for its partitions."""

    def __init__(self, bus: Bus, objects: Objects, store: AdapterStore, limits: Limits = LIMITS) -> None:
        self._bus, self._cell = bus, bus.cell
        self._files, self._store = ItemFiles(objects), store
        self._limits = limits

    async def records(self, job_ids: Sequence[str]) -> list[JobHashes]:
        """The record of each job; empty hashes of a job that has none."""
        keys = [
            key(job)
            for job in job_ids
            for key in (self._cell.job, self._cell.open, self._cell.evals, self._cell.versions)
        ]
        hashes = await self._bus.read_hashes(keys)
        return [hashes[at : at + 4] for at in range(0, len(hashes), 4)]

    async def read(self, job_id: str, records: JobHashes) -> FetchedJob | None:
        """A job with its files. None if it has no record that can be read. Raises Unavailable."""
        decoded = self._decoded(job_id, records)
        if decoded is None:
            return None
        (spec, state), missing = decoded, ""
        try:
            items = [await self._files.items(spec.tenant, file) for file in (spec.training_file, spec.validation_file)]
        except NotFound as error:
            items, missing = [Items(), Items()], f"the job's file is gone: {error}"
        job = self._made(spec, state, records, *items)
        searched = VersionSearch(job.changed_at)
        await self.search(job, searched)
        return FetchedJob(job, searched, missing)

    def without_files(self, job_id: str, records: JobHashes) -> Job | None:
        """A job whose files cannot be read. None if it has no record that can be read."""
        decoded = self._decoded(job_id, records)
        return decoded and self._made(*decoded, records, Items(), Items())

    def _decoded(self, job_id: str, records: JobHashes) -> tuple[JobSpec, JobState] | None:
        """A job's record, decoded. None if it has none, or one that cannot be read."""
        return read_record(self._cell.job(job_id), records[0], JobSpec, JobState) if records[0] else None

    def _made(self, spec: JobSpec, state: JobState, records: JobHashes, items: Items, eval_items: Items) -> Job:
        job = Job(self._cell, spec, state, items, eval_items, limits=self._limits)
        job.open.load(state, *records[1:3])
        job.retention.versions = read_versions(records[3])
        return job

    async def search(self, job: Job, searched: VersionSearch) -> None:
        """Asks the store for the version that a job waits for. Raises Unavailable."""
        # A trainer commits a version before it sends the update. If Redis lost that message, no worker tells of the version again, and a
        # second training of the step would find it there. So only the store knows whether it exists
        if job.state.training or job.state.initialising:
            adapter = AdapterRef(job.spec.tenant, job.id, job.state.version + 1)
            try:
                searched.manifest = await self._store.manifest(adapter)
            except CorruptObject as error:
                searched.error = error
        searched.done = True


# ---- files ----------------------------------------------------------------------------------------------------------


class ItemFiles:
    """The files of all jobs of an owner. Jobs with the same file share it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._files: WeakValueDictionary[str, Items] = WeakValueDictionary()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by path; while it is read
        self._places = asyncio.Semaphore(MAX_READS)

    async def items(self, tenant: str, file: str | None) -> Items:
        """The rows of a file; none without one. Raises NotFound, and Unavailable: StoreUnavailable unless it is the disk."""
        if file is None:
            return Items()
        path = file_path(tenant, file)
        async with self._locks.setdefault(path, asyncio.Lock()):
            items = self._files.get(path)
            if items is None:
                async with self._places:
                    self._files[path] = items = Items(await download_lines(self._objects, path))
            return items


async def download_lines(objects: Objects, path: str) -> LinesOnDisk:
    """A file's lines, on this machine's disk. Raises NotFound, and Unavailable: StoreUnavailable unless it is the disk."""
    try:
        with contextlib.ExitStack() as stack:
            rows = stack.enter_context(tempfile.TemporaryFile())
            await objects.download(path, rows)
            lines = await asyncio.to_thread(LinesOnDisk, rows)
            stack.pop_all()  # open as long as the items
            return lines
    except OSError as error:
        raise Unavailable(f"the manager's disk for temporary files: {error.strerror or error}") from error
