"""Writes big TrainSteps to object storage before they are published, so that no commit waits for the storage.

    a batch is complete ─► admits: no, it is written ─► the storage has it ─► admits: yes ─► published with its path ─► forget

Until then the batch's results are pending entries: an owner that dies costs only the written payload, which is deleted with
its job's others.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from common.bus.bus import Bus
from common.bus.payloads import CLAIM_CHECK_BYTES
from common.cancellation import starting
from common.errors import Unavailable
from common.store.objects import Objects
from common.wire.messages import Message, TrainStep
from common.wire.operations import Operation
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.job import Job
from manager_service.records.run_records import is_run

TOKEN_BYTES, ROW_BYTES, REST_BYTES = 9, 512, 16 << 10
"""Most bytes of a TrainStep for a token, for the rest of a row, and for everything else."""

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class BigStep:
    """A TrainStep that is written, or is about to be."""

    step: TrainStep | None  # until it is written
    head: bytes  # of the step, as `_head` gives it
    path: str = ""  # empty until it is written


class BigSteps:
    """The big steps of an owner's jobs: at most one of each job."""

    def __init__(self, bus: Bus, objects: Objects) -> None:
        self._bus = bus
        self._objects = objects
        self._by_job: dict[str, BigStep] = {}
        self._unwritten: asyncio.Queue[tuple[str, BigStep]] = asyncio.Queue()

    def admits(self, job: Job) -> bool:
        """May the job's next step be published? Not if it is big and unwritten: `run` writes it."""
        numbers = job.next_batch()
        if not numbers or _most_bytes(job, numbers) <= CLAIM_CHECK_BYTES:
            return True
        step = job.next_step(numbers)
        big, head = self._by_job.get(job.id), _head(step)
        if big is None or big.head != head:
            big = self._by_job[job.id] = BigStep(step, head)
            self._unwritten.put_nowait((job.id, big))
        return bool(big.path)

    def path(self, message: Message) -> str:
        """The path of a message that was written; empty if it was not, so that it travels as it is."""
        big = self._by_job.get(message.job)
        return big.path if big and isinstance(message, TrainStep) and big.head == _head(message) else ""

    def forget(self, jobs: Iterable[str]) -> None:
        """Forgets steps that are published, or whose jobs this owner has lost. The storage keeps them."""
        for job in jobs:
            self._by_job.pop(job, None)

    async def run(self, written: Callable[[str], None]) -> None:
        """Writes, several at a time, until cancelled. Calls `written` with the job of each step that is ready."""
        async with starting() as start:
            while True:
                job, big = await self._unwritten.get()
                start(self._write(job, big, written))

    async def _write(self, job: str, big: BigStep, written: Callable[[str], None]) -> None:
        assert big.step is not None
        path = await self._bus.write_payload(big.step)
        big.step = None
        if self._by_job.get(job) is big:
            big.path = path
            written(job)
            return
        try:
            await self._objects.delete(path)
        except Unavailable as error:  # a payload that stays costs space and nothing else
            log.warning("not_deleted", path=path, reason=str(error))


def _most_bytes(job: Job, numbers: Iterable[int]) -> int:
    """At least what the step's payload has."""
    messages = [scored.message for number in numbers for scored in job.open.groups[number].rows()]
    return sum(TOKEN_BYTES * len(m.transcript) + ROW_BYTES + len(m.id) for m in messages) + REST_BYTES


def _head(step: TrainStep) -> bytes:
    """All of a step but its rows, which its trajectories' ids determine."""
    return msgspec.msgpack.encode((step.id, step.epoch, step.loss, step.trajectories, step.next_group))


SWEEP_EVERY_S = 3600.0
ENDED_S = 86_400.0
"""Age at which a payload of a completion or a grader run is of no use any more: these wait for minutes at most."""
OF_NO_OWNER = ("chat-", "grade-")


class PayloadTidier:
    """Works for the jobs of an owner. A payload that stays costs space and nothing else."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._jobs: set[str] = set()  # that may have payloads
        self._runs: dict[str, int] = {}  # run -> the first of its operations that had a payload since it was tidied
        self._untidy = asyncio.Queue[tuple[str, float]]()  # job or run, its oldest version or operation that is needed
        self._swept_at = float("-inf")

    def note(self, jobs: Iterable[str]) -> None:
        """Notes that jobs may have payloads."""
        self._jobs.update(jobs)

    def note_fetched(self, message: Message) -> None:
        """Notes a message that was fetched from object storage."""
        self._jobs.add(message.job)
        if isinstance(message, Operation):
            self._runs.setdefault(message.job, message.seq)

    def follow(self, changes: Changes) -> None:
        """Follows what was committed."""
        for job in self._jobs & changes.oldest_in_use.keys():
            self._untidy.put_nowait((job, changes.oldest_in_use[job]))
        for run in self._runs.keys() & changes.oldest_operations.keys():
            if changes.oldest_operations[run] > self._runs[run]:
                del self._runs[run]
                self._untidy.put_nowait((run, changes.oldest_operations[run]))
        for job in (*changes.finished, *changes.settled, *(moved.job for moved in changes.over)):
            self._jobs.discard(job)
            self._runs.pop(job, None)
            self._untidy.put_nowait((job, math.inf))

    async def run(self) -> None:
        """Deletes payloads that name old versions or operations, those that a crash left too, and others' old ones."""
        while True:
            job, oldest = "", 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._swept_at + SWEEP_EVERY_S - time.monotonic())):
                    job, oldest = await self._untidy.get()
            try:
                await (self._tidy(job, oldest) if job else self._sweep())
            except Unavailable as error:
                log.warning("not_deleted", job_id=job, reason=str(error))

    async def _tidy(self, job: str, oldest: float) -> None:
        for version in await self._objects.folders(f"payloads/{job}"):
            folder = f"payloads/{job}/{version}"
            if is_run(job) and oldest < math.inf:
                old = [path for path in await self._objects.paths(folder) if _operation(path) < oldest]
                await self._objects.delete(*old)
            elif int(version) < oldest:
                await self._objects.delete_folder(folder)

    async def _sweep(self) -> None:
        self._swept_at = time.monotonic()
        for job in await self._objects.folders("payloads"):
            if job.startswith(OF_NO_OWNER):
                await self._objects.delete_older(f"payloads/{job}", ENDED_S)


def _operation(path: str) -> float:
    """The number of the operation that a payload's path names, `…/<run>:<number>.…`; infinite if it names none."""
    number = path.rpartition(":")[2].partition(".")[0]
    return int(number) if number.isdecimal() else math.inf
