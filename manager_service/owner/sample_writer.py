"""Writes samples to object storage, at best effort, outside of an owner's passes: one object a step or evaluation.

    a step's or an evaluation's script is committed ─► follow ─► run: write the object, delete those of dropped versions

An owner that dies loses what it had not written, and the answers so far of running evaluations; objects that it had not deleted
go when their job is archived. While the storage is away, samples wait in memory.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import get_args

import structlog

from common.cancellation import running
from common.store.objects import Objects, patiently
from manager_service.owner.jobs.changes import Changes
from manager_service.records.archive import SampleFiles
from manager_service.records.sample_records import SampleKind

MAX_CALLS = 8
"""Calls of the storage under way at once, so that slow ones hold up few others."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of samples that wait at most; what comes beyond them is lost."""

DRAIN_S = 3.0
"""Seconds that an owner that is told to stop waits for its last samples."""

log = structlog.get_logger()


class SampleWriter:
    """Works for the jobs of an owner."""

    def __init__(self, objects: Objects, base_model: str) -> None:
        self._files = {kind: SampleFiles(objects, base_model, kind) for kind in get_args(SampleKind)}
        self._calls = asyncio.Queue[tuple[Callable[[], Awaitable[None]], int]]()  # each with the bytes that it writes
        self._waiting_bytes = 0

    def follow(self, changes: Changes) -> None:
        """Takes in what was committed."""
        for each in changes.samples:
            num_bytes = len(each.records)
            if self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
                log.warning("samples_lost", job_id=each.job, version=each.version, reason="the storage is slow or away")
                continue
            self._waiting_bytes += num_bytes
            write = self._files[each.kind].write
            self._calls.put_nowait((partial(write, each.tenant, each.job, each.version, each.records), num_bytes))
        for dropped in changes.dropped_samples:
            for files in self._files.values():
                self._calls.put_nowait((partial(files.drop, *dropped), 0))

    async def drain(self) -> None:
        """Waits until all is written that was taken in, for a few seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._calls.join()

    async def run(self) -> None:
        """Works until cancelled."""
        async with running(*(self._work() for _ in range(MAX_CALLS))):
            await asyncio.Event().wait()

    async def _work(self) -> None:
        while True:
            call, num_bytes = await self._calls.get()
            await patiently(call)
            self._waiting_bytes -= num_bytes
            self._calls.task_done()
