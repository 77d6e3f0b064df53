"""Decides which jobs' rows are written when, and remembers how far each is.

reads: exports, job:<job>, events:<job>, logger-keys:<tenant>     writes: exports, and loggers through writers
holds: how far each job is (lost in a crash: all rows are sent again, and loggers take each once)
waits for: events, or the time of the next pass; a logger that is away is asked less and less often, for days
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
import structlog

from common.cancellation import cancel_all
from common.errors import Unavailable
from common.outgoing import Caller, CallFailed
from common.sharing.places import Places, SharedThreads
from manager_service.export import notes
from manager_service.export.cells import JobCell
from manager_service.export.passes import JobRows, Order, PassAnswer, Passes, check_disk
from manager_service.export.rows import rows_of
from manager_service.records.job_records import FINAL
from manager_service.records.receivers import LoggerKey, LoggerName, Receivers
from manager_service.records.sample_records import Limits

LOOK_EVERY_S = 1.0
EVENTS_A_JOB = 500
JOBS_A_PASS = 20
FIRST_WAIT_S, MOST_WAIT_S = 5.0, 3600.0
"""Time between two tries of a logger that is away."""
MAX_WAITING = 5000
"""Jobs of one tenant on their way to one logger; of more, those that have failed the longest are given up."""
FRAGMENT_ROWS, FRAGMENT_PASSES = 100, 10
"""An offline run gets a fragment after so many rows, or so many times the seconds between passes."""

log = structlog.get_logger()
T = TypeVar("T")
LoggerGroup = tuple[str, LoggerName]
"""A tenant and a logger: what one writer is for."""


@dataclass(slots=True, eq=False)
class Export:
    """One job on its way to one logger."""

    cell: JobCell
    tenant: str
    job: str
    logger: LoggerName
    read: int = 0  # sequence number of the last event up to which the logger has all rows
    due: float = 0.0  # by the monotonic clock
    fragment_due: float = 0.0
    num_failures: int = 0
    since: float = 0.0  # seconds since 1970, since when the logger takes nothing; 0: it does
    warning: str = ""  # why it waits, as the job's events say it
    done: bool = False


class Exporter:
    """Writes the figures of all jobs with `integrations`."""

    def __init__(
        self,
        cells: Sequence[JobCell],
        receivers: Receivers,
        *,
        folder: Path,
        passes: Passes,
        servers: Caller,
        every_s: float,
        processes: int,
        give_up_s: float = 3 * 86_400.0,
        disk_bytes: int,
        limits: Limits,
    ) -> None:
        """`every_s`: between two passes of a job. `processes`: writers at once that call servers, and as many others.
        `give_up_s`: after a job's end, without a success. `servers`: checks W&B's hosts. `disk_bytes`: of a tenant's files."""
        self._cells = cells
        self._receivers = receivers
        self._folder = folder
        self._threads = SharedThreads()
        self._passes = passes
        self._servers = servers
        self._every_s = every_s
        self._calling, self._local = Places(lambda: processes), Places(lambda: processes)
        self._give_up_s = give_up_s
        self._disk_bytes = disk_bytes
        self._limits = limits
        self._exports: dict[str, list[Export]] = {}  # by job
        self._busy: dict[LoggerGroup, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                await self._look()
                self._begin()
                await asyncio.sleep(min(LOOK_EVERY_S, self._every_s))
        finally:
            await cancel_all(self._busy.values())

    async def _look(self) -> None:
        """Takes in the jobs that are there, and forgets the others."""
        there: dict[str, list[Export]] = {}
        for cell in self._cells:
            (tenants,) = await cell.bus.read_hashes([cell.bus.cell.exports])
            for job, tenant in ((name.decode(), value.decode()) for name, value in tenants.items()):
                try:
                    there[job] = await self._of_job(cell, job, tenant)
                except Unavailable as error:
                    log.warning("export_delayed", job_id=job, reason=str(error))
        self._exports = there

    async def _of_job(self, cell: JobCell, job: str, tenant: str) -> list[Export]:
        """The job's exports. Once all are done, nothing is left to be looked at."""
        exports = self._exports.get(job)
        if exports is None:
            found = await cell.job(tenant, job)
            exports = [Export(cell, tenant, job, one.type) for one in found.spec.integrations] if found else []
        if all(export.done for export in exports):
            await cell.bus.retrying(lambda: cell.bus.client.hdel(cell.bus.cell.exports, job))
        return exports

    def _begin(self) -> None:
        """Begins a pass for each tenant and logger of which a job is due."""
        self._busy = {group: task for group, task in self._busy.items() if not task.done()}
        now, waiting = time.monotonic(), defaultdict[LoggerGroup, list[Export]](list)
        for export in itertools.chain.from_iterable(self._exports.values()):
            if not export.done and (export.tenant, export.logger) not in self._busy:
                waiting[export.tenant, export.logger].append(export)
        for group, exports in waiting.items():
            excess: list[Export] = []
            if len(exports) > MAX_WAITING:
                exports.sort(key=lambda export: export.since or math.inf)
                excess, exports = exports[:-MAX_WAITING], exports[-MAX_WAITING:]
            due = sorted((export for export in exports if export.due <= now), key=lambda export: export.due)
            if due or excess:
                self._busy[group] = asyncio.create_task(self._guarded(*group, due[:JOBS_A_PASS], excess))

    async def _guarded(
        self, tenant: str, logger: LoggerName, exports: Sequence[Export], excess: Sequence[Export]
    ) -> None:
        try:
            for export in excess:
                await self._safely(export, self._give_up(export, f"more than {MAX_WAITING} of your jobs wait for it"))
            if exports:
                await self._pass(tenant, logger, exports)
        except Exception as error:  # the boundary: one tenant's trouble must not stop the others' reports
            log.exception("pass_failed", tenant=tenant, logger_name=logger, reason=str(error))
            for export in exports:
                self._wait(export)

    async def _safely(self, export: Export, work: Awaitable[T]) -> T | None:
        """Awaits work on one job. If Redis or the store is away, only this job waits."""
        try:
            return await work
        except Unavailable as error:
            self._wait(export)
            log.warning("export_delayed", job_id=export.job, logger_name=export.logger, reason=str(error))
            return None

    def _wait(self, export: Export) -> None:
        export.num_failures += 1
        first_s = min(FIRST_WAIT_S, self._every_s)
        export.due = time.monotonic() + min(MOST_WAIT_S, first_s * 2 ** min(export.num_failures - 1, 16))

    async def _pass(self, tenant: str, logger: LoggerName, exports: Sequence[Export]) -> None:
        calls = await self._key(tenant, logger) is not None
        places = self._calling if calls else self._local  # a server that hangs keeps no file waiting
        async with places.one(tenant, 1.0, lambda: None):
            key = await self._key(tenant, logger)
            if (key is not None) != calls:
                return  # set or deleted meanwhile: the next look begins again
            each = [await self._safely(export, self._batch(export, offline=key is None)) for export in exports]
            batches = [batch for batch in each if batch]
            if batches:
                answers = await self._write(tenant, logger, key, [batch.order for batch in batches])
                for batch in batches:
                    if answer := answers.get(batch.export.job):
                        await self._safely(batch.export, self._settle(batch, answer.error))

    async def _key(self, tenant: str, logger: LoggerName) -> LoggerKey | None:
        return (await self._cells[0].bus.retrying(lambda: self._receivers.keys(tenant))).get(logger)

    async def _batch(self, export: Export, *, offline: bool) -> "ExportBatch | None":
        """The rows to write now; None if too few."""
        now = time.monotonic()
        found = await export.cell.job(export.tenant, export.job)
        if found is None:
            export.done = True
            return None
        events = await export.cell.events(found, after=export.read, limit=EVENTS_A_JOB)
        whole = len(events) < EVENTS_A_JOB
        final = found.state.status if whole and found.state.status in FINAL else None
        rows = rows_of(events)
        few = whole and offline and export.logger == "wandb" and len(rows) < FRAGMENT_ROWS and now < export.fragment_due
        export.due = now + (self._every_s if whole else 0.0)
        if events and export.read and events[0].sequence > export.read + 1:
            await self._tell(
                export, f"events {export.read + 1} to {events[0].sequence - 1} were dropped before it had them"
            )
        if events and not rows:
            export.read = events[-1].sequence
        if final is None and (few or not rows):
            return None
        export.fragment_due = now + FRAGMENT_PASSES * self._every_s
        own = next(one for one in found.spec.integrations if one.type == export.logger)
        order = JobRows(
            job=export.job,
            project=own.project,
            name=own.name,
            entity=own.entity,
            tags=own.tags,
            config=msgspec.to_builtins(found.spec.hyper) | {"model": found.spec.model or found.spec.base_model},
            rows=rows,
            final=final,
        )
        read = events[-1].sequence if events else export.read
        return ExportBatch(export, order, read, found.state.finished_at)

    async def _write(
        self, tenant: str, logger: LoggerName, key: LoggerKey | None, jobs: list[JobRows]
    ) -> dict[str, PassAnswer]:
        order = Order(
            folder=str(self._folder / tenant / logger),
            key=key.key if key else "",
            base_url=key.base_url if key else "",
            jobs=jobs,
        )
        try:
            if key is None:
                look = partial(check_disk, self._folder / tenant, self._disk_bytes)
                await self._threads.run(look, tenant, weight=1.0)
            else:
                async with asyncio.timeout(self._passes.timeout_s):
                    await self._servers.host_to_call(httpx.URL(key.base_url))
        except (CallFailed, OSError) as error:
            where = f"{key.base_url}: " if key else ""
            return {job.job: PassAnswer(job.job, error=f"{where}{error}") for job in jobs}
        return await self._passes.write(logger, order)

    async def _settle(self, batch: "ExportBatch", error: str) -> None:
        """Notes that the logger has a batch's rows, or tells the job why not."""
        export = batch.export
        if not error:
            # Only now, and only in memory: after a crash all rows of the job are sent again. The logger takes each once,
            # by the key of its event: what we would store to send it once, the logger stores anyway.
            export.read, export.done = batch.read, batch.order.final is not None
            export.num_failures, export.since, export.warning = 0, 0.0, ""
            return
        self._wait(export)
        log.warning("export_delayed", job_id=export.job, logger_name=export.logger, reason=error)
        export.since = export.since or time.time()
        if batch.ended_at is not None and time.time() - max(export.since, batch.ended_at) >= self._give_up_s:
            return await self._give_up(export, error)
        await self._tell(export, f"nothing can be written: {error}")

    async def _give_up(self, export: Export, reason: str) -> None:
        await self._tell(export, f"given up, its last figures are not written: {reason}")
        export.done = True

    async def _tell(self, export: Export, reason: str) -> None:
        """Writes a reason into the job's events, once."""
        if reason != export.warning:
            await notes.warn(export.cell, export.tenant, export.job, f"{export.logger}: {reason}", self._limits)
            export.warning = reason


@dataclass(frozen=True, slots=True)
class ExportBatch:
    """The rows of one job that a pass writes."""

    export: Export
    order: JobRows
    read: int  # sequence number of the last event that was looked at
    ended_at: int | None
